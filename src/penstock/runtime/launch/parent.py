"""The parent of the ranks: starts them, watches them, ends them, and says why."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from penstock.host_process import limit_behind
from penstock.planning.threads import num_cores
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch.child import LaunchEnvironment, held_path, held_text
from penstock.runtime.launch.failures import FailureKind, FailureReport, RankExit, exit_code, explain, root_cause
from penstock.runtime.launch.fork_server import WaitingServer
from penstock.runtime.mesh import interfaces
from penstock.runtime.mesh.interfaces import LOOPBACK

HOST = LOOPBACK


def listen(port: int | None) -> socket.socket:
    """A listening socket on loopback; any free port for None. Raises `RuntimeFailure` when the port can't be had."""
    if port is not None and not 0 < port < 65536:
        raise RuntimeFailure(f"port {port}: a port is a number from 1 to 65535; leave it out for any free one")
    try:
        return interfaces.listen(port or 0, HOST)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RuntimeFailure(
                f"port {port} is in use by another program: choose another, or leave it out for any free one"
            ) from None
        raise RuntimeFailure(f"port {port} cannot be used: {error.strerror}; leave it out for any free one") from None


SignalHandler = Callable[[int, FrameType | None], None]

MAY_BE_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""What a shell ignores for a job that it starts in the background (SIGINT), and nohup (SIGHUP): such a job is not to
end by what is meant for the one in the foreground. SIGTERM names its process, and always counts."""


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


SESSION_ENDS = 20.0
"""Seconds that killed processes of a rank's session may take to be gone, on a busy machine."""


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

    def end(self, reports: str) -> RankExit:
        """How it ended."""
        code, at = self._server.ends[self.rank]
        return RankExit(
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


FIRST_OPTIMIZER = "penstock.runtime.launch.child:load_optimizer"
"""For `preload`, where ranks train: the first optimizer of a process takes a second."""

TICK = 0.03  # seconds between two looks at the ranks
TERM_GRACE = 1.5  # seconds from SIGTERM to SIGKILL
MISUSE = 2


def launch(
    program: Sequence[str],
    num_ranks: int,
    *,
    preload: Sequence[str] = ("penstock.runtime",),
    waiting: WaitingServer | None = None,
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
        with contextlib.ExitStack() as stack:
            _check(program, num_ranks)
            reports = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True))
            signals = StopSignals()
            stack.enter_context(handled(signals, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            family = RankProcesses(reports, grace, patience, signals, waiting)
            stack.callback(family.end)
            family.start(program, preload, num_ranks, port, {**os.environ, **(env or {})})
            family.watch()
            return family.verdict()
    except (RuntimeFailure, OSError) as error:
        limit = limit_behind(error)
        print(f"penstock: {error}{f'; {limit}' if limit else ''}", file=sys.stderr, flush=True)
        return MISUSE


class StopSignals:
    """How often this process was asked to stop, and by which signal last."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminated: signal.Signals | None = None

    def __call__(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.terminated = signal.Signals(number)


class RankProcesses:
    """The ranks of one launch."""

    def __init__(
        self, reports: str, grace: float, patience: float, signals: StopSignals, waiting: WaitingServer | None
    ) -> None:
        self._reports, self._grace, self._patience, self._signals = reports, grace, patience, signals
        self._waiting = waiting
        self._server: RankServer | None = None
        self._ranks: list[RankProcess] = []
        self._lifeline: int | None = None
        self._interrupted_at: float | None = None  # when Ctrl-C was passed on

    def start(
        self,
        program: Sequence[str],
        preload: Sequence[str],
        num_ranks: int,
        port: int | None,
        environment: Mapping[str, str],
    ) -> None:
        """Starts the process that ranks are forked from. Raises `RuntimeFailure` or `OSError`."""
        with listen(port) as listener:
            reading, self._lifeline = os.pipe()
            stderr, store = os.dup(2), listener.fileno()
            common: dict[str, str] = {
                **_thread_share(environment, num_ranks),
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(listener.getsockname()[1]),
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
            }
            ranks: list[dict[str, Any]] = []
            for rank in range(num_ranks):
                launch_env = LaunchEnvironment(self._reports, reading, stderr, store if rank == 0 else None)
                ranks.append(
                    {
                        "environment": {"RANK": str(rank), "LOCAL_RANK": str(rank), **launch_env.variables()},
                        "stderr": str(held_path(self._reports, rank)),
                        "closes": [] if rank == 0 else [store],
                    }
                )
            order: dict[str, Any] = {
                "program": list(program),
                "preload": list(preload),
                "reports": self._reports,
                "ranks": ranks,
            }
            try:
                self._server = RankServer(
                    order,
                    {**environment, **common},
                    (reading, stderr, store),
                    Path(self._reports, "server.stderr"),
                    self._waiting,
                )
            finally:
                os.close(reading)
                os.close(stderr)

    def watch(self) -> None:
        """Returns when all ranks have ended, which they do soon after one fails."""
        while not self._all_ended():
            if not self._ranks and (self._signals.interrupts or self._signals.terminated):
                return None  # there is nobody yet to pass it on to
            if self._signals.interrupts and self._interrupted_at is None:
                self._interrupted_at = time.time()
                for each in self._ranks:
                    each.interrupt()
            if self._signals.interrupts > 1:
                return self._stop(0.0)
            if self._signals.terminated:
                return self._stop(0.0, self._patience)
            if any(self._is_lost(each) for each in self._ranks):
                return self._stop(self._grace)
            self._there.wait(TICK)
        return None

    def verdict(self) -> int:
        """Prints the message if a rank failed, and returns the exit code."""
        ended = bool(self._ranks) and all(each.ended() for each in self._ranks)
        ends = []
        if ended:
            if any(each.asked or each.failed() for each in self._ranks):
                for each in self._ranks:
                    each.end_family()
            ends = [each.end(self._reports) for each in self._ranks]
            self._ranks = []
        root = root_cause(ends)
        if ended and root is None:
            print(*(end.held for end in ends), sep="", end="", file=sys.stderr, flush=True)
            return 0
        if self._signals.terminated:
            print(f"penstock: stopped by {self._signals.terminated.name}", file=sys.stderr, flush=True)
            return 128 + self._signals.terminated
        if self._signals.interrupts and (root is None or root.asked or root.secondary or self._was_interrupt(root)):
            print("penstock: interrupted", file=sys.stderr, flush=True)
            return 128 + signal.SIGINT
        if root is None:
            print(f"penstock: {self._there.why()}", file=sys.stderr, flush=True)
            return 1
        print(explain(root, ends), file=sys.stderr, flush=True)
        return exit_code(root)

    def end(self) -> None:
        """Whatever happened, nothing stays behind."""
        for each in self._ranks:
            each.end_family()
        if self._server is not None:
            self._server.close()
        if self._lifeline is not None:
            os.close(self._lifeline)

    @property
    def _there(self) -> RankServer:
        if self._server is None:
            raise RuntimeFailure("ranks are watched before they were started")
        return self._server

    def _is_lost(self, each: RankProcess) -> bool:
        """Failed, or about to end with its last report written."""
        if each.ended():
            return each.failed()
        return FailureReport.load(self._reports, each.rank) is not None

    def _was_interrupt(self, end: RankExit) -> bool:
        """Whether a rank ended by the Ctrl-C that was passed on.

        It ends by the exception, by the signal, by leaving in its own way with an exit code, or by SIGABRT: a
        KeyboardInterrupt that is raised inside native code which may not throw ends the process so.
        """
        if end.said:
            return end.said.kind is FailureKind.INTERRUPT
        aborted = end.code == -signal.SIGABRT and self._interrupted_at is not None and end.time > self._interrupted_at
        return end.code > 0 or end.code == -signal.SIGINT or aborted

    def _stop(self, grace: float, patience: float = TERM_GRACE) -> None:
        self._wait(grace, lambda: self._signals.interrupts > 1)
        for each in self._ranks:
            each.stop(signal.SIGTERM)
        self._wait(patience, lambda: self._signals.interrupts > 1)
        for each in self._ranks:
            each.stop(signal.SIGKILL)
        self._wait(None, lambda: False)

    def _wait(self, seconds: float | None, enough: Callable[[], bool]) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        while not self._all_ended() and not enough() and (end is None or time.monotonic() < end):
            self._there.wait(TICK)

    def _all_ended(self) -> bool:
        """Whether no rank has still to end; also where the process that would know of their ends is lost."""
        self._there.look()
        pids = self._there.pids
        if pids is not None and not self._ranks:
            self._ranks = [RankProcess(rank, pid, self._there) for rank, pid in enumerate(pids)]
        return self._there.lost or (bool(self._ranks) and all(each.ended() for each in self._ranks))


def _check(program: Sequence[str], num_ranks: int) -> None:
    """Raises `RuntimeFailure` for what can't be started."""
    if num_ranks < 1:
        raise RuntimeFailure(f"got {num_ranks} ranks: at least 1 is needed")
    if not program or (program[0] == "-m" and len(program) < 2):
        raise RuntimeFailure(f"got the program {list(program)}: give a script's path, or -m and a module's name")
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise RuntimeFailure(f"{program[0]} cannot be started: there is no such file; give a Python script's path")


def _thread_share(environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks))}
