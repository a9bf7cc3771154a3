"""The ranks' processes as the launching one sees them: their start, their signals, their ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from penstock.runtime.launch.ahead import WaitingServer
from penstock.runtime.launch.cause import End
from penstock.runtime.launch.held_stderr import held_text
from penstock.runtime.launch.report import FailureReport

__all__ = ["RankProcess", "RankServer"]

SESSION_ENDS = 2.0
"""Seconds that killed processes of a rank's session may take to be gone."""


class RankServer:
    """`fork_server`, of which the ranks are children: what it was asked, and what it has said of them."""

    def __init__(
        self,
        order: Mapping[str, Any],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        stderr: Path,
        waiting: WaitingServer | None,
    ) -> None:
        self.pids: list[int] | None = None
        self.ends: dict[int, tuple[int, float]] = {}
        self.lost = False
        self._said = b""
        self._stderr = stderr
        with stderr.open("wb") as held:
            self._process: subprocess.Popen[bytes] | WaitingServer
            if waiting is not None:
                self._process = waiting
                self._channel = waiting.start(order, environment, descriptors, held.fileno())
            else:
                self._process, self._channel = _started(order, environment, descriptors, held)
        self._channel.setblocking(False)
        self._words = select.poll()  # which takes any number that a descriptor may have
        self._words.register(self._channel, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Returns when it has something to say, at the latest after so many seconds."""
        self._words.poll(1e3 * seconds)

    def look(self) -> None:
        """Takes what it has said since; `lost` where it has ended, which it does not before it is closed."""
        with contextlib.suppress(BlockingIOError):
            while not self.lost:
                try:
                    part = self._channel.recv(1 << 16)
                except ConnectionResetError:
                    part = b""
                self.lost = not part
                self._said += part
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "pids" in message:
                self.pids = message["pids"]
            else:
                self.ends[message["rank"]] = (message["code"], message["time"])

    def why(self) -> str:
        """How it ended, once it is lost, and what it wrote."""
        code = self._process.wait()
        said = self._stderr.read_text(errors="replace").strip()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process that ranks are forked from {how}" + (f"\n{said}" if said else "")

    def close(self) -> None:
        """Ends it, and lets the ranks' process numbers go; at once where it has not forked yet."""
        if self.pids is None:
            self._process.kill()
        self._channel.close()
        self._process.wait()


def _started(
    order: Mapping[str, Any], environment: Mapping[str, str], descriptors: Sequence[int], stderr: IO[bytes]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A fork server of its own, which has its order; and the channel to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(theirs.fileno())],
            env=dict(environment),
            pass_fds=[*descriptors, theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
        )
    with contextlib.suppress(OSError):  # it has ended already, which is seen next
        ours.sendall(json.dumps({**order, "descriptors": list(descriptors)}).encode() + b"\n")
    return process, ours


class RankProcess:
    """A rank in a session of its own, so that the terminal's Ctrl-C reaches only the parent.

    Its end is seen without reaping it: the process number, which is its group's too, stays taken until the server is
    closed.
    """

    def __init__(self, rank: int, pid: int, server: RankServer) -> None:
        self.rank, self._pid, self._server = rank, pid, server
        self.asked = False

    def ended(self) -> bool:
        """Whether the server has said that it has ended."""
        return self.rank in self._server.ends

    def interrupt(self) -> None:
        """Ctrl-C for this rank alone, not for what it started."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGINT)

    def stop(self, number: signal.Signals) -> None:
        """A signal that means the end, to the rank and all it started, if it still runs."""
        if not self.ended():
            self.asked = True
            self._to_group(number)

    def failed(self) -> bool:
        """Whether it has ended and not well."""
        return self.ended() and self._server.ends[self.rank][0] != 0

    def end(self, reports: str) -> End:
        """How it ended."""
        code, at = self._server.ends[self.rank]
        return End(
            self.rank, code, at, self.asked, FailureReport.load(reports, self.rank), held_text(reports, self.rank)
        )

    def end_family(self) -> None:
        """Kills the rank and what it left running: its group, and its delegates and its controller, which have groups
        of their own and would end by themselves only once they have started.
        """
        self._to_group(signal.SIGKILL)
        end = time.monotonic() + SESSION_ENDS
        while left := _members(self._pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                return
            time.sleep(0.005)

    def _to_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)


def _members(session: int) -> list[int]:
    """Processes of a session that run; none are found where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, of = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found
