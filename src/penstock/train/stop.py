"""Stopping on Ctrl-C or SIGTERM: the signal only leaves a note, the loop ends after its step and saves."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Set by SIGINT or SIGTERM while it is installed."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, object] = {}

    def install(self) -> StopRequest:
        """Takes the signals over; without effect outside the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def remove(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
