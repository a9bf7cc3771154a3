"""The launching process: it starts the ranks, watches them, ends them, and says which failure caused the others."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist

from penstock.host_process import limit_behind, num_cores
from penstock.rank_environment import SIGNALS, start_rank_server
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch.rank import FailureReport, run_rank
from penstock.runtime.mesh.interfaces import LOOPBACK, listen

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
"""Elsewhere not every system's libraries survive a fork, and ranks load torch for themselves."""
TICK = 0.03
"""Seconds between two looks at the ranks."""
STORE_STARTS = timedelta(seconds=10)
"""How long torch may take to connect to the store that is in the same process."""
TERM_GRACE = 1.5
"""Seconds from SIGTERM to SIGKILL."""
KILL_TAKES = 30.0
"""Seconds that the system may take to end a killed process, whose memory it takes back first."""
MISUSE = 2

SignalHandler = Callable[[int, FrameType | None], None]


def launch(
    program: Sequence[str],
    num_ranks: int,
    *,
    preload: Sequence[str] = ("penstock.runtime",),
    env: Mapping[str, str] | None = None,
    grace: float = 3.0,
    patience: float = TERM_GRACE,
    start_method: str = START_METHOD,
) -> int:
    """Runs a Python program once per rank on this machine, waits for all ranks, and returns the exit code.

    `program` is what `python` would be given: a script's path, or -m and a module's name, and the arguments. The
    ranks are forked from one process that has imported the modules of `preload`, so that they load torch once and not
    once each. These must start no threads and leave CUDA alone. With the `start_method` "fork" the ranks are forked
    from this process.

    0 when all ranks ended well; 2 when nothing could be started; else the code of the rank that failed first
    (1 for an exception, 128 + signal for a kill), after one message on stderr that names it. When one rank has
    failed, the others get `grace` seconds to end, then SIGTERM, then SIGKILL: none is left. Ctrl-C is passed on
    once and the ranks may leave in their own time (code 130 unless they do so well). After a second Ctrl-C the
    ranks get SIGTERM, and are killed soon (code 130). SIGTERM is passed on too, and the ranks are killed after
    `patience` seconds (code 143). If this process is killed the ranks end too. A job that was started to ignore a
    signal goes on ignoring it.

    `env` is added to the environment. Each rank gets a fair share of the cores in OMP_NUM_THREADS unless it is set.
    """
    environment = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks)), **os.environ, **(env or {})}
    try:
        with listen(0, LOOPBACK) as listener:
            environment |= {
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(listener.getsockname()[1]),
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has the store
            }
            if start_method == "forkserver":
                start_rank_server(preload, env or {})
            ranks = LaunchedRanks(grace, patience)
            code, said = ranks.run(program, num_ranks, environment, listener, start_method)
    except KeyboardInterrupt:
        code, said = 128 + signal.SIGINT, f"stopped by {signal.SIGINT.name}"
    except (RuntimeError, OSError) as error:  # torch's store raises the first kind
        limit = limit_behind(error)
        code, said = MISUSE, f"{error}{f'; {limit}' if limit else ''}"
    if said:
        print(f"penstock: {said}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def handled(handler: SignalHandler, *numbers: signal.Signals) -> Iterator[None]:
    """Calls `handler` for these signals inside its `with`. Nothing is changed outside the main thread.

    What the process was started to ignore stays ignored: Ctrl-C by a job in the background, SIGHUP by nohup.
    """
    before: dict[signal.Signals, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)  # type: ignore[arg-type]


HEAD_START = 0.5  # seconds by which a kill is older than the moment it was seen, at most
HINTS = {
    signal.SIGKILL: "; out of memory is the usual cause (the kernel's log, dmesg, tells): use smaller microbatches",
    signal.SIGBUS: "; a full /dev/shm or a truncated mapped file is the usual cause",
}


@dataclass
class LaunchedRank:
    """A rank, and how it ended.

    Attributes:
        code: its exit code, or minus the signal; None while it runs. time: when that was seen.
        asked: whether it was told to end. report: the exception by which it ends, which `reports` brings.
    """

    rank: int
    code: int | None = None
    time: float = 0.0
    asked: bool = False
    report: FailureReport | None = None
    process: Any = None
    reports: Connection | None = None

    def look(self) -> None:
        """Notes whether the rank has ended since the last look, and takes its report."""
        if self.code is None:
            self.code, self.time = self.process.exitcode, time.time()
        if self.report is None and self.reports is not None and self.reports.poll():
            with contextlib.suppress(EOFError):
                self.report = self.reports.recv()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the rank if it runs. SIGKILL goes to its processes too. After any other the rank may end
        in its own time, for which it needs the processes that it started, such as those of a DataLoader.
        """
        if self.code is None:
            self.asked = self.asked or number != signal.SIGINT
            if number == signal.SIGKILL:
                self.send_to_group(number)
            else:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(self.process.pid, number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Sends a signal to the rank and all processes that it started, even if the rank itself has ended."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it has not made its group yet, or nothing is left
            if self.code is None:
                self.process.kill()

    def wait_until_gone(self) -> None:
        """Returns once the process of a rank that failed or was killed has ended, or after KILL_TAKES seconds.

        If the server that ranks are forked from is killed, each rank gets an exit code while its process still runs.
        A rank that ended well some time ago is not looked up: its number may be another process's by now.
        """
        if self.code != 0:
            # OSError: the process is gone. AttributeError: elsewhere than on Linux, where no server forks ranks.
            with contextlib.suppress(OSError, AttributeError):
                connection.wait([Connection(os.pidfd_open(self.process.pid), writable=False)], KILL_TAKES)

    @property
    def has_failed(self) -> bool:
        return self.report is not None or self.asked or self.code not in (None, 0)

    @property
    def as_cause(self) -> tuple[bool, bool, float]:
        """Sorts failures: one that followed from another failure comes last, else the earlier one is first."""
        is_secondary = self.report.is_secondary if self.report else self.asked
        since = self.report.time if self.report else self.time - HEAD_START * ((self.code or 0) < 0)
        return is_secondary, self.report is None and self.asked, since

    def verdict(self) -> tuple[int, str]:
        """The exit code of a launch that failed by this rank, and why, for a person."""
        code, name = self.code or 0, f"rank {self.rank}"
        if self.report is not None:
            return max(code, 1), self.report.text
        if self.asked:
            return 1, f"{name} did not end and had to be stopped"
        if code > 0:
            return code, f"{name} ended with exit code {code} and reported no exception"
        number = signal.Signals(-code)
        return 128 + number, f"{name} was killed by {number.name}{HINTS.get(number, '')}"


def root_cause(ranks: Sequence[LaunchedRank]) -> LaunchedRank | None:
    """The earliest failure that was not the loss of a peer; else the earliest; None when nothing failed."""
    return min((each for each in ranks if each.has_failed), key=lambda each: each.as_cause, default=None)


class LaunchedRanks:
    """The ranks of one launch."""

    def __init__(self, grace: float, patience: float) -> None:
        self._grace, self._patience = grace, patience
        self._ranks: list[LaunchedRank] = []
        self._signals: list[signal.Signals] = []

    def run(
        self,
        program: Sequence[str],
        num_ranks: int,
        environment: Mapping[str, str],
        listener: socket.socket,
        start_method: str,
    ) -> tuple[int, str]:
        """Starts the ranks and waits for their end; returns the exit code and the message of the launch."""
        try:
            self._start(program, num_ranks, environment, start_method)
            with handled(self._note, *SIGNALS):
                store = dist.TCPStore(
                    LOOPBACK, 0, is_master=True, timeout=STORE_STARTS, wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )  # fmt: skip
                self._watch()
                del store
            return self._verdict()
        finally:
            if any(each.has_failed or each.code is None for each in self._ranks):
                for each in self._ranks:
                    each.send_to_group(signal.SIGKILL)
                for each in self._ranks:
                    each.wait_until_gone()

    def _start(
        self, program: Sequence[str], num_ranks: int, environment: Mapping[str, str], start_method: str
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        first = None
        if not sys.flags.safe_path:
            first = os.getcwd() if program[0] == "-m" else str(Path(program[0]).resolve().parent)
        with contextlib.ExitStack() as opened, _no_main_module():
            streams = [opened.enter_context(Connection(os.dup(number), readable=False)) for number in (1, 2)]
            for rank in range(num_ranks):
                reports, writing = context.Pipe(duplex=False)
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                args = rank, program, first, own, streams, writing
                process = context.Process(target=run_rank, args=args, name=f"rank {rank}")
                try:
                    process.start()
                except EOFError:
                    raise RuntimeFailure("the process that ranks are forked from has ended") from None
                writing.close()
                self._ranks.append(LaunchedRank(rank, process=process, reports=reports))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))
        if self._signals == [signal.SIGINT]:
            self._signal(signal.SIGINT)

    def _watch(self) -> None:
        """Returns when all ranks have ended, which they do soon after one fails."""
        while not self._all_ended():
            if self._signals and self._signals != [signal.SIGINT]:
                return self._stop(0.0, TERM_GRACE if self._signals[-1] == signal.SIGINT else self._patience)
            if any(each.has_failed for each in self._ranks):
                return self._stop(self._grace, TERM_GRACE)
        return None

    def _stop(self, grace: float, patience: float) -> None:
        self._wait(grace)
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, math.inf)):
            self._signal(number)
            self._wait(seconds)

    def _signal(self, number: signal.Signals) -> None:
        for each in self._ranks:
            each.send(number)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._all_ended() and time.monotonic() < end:
            pass

    def _all_ended(self) -> bool:
        """Waits until something happens, at most a moment. Returns whether no rank has still to end."""
        connection.wait([each.process.sentinel for each in self._ranks if each.code is None], TICK)
        for each in self._ranks:
            each.look()
        return all(each.code is not None for each in self._ranks)

    def _verdict(self) -> tuple[int, str]:
        root = root_cause(self._ranks)
        if root is None:
            return 0, ""
        report = root.report
        if self._signals and (self._signals[-1] != signal.SIGINT or report is None or report.is_secondary):
            number = self._signals[0]
            return 128 + number, f"stopped by {number.name}"
        return root.verdict()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Hides the main module, which multiprocessing would run in each rank before anything else."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
