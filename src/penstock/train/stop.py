"""Stops on Ctrl-C or SIGTERM. The signal only sets a flag; the loop ends after its step and saves."""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType

from penstock.runtime.launch.parent import handled

SAME = 1.0
"""Seconds in which a second signal counts as the same one, as a terminal and a launcher may both pass it on."""


class StopRequest:
    """Set by SIGINT or SIGTERM inside its `with`. A later second signal ends the process at once by
    KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._number = signal.SIGINT
        self._handled = contextlib.ExitStack()

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process that ends by the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self._number

    def __enter__(self) -> StopRequest:
        self._handled.enter_context(handled(self._note, signal.SIGINT, signal.SIGTERM))
        return self

    def __exit__(self, *error: object) -> None:
        self._handled.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at, self._number = now, signal.Signals(number)
        elif now - self._asked_at > SAME:
            raise KeyboardInterrupt
