"""A pipe that nobody writes to: its end means that the parent is gone, however it went."""

from __future__ import annotations

import os
import shutil
import signal
import threading

__all__ = ["hold"]


def hold(lifeline: int, reports: str) -> None:
    """Ends this process, and all it started, when the writing end of `lifeline` closes.

    The reports' folder, which the parent would have removed, goes too.
    """
    threading.Thread(target=_wait, args=(lifeline, reports), name="penstock-lifeline", daemon=True).start()


def _wait(lifeline: int, reports: str) -> None:
    try:
        os.read(lifeline, 1)
    except OSError:  # not our descriptor: started by something between us and the parent
        return
    shutil.rmtree(reports, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
