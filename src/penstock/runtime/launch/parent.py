"""The launching process: it has a server start the ranks, passes signals on, and says how all ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from penstock.planning.threads import num_cores
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch.rank import LaunchOrder
from penstock.runtime.launch.server import MISUSE, TERM_GRACE, end_session, listen, serve

FIRST_OPTIMIZER = "penstock.runtime.launch.child:load_optimizer"
"""For `preload`, where ranks train: the first optimizer of a process takes a second."""

SignalHandler = Callable[[int, FrameType | None], None]

MAY_BE_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""What a shell ignores for a job that it starts in the background (SIGINT), and nohup (SIGHUP): such a job is not to
end by what is meant for the one in the foreground. SIGTERM names its process, and always counts."""


def launch(
    program: Sequence[str],
    num_ranks: int,
    *,
    preload: Sequence[str] = ("penstock.runtime",),
    waiting: RankServer | None = None,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = 3.0,
    patience: float = TERM_GRACE,
) -> int:
    """Runs a Python program once per rank on this machine, waits for all ranks, and returns the exit code.

    `program` is what `python` would be given: a script's path, or -m and a module's name, and the arguments. The
    ranks are forked from one process that has imported the modules of `preload`, so that they load torch once and not
    once each; of `MODULE:FUNCTION` the function is called, too. They must start no threads and leave CUDA alone.
    `waiting` is that process where it was forked ahead; it serves one launch.

    0 when all ranks ended well; 2 when nothing could be started; else the code of the rank that failed first
    (1 for an exception, 128 + signal for a kill), after one message on stderr that names it. When one rank has
    failed, the others get `grace` seconds to end, then SIGTERM, then SIGKILL: none is left. Ctrl-C is passed on
    once and the ranks may leave in their own time (code 130 unless they do so well); a second one stops them. SIGTERM
    is passed on too, and after `patience` seconds they are killed (code 143). If this process is killed the ranks end
    too. A job in the background, which is started to ignore Ctrl-C, or SIGHUP by nohup, goes on ignoring them.

    `port` is the store's (any free one without), `env` is added to the environment. Each rank gets a fair share
    of the cores in OMP_NUM_THREADS unless it is set.
    """
    try:
        _check(program, num_ranks)
        listen(port).close()
        threads = str(max(1, num_cores() // num_ranks))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **(env or {})}
        order = LaunchOrder(
            tuple(program), num_ranks, _first_on_path(program), environment, os.getcwd(), port, grace, patience
        )
        code, said = (waiting or RankServer.start(preload, order)).carry_out(order)
    except (RuntimeFailure, OSError) as error:
        code, said = MISUSE, f"penstock: {error}"
    if said:
        print(said, file=sys.stderr, flush=True)
    return code


class RankServer:
    """The process that ranks are forked from (`server.serve`), as the launching process sees it."""

    def __init__(self, pid: int, channel: Connection) -> None:
        self._pid, self._channel = pid, channel
        self._code: int | None = None
        self._pids: list[int] = []
        self._passed_on: signal.Signals | None = None

    @classmethod
    def fork(cls, preload: Sequence[str]) -> RankServer:
        """Forks it from this process, which has no thread of Python's but this one and has not used CUDA.

        Ranks then have what this process has loaded. Not for a program whose own code may have run: its threads and
        seeds would be in every rank.
        """
        ours, theirs = multiprocessing.Pipe()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
                serve(theirs, preload)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)  # nothing of the program that was forked runs on here
        theirs.close()
        return cls(pid, ours)

    @classmethod
    def start(cls, preload: Sequence[str], order: LaunchOrder) -> RankServer:
        """Starts an interpreter of its own, which loads torch."""
        ours, theirs = multiprocessing.Pipe()
        path = [] if order.first_on_path is None else [order.first_on_path]
        words = (
            f"import sys; sys.path[: not sys.flags.safe_path] = {path!r}; "
            "from multiprocessing.connection import Connection; from penstock.runtime.launch.server import serve; "
            f"serve(Connection({theirs.fileno()}), {list(preload)!r})"
        )
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            return cls(os.posix_spawn(sys.executable, [sys.executable, "-c", words], order.environment), ours)

    def carry_out(self, order: LaunchOrder) -> tuple[int, str]:
        """Has it start ranks, and returns their exit code and message once all have ended."""
        try:
            with handled(self._pass_on, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._channel.send(order)
                answer = self._channel.recv()
                if isinstance(answer, list):
                    self._pids = answer
                    answer = self._channel.recv()
                code, said = answer
                return code, said
        except (EOFError, OSError):
            return self._how_it_was_lost()
        finally:
            self._channel.close()
            self._wait()

    def _how_it_was_lost(self) -> tuple[int, str]:
        code = self._wait()
        for pid in self._pids:
            end_session(pid)
        if self._passed_on is not None and not self._pids:
            said = "interrupted" if self._passed_on is signal.SIGINT else f"stopped by {self._passed_on.name}"
            return 128 + self._passed_on, f"penstock: {said}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return 1, f"penstock: the process that ranks are forked from {how}"

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on to the server. One that has no ranks yet is ended."""
        self._passed_on = signal.Signals(number)
        self.kill(self._passed_on if self._pids else signal.SIGKILL)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends it a signal, by default the one that ends it at once."""
        if self._code is None:
            os.kill(self._pid, number)

    def discard(self) -> None:
        """Ends it where it was not needed; nothing where it was."""
        self.kill()
        self._channel.close()
        self._wait()

    def _wait(self) -> int:
        """Its exit code once it has ended, minus the signal of one that was killed."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


@contextlib.contextmanager
def handled(handler: SignalHandler, *numbers: signal.Signals) -> Iterator[None]:
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


def _check(program: Sequence[str], num_ranks: int) -> None:
    """Raises `RuntimeFailure` for what can't be started."""
    if num_ranks < 1:
        raise RuntimeFailure(f"got {num_ranks} ranks: at least 1 is needed")
    if not program or (program[0] == "-m" and len(program) < 2):
        raise RuntimeFailure(f"got the program {list(program)}: give a script's path, or -m and a module's name")
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise RuntimeFailure(f"{program[0]} cannot be started: there is no such file; give a Python script's path")


def _first_on_path(program: Sequence[str]) -> str | None:
    """What `python -m NAME` or `python FILE` has first on its path."""
    if sys.flags.safe_path:
        return None
    return os.getcwd() if program[0] == "-m" else str(Path(program[0]).resolve().parent)
