"""Handles signals for a while, but not those that the process was started to ignore."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], None]

MAY_BE_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""What a shell ignores for a job that it starts in the background (SIGINT), and nohup (SIGHUP): such a job is not to
end by what is meant for the one in the foreground. SIGTERM names its process, and always counts."""


@contextlib.contextmanager
def handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Calls `handler` for these signals inside its `with`. Nothing is changed outside the main thread.

    Those that the process was started to ignore stay ignored.
    """
    before: dict[signal.Signals, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number in MAY_BE_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                continue
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)  # type: ignore[arg-type]
