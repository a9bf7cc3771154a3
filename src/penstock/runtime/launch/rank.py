"""A rank's own side: it runs its program as the interpreter would, joins the other ranks, and reports how it failed.

`is_loss` knows the words of gloo, NCCL and the store by which an exception is another rank's fault.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from types import TracebackType

import torch
import torch.distributed as dist

from penstock.host_process import chain, limit_behind, text_of
from penstock.rank_environment import SIGNALS, RankEnvironment
from penstock.runtime.errors import DeadlineExceeded, PeerFailed, PeerLost, RuntimeFailure
from penstock.runtime.mesh.collective import is_late

LINGER = 1.0
"""Seconds that a failed rank may take to run its exit handlers."""
LET_SPEAK = 2.0
"""Seconds that a rank that merely lost another one leaves that one to report why it failed."""

LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "timeout caused pair closure",  # another wait on the same pair timed out before: the pair is gone
    "connection was likely closed",
    "broken pipe",
    "connection refused",
    "failed to recv, got 0 bytes",
    "ncclremoteerror",
    "remote process exited",
)


def is_loss(error: BaseException) -> bool:
    """Whether an exception of ours or of torch.distributed says that another rank is gone."""
    if isinstance(error, PeerLost | PeerFailed | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(words in text_of(error).lower() for words in LOST)


@dataclass(frozen=True)
class FailureReport:
    """The exception by which a rank ends.

    Attributes:
        text: `rank 2 failed: ValueError: ...`, and the traceback where the exception is none of ours.
        is_secondary: whether it merely says that another rank is gone, or is Ctrl-C's.
        time: when it was raised.
    """

    text: str
    is_secondary: bool
    time: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> FailureReport:
        """The report of an exception that rank `rank` ends by."""
        notes = map(str, getattr(error, "__notes__", []))
        message = "\n".join(filter(None, [text_of(error), *notes, limit_behind(error)])).strip()
        text = f"rank {rank} failed: {type(error).__name__}{': ' if message else ''}{message}"
        if type(error).__module__.partition(".")[0] != "penstock":
            # Without its last line, which has just been said.
            text += "\n" + "".join(traceback.format_exception(error)[:-1]).rstrip()
        is_secondary = any(isinstance(each, KeyboardInterrupt) or is_loss(each) for each in chain(error))
        return cls(text, is_secondary, time.time())


class Reporter:
    """The `sys.excepthook` of a rank. It reports the exception by which the rank ends.

    A failed rank leaves as soon as the exit handlers registered after this have run. The interpreter's teardown takes
    longer, and the other ranks learn of the failure only when the process is gone.
    """

    def __init__(self, rank: int, report: Callable[[FailureReport], None]) -> None:
        self._rank, self._report = rank, report
        self.failed = False
        atexit.register(self._leave)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed = True
        self._report(FailureReport.of(error, self._rank))
        timer = threading.Timer(LINGER, self._leave)
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        if self.failed:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)


def print_report(report: FailureReport) -> None:
    """Prints the report of a rank under torchrun, which ends the other ranks once this one has ended.

    So a rank that merely lost another one waits first: the other one then reports the cause.
    """
    text = report.text
    if report.is_secondary:
        time.sleep(LET_SPEAK)
        text = text.partition("\n")[0]
    print(f"penstock: {text}", file=sys.stderr, flush=True)


def run_rank(
    rank: int,
    program: Sequence[str],
    first_on_path: str | None,
    environment: Mapping[str, str],
    streams: Sequence[Connection],
    reports: Connection,
) -> None:
    """What the process of a rank does.

    Args:
        program: a script's path, or -m and a module's name, and the arguments.
        first_on_path: the folder that Python puts first on the path of such a program. None if it puts none there.
        environment: all environment variables of the rank.
        streams: stdout and stderr of the launching process.
        reports: takes the exception by which the rank ends.
    """
    os.setsid()  # the terminal's Ctrl-C then reaches the launching process alone
    for ends in SIGNALS:
        signal.signal(ends, signal.default_int_handler if ends == signal.SIGINT else signal.SIG_DFL)
    threading.Thread(target=_end_with_launcher, name="penstock-lifeline", daemon=True).start()
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"rank {rank}")  # what top and ps call it
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    write_whole_lines()
    os.environ.clear()
    os.environ.update(environment)
    if environment["OMP_NUM_THREADS"].isdecimal():  # torch was loaded before it was set
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    reporter = sys.excepthook = Reporter(rank, reports.send)
    try:
        _run(list(program), first_on_path)
    except SystemExit:
        raise
    except BaseException as error:
        reporter(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:  # what the interpreter does at its end; a process of multiprocessing ends without calling exit handlers
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _run(program: list[str], first_on_path: str | None) -> None:
    if first_on_path is not None:
        sys.path.insert(0, first_on_path)
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _end_with_launcher() -> None:
    """Ends this process, and all it started, once the launching process is gone."""
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)


def init_process(timeout: float) -> tuple[int, int]:
    """Joins the other ranks; returns this one's rank and their number.

    Under `launch` or `torchrun`, from the environment; (0, 1) in a plain process. The default group is gloo, with
    NCCL for CUDA tensors where every rank has a GPU of its own, which becomes the current device. Every collective
    has `timeout` seconds. From here on an uncaught exception ends with one message for all ranks.

    Raises `RankEnvironmentError` for an environment that cannot be, `DeadlineExceeded` when not all ranks have come
    within `timeout`, `PeerLost` when one went, `RuntimeFailure` when only some hosts have a GPU for each rank there.
    """
    write_whole_lines()
    deadline = timedelta(seconds=timeout)
    environment = RankEnvironment.of(os.environ)
    here = environment or RankEnvironment(0, 1, 0, 1)
    rank, num_ranks = here.rank, here.num_ranks
    store: dist.Store = dist.HashStore()
    try:
        if environment is not None:
            if num_ranks > 1 and not isinstance(sys.excepthook, Reporter):
                sys.excepthook = Reporter(rank, print_report)
            shared = next(dist.rendezvous("env://", timeout=deadline))[0]
            store = store_of_this_start(shared, rank, num_ranks, timeout)
        hook = sys.excepthook
        dist.init_process_group(_backend(here, store), store=store, rank=rank, world_size=num_ranks, timeout=deadline)
        sys.excepthook = hook  # torch puts one around it that writes "[rank2]:" before every line
        dist.all_reduce(torch.zeros(1))  # nobody needs the store any more to find the others
    except RuntimeError as error:
        if is_loss(error):
            raise PeerLost(f"rank {rank} lost another rank while all {num_ranks} started{_advice()}") from None
        if is_late(error):
            text = f"rank {rank} waited {timeout:g} s for all {num_ranks} ranks to start{_advice()}"
            raise DeadlineExceeded(text) from None
        raise
    atexit.register(_leave_group)
    return rank, num_ranks


def store_of_this_start(store: dist.Store, rank: int, num_ranks: int, timeout: float) -> dist.Store:
    """The part of a store that belongs to the processes of one start alone.

    torchrun keeps one store for all its restarts, and the addresses of the processes that ended stay in it. If a rank
    reads such an address before the new process has written its own, it connects to nobody, and the restart fails.
    Here each process writes a number of its own. Rank 0 answers each number with the name of this start, and goes on
    until every rank has the name: the number that it finds first may be that of a process that ended.

    Raises:
        DeadlineExceeded: a rank has not joined within `timeout` seconds.
        RuntimeError: the store is gone, or has no number of a rank, or no answer, within its own deadline.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank:
        store.set(f"process/{rank}", own)
        start = store.get(f"start/{own}").decode()
        store.set(f"{start}/joined/{rank}", "")
        return dist.PrefixStore(start, store)
    for other in range(1, num_ranks):
        while not store.check([f"{own}/joined/{other}"]):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"rank 0 waited {timeout:g} s for rank {other} of {num_ranks} to start{_advice()}"
                )
            store.set(f"start/{store.get(f'process/{other}').decode()}", own)
            time.sleep(0.01)
    return dist.PrefixStore(own, store)


def _advice() -> str:
    """What to do where other hosts can't reach this one.

    gloo listens on the address of the host's name, which on Debian and Ubuntu is 127.0.1.1 until somebody changes it.
    """
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if is_one_host or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    return (
        f"; if the other hosts can't reach this one as {socket.gethostname()}, set GLOO_SOCKET_IFNAME on each "
        "host to the interface by which the others reach it, like eth0"
    )


def _backend(here: RankEnvironment, store: dist.Store) -> str:
    """The backend of all ranks. Raises RuntimeFailure, on every rank, if hosts would use different ones."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices:
        torch.cuda.set_device(here.local_rank % num_devices)
    store.set(f"backend/{here.rank}", "cpu:gloo,cuda:nccl" if num_devices >= here.num_local else "gloo")
    chosen = [each.decode() for each in store.multi_get([f"backend/{rank}" for rank in range(here.num_ranks)])]
    other = next((rank for rank, each in enumerate(chosen) if each != chosen[0]), None)
    if other is not None:
        raise RuntimeFailure(
            f"rank 0 would go by {chosen[0]} and rank {other} by {chosen[other]}, which can't be mixed: NCCL is used "
            "where a host has a GPU for each of its ranks. Start no more ranks on a host than it has GPUs (torchrun "
            "--nproc-per-node), or hide the GPUs of the other hosts (CUDA_VISIBLE_DEVICES), so that all go by gloo"
        )
    return chosen[0]


def _leave_group() -> None:
    if dist.is_initialized() and not (isinstance(sys.excepthook, Reporter) and sys.excepthook.failed):
        dist.destroy_process_group()


def write_whole_lines() -> None:
    """Lines of several ranks then never mix, also where Python was told not to buffer (PYTHONUNBUFFERED)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
