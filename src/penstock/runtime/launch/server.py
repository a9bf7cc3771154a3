"""The process that ranks are forked from. It loads torch once, forks the ranks, watches them, and ends them.

No thread of ours and no CUDA context is there when it forks. It leads a session of its own, so that the terminal's
Ctrl-C reaches only the launching process, which passes it on.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from penstock.host_process import limit_behind
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch.failures import FailureKind, FailureReport, RankExit, exit_code, explain, root_cause
from penstock.runtime.launch.rank import LaunchOrder, run_rank
from penstock.runtime.mesh import interfaces
from penstock.runtime.mesh.interfaces import LOOPBACK

TICK = 0.03
"""Seconds between two looks at the ranks."""
SESSION_ENDS = 20.0
"""Seconds that killed processes of a rank's session may take to be gone, on a busy machine."""
STORE_STARTS = timedelta(seconds=10)
"""How long torch may take to connect to the store that is in the same process."""
TERM_GRACE = 1.5
"""Seconds from SIGTERM to SIGKILL."""
MISUSE = 2
BY_AN_INTERRUPT = (FailureKind.INTERRUPT, FailureKind.LOST)
"""How ranks fail that Ctrl-C has ended, or that lost such a rank."""

START_METHOD = "fork" if sys.platform == "linux" else "spawn"
"""Elsewhere not every system's libraries survive a fork, and ranks load torch for themselves."""


def serve(launching: Connection, preload: Sequence[str]) -> None:
    """Loads the modules of `preload`, waits for an order, and carries it out.

    Says the ranks' process numbers, and then the exit code and the message of the launch.
    """
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.register_at_fork(after_in_child=launching.close)  # it tells the launching process when this one is gone
    for each in preload:
        name, _, function = each.partition(":")
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()
    gc.collect()
    gc.freeze()  # a rank's collections then leave alone what it shares with the others
    with contextlib.suppress(EOFError, ConnectionError):  # the launching process needs no ranks, or is gone
        order: LaunchOrder = launching.recv()
        try:
            launching.send(LaunchedRanks(order, launching).run())
        except (RuntimeError, OSError) as error:  # torch's store raises the first kind
            limit = limit_behind(error)
            launching.send((MISUSE, f"penstock: {error}{f'; {limit}' if limit else ''}"))


def listen(port: int | None) -> socket.socket:
    """A listening socket on loopback; any free port for None. Raises `RuntimeFailure` when the port can't be had."""
    if port is not None and not 0 < port < 65536:
        raise RuntimeFailure(f"port {port}: a port is a number from 1 to 65535; leave it out for any free one")
    try:
        return interfaces.listen(port or 0, LOOPBACK)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RuntimeFailure(
                f"port {port} is in use by another program: choose another, or leave it out for any free one"
            ) from None
        raise RuntimeFailure(f"port {port} cannot be used: {error.strerror}; leave it out for any free one") from None


class RankProcess:
    """A rank and how it ended.

    Attributes:
        pid: its number. sentinel: a descriptor that becomes readable when it ends. asked: whether it was told to end.
    """

    def __init__(self, rank: int, process: BaseProcess, reports: Connection) -> None:
        self.rank, self._process, self._reports = rank, process, reports
        assert process.pid is not None
        self.pid, self.sentinel = process.pid, process.sentinel
        self.asked = False
        self._said: FailureReport | None = None
        self._ended_at: float | None = None

    def look(self) -> None:
        """Takes what happened to it since."""
        code = self._process.exitcode
        if self._said is None and self._reports.poll():
            with contextlib.suppress(EOFError):
                self._said = self._reports.recv()
        if code is not None and self._ended_at is None:
            self._ended_at = time.time()

    @property
    def has_ended(self) -> bool:
        return self._ended_at is not None

    @property
    def is_lost(self) -> bool:
        """Whether it has failed, or has reported why it is about to end."""
        return self._said is not None or (self.has_ended and self._process.exitcode != 0)

    def end(self) -> RankExit:
        """How it ended."""
        assert self._process.exitcode is not None
        assert self._ended_at is not None
        return RankExit(self.rank, self._process.exitcode, self._ended_at, self.asked, self._said)

    def interrupt(self) -> None:
        """Ctrl-C for this rank alone, not for what it started."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGINT)

    def stop(self, number: signal.Signals) -> None:
        """A signal that means the end, to the rank and all it started, if it still runs."""
        if not self.has_ended:
            self.asked = True
            signal_group(self.pid, number)


def signal_group(pid: int, number: signal.Signals) -> None:
    """A signal to a rank and what it started."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it has not made its group yet, or is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_session(pid: int) -> None:
    """Kills what a rank left running: its group, and its delegates and its controller, which have groups of their
    own and would end by themselves only once they have started.
    """
    signal_group(pid, signal.SIGKILL)
    end = time.monotonic() + SESSION_ENDS
    while (left := _members(pid)) and time.monotonic() < end:
        for each in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.005)


def _members(session: int) -> list[int]:
    """Processes of a session that run; none are found where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, of = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


class LaunchedRanks:
    """The ranks of one launch."""

    def __init__(self, order: LaunchOrder, launching: Connection) -> None:
        self._order, self._launching = order, launching
        self._ranks: list[RankProcess] = []
        self._interrupts = 0
        self._terminated: signal.Signals | None = None

    def run(self) -> tuple[int, str]:
        """Forks the ranks and waits for their end; returns the exit code and the message of the launch."""
        try:
            self._start()
            self._watch()
            return self._verdict()
        finally:
            if any(each.is_lost or each.asked or not each.has_ended for each in self._ranks):
                for each in self._ranks:
                    end_session(each.pid)

    def _start(self) -> None:
        order = self._order
        context: Any = multiprocessing.get_context(START_METHOD)
        with listen(order.port) as listener:
            os.chdir(order.folder)
            os.environ.clear()
            os.environ |= {
                **order.environment,
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(listener.getsockname()[1]),
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
                "WORLD_SIZE": str(order.num_ranks),
                "LOCAL_WORLD_SIZE": str(order.num_ranks),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has the store
            }
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, self._note)
            for rank in range(order.num_ranks):
                reports, writing = context.Pipe(duplex=False)
                process = context.Process(target=run_rank, args=(rank, order, writing))
                process.start()
                writing.close()
                self._ranks.append(RankProcess(rank, process, reports))
            self._store = dist.TCPStore(
                LOOPBACK,
                0,
                is_master=True,
                timeout=STORE_STARTS,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self._launching.send([each.pid for each in self._ranks])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        else:
            self._terminated = signal.Signals(number)

    def _watch(self) -> None:
        """Returns when all ranks have ended, which they do soon after one fails."""
        passed_on = False
        while not self._all_ended():
            if self._interrupts and not passed_on:
                passed_on = True
                for each in self._ranks:
                    each.interrupt()
            if self._interrupts > 1:
                return self._stop(0.0, TERM_GRACE)
            if self._terminated:
                return self._stop(0.0, self._order.patience)
            if any(each.is_lost for each in self._ranks):
                return self._stop(self._order.grace, TERM_GRACE)
        return None

    def _stop(self, grace: float, patience: float) -> None:
        self._wait(grace)
        for each in self._ranks:
            each.stop(signal.SIGTERM)
        self._wait(patience)
        for each in self._ranks:
            each.stop(signal.SIGKILL)
        while not self._all_ended():
            pass

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._all_ended() and self._interrupts < 2 and time.monotonic() < end:
            pass

    def _all_ended(self) -> bool:
        """Waits until something happens, at most a moment. Returns whether no rank has still to end.

        Raises EOFError if the launching process is gone.
        """
        running = [each.sentinel for each in self._ranks if not each.has_ended]
        connection.wait([self._launching, *running], TICK)
        if self._launching.poll():
            self._launching.recv()  # which raises: the launching process says nothing any more
        for each in self._ranks:
            each.look()
        return all(each.has_ended for each in self._ranks)

    def _verdict(self) -> tuple[int, str]:
        ends = [each.end() for each in self._ranks]
        root = root_cause(ends)
        if root is None:
            return 0, ""
        if self._terminated:
            return 128 + self._terminated, f"penstock: stopped by {self._terminated.name}"
        if self._interrupts and (root.asked or root.said is None or root.said.kind in BY_AN_INTERRUPT):
            return 128 + signal.SIGINT, "penstock: interrupted"
        return exit_code(root), explain(root, ends)
