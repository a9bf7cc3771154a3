"""Stopping on Ctrl-C or SIGTERM: the signal only leaves a note, the loop ends after its step and saves."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType

SAME = 1.0
"""Seconds in which a second signal counts as the same wish: a terminal and a launcher may both pass it on."""


class StopRequest:
    """Set by SIGINT or SIGTERM inside its `with`; asked again later, it ends at once by KeyboardInterrupt."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > SAME:
            raise KeyboardInterrupt
