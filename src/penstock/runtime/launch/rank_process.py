"""One child: its start, its signals, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch.cause import End
from penstock.runtime.launch.held_stderr import held_text
from penstock.runtime.launch.report import FailureReport

__all__ = ["RankProcess"]

SESSION_ENDS = 2.0
"""Seconds that killed processes of a rank's session may take to be gone."""


class RankProcess:
    """A rank in a session of its own, so that the terminal's Ctrl-C reaches only the parent.

    Its end is seen without reaping it: the process number, which is its group's too, stays taken until `reap`.
    Raises `RuntimeFailure` when the command cannot be started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        stderr: BinaryIO,
    ) -> None:
        self.rank = rank
        self.asked = False
        self.ended_at: float | None = None
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                pass_fds=descriptors,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )
        except OSError as error:
            raise RuntimeFailure(f"{command[0]} cannot be started: {error.strerror}; give a program's path") from None

    def ended(self) -> bool:
        """Whether it has ended; the time it was first seen is kept."""
        if self.ended_at is None and self._seen_dead():
            self.ended_at = time.time()
        return self.ended_at is not None

    def interrupt(self) -> None:
        """Ctrl-C for this rank alone, not for what it started."""
        if not self.ended():
            self._process.send_signal(signal.SIGINT)

    def stop(self, number: signal.Signals) -> None:
        """A signal that means the end, to the rank and all it started, if it still runs."""
        if not self.ended():
            self.asked = True
            self._to_group(number)

    def failed(self) -> bool:
        """Whether it has ended and not well."""
        if not self.ended():
            return False
        if not hasattr(os, "waitid"):
            return self._process.returncode != 0
        state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return state is None or state.si_code != os.CLD_EXITED or state.si_status != 0

    def reap(self, reports: str, *, with_family: bool) -> End:
        """Waits for the end and says how it was; `with_family` kills what the rank left running."""
        if with_family:
            self._to_group(signal.SIGKILL)
            self._end_session()
        code = self._process.wait()
        report, held = FailureReport.load(reports, self.rank), held_text(reports, self.rank)
        return End(self.rank, code, self.ended_at or time.time(), self.asked, report, held)

    def _seen_dead(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _end_session(self) -> None:
        """Kills what the rank started in groups of their own: its delegates and its controller, which would end by
        themselves only once they have started.
        """
        end = time.monotonic() + SESSION_ENDS
        while self._process.returncode is None and (left := _members(self._process.pid)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                return
            time.sleep(0.005)

    def _to_group(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


def _members(session: int) -> list[int]:
    """Processes of a session that run, its leader left out; none are found where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, of = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and int(path.parent.name) != session and state not in "ZX":
                found.append(int(path.parent.name))
    return found
