"""A rank's own side: what its parent hands to it, its lifeline, its reporter and its process group.

What a rank writes to stderr before it can report is held in a file, so that a broken import is printed only once.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.rank_environment import RankEnvironment, RankEnvironmentError
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.launch.failures import (
    FailureKind,
    FailureReport,
    LossKind,
    details,
    loss_of,
    one_line,
)

VARIABLE = "PENSTOCK_LAUNCH"


@dataclass(frozen=True)
class LaunchEnvironment:
    """What a parent hands to each child, beside torch's own RANK, WORLD_SIZE and the rest.

    The folder for reports, and descriptors: the lifeline's reading end, the real stderr, on rank 0 the store's
    listening socket.
    """

    reports: str
    lifeline: int
    stderr: int
    store: int | None

    def variables(self) -> dict[str, str]:
        """As environment variables for the child."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LaunchEnvironment | None:
        """What this process was handed, None if no parent of ours started it."""
        text = environment.get(VARIABLE)
        try:
            return cls(**json.loads(text)) if text else None
        except (ValueError, TypeError):
            raise RuntimeFailure(
                f"environment variable {VARIABLE} is {text!r:.60}; `penstock train` sets it for the ranks that it "
                "starts: unset it"
            ) from None


def held_path(reports: str, rank: int) -> Path:
    """The file that is a rank's stderr until `let_through`."""
    return Path(reports, f"rank-{rank}.stderr")


def held_text(reports: str, rank: int) -> str:
    """What is still held of a rank that has ended."""
    with contextlib.suppress(OSError):
        return held_path(reports, rank).read_text(errors="replace")
    return ""


def let_through(reports: str, rank: int, stderr: int) -> None:
    """Makes descriptor `stderr` this rank's stderr again, and writes what was held to it."""
    with contextlib.suppress(OSError):  # not our descriptor: started by something between us and the parent
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        text = held_path(reports, rank).read_bytes()
        held_path(reports, rank).unlink()
        os.write(2, text)


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


KEY = "penstock/failure"
ANSWER = 1.0  # seconds that the store may take to answer
LINGER = 1.0  # seconds a failed rank may take to run its exit handlers


class ReportSink(Protocol):
    """Where reports go."""

    def take(self, report: FailureReport) -> None:
        """Takes a report; the last one of a rank counts."""


class FolderReportSink:
    """Under our launcher: a file for the parent, and not a word here, unless the disk refuses the file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def take(self, report: FailureReport) -> None:
        if not report.save(self._folder):
            _print(report, details(report))


class StoreReportSink:
    """Under torchrun: the first failed rank leaves its report in the store and prints it, the others a line.

    `patience` is how long a rank that merely lost a peer looks for the cause. A store that can't be reached answers
    neither yes nor no: it has a second more, and then a rank speaks for itself.
    """

    def __init__(self, store: dist.Store, patience: float = 2.0) -> None:
        self._store, self._patience = store, patience

    def take(self, report: FailureReport) -> None:
        if report.kind is FailureKind.INTERRUPT:
            return
        found: list[FailureReport | None] = []
        asking = threading.Thread(target=self._look, args=(report, found), daemon=True)
        asking.start()
        asking.join(self._patience + ANSWER)
        root = found[0] if found else None
        if root is None or root == report:
            shown = [] if report.kind is FailureKind.LOST else details(report)
            _print(report, shown)
        else:
            print(f"penstock: rank {report.rank} ended because rank {root.rank} failed", file=sys.stderr, flush=True)

    def _look(self, report: FailureReport, found: list[FailureReport | None]) -> None:
        with contextlib.suppress(RuntimeError, ValueError, TypeError):  # the store may be gone too
            found.append(self._root(report))

    def _root(self, report: FailureReport) -> FailureReport | None:
        if report.kind is not FailureKind.LOST:
            return FailureReport.parse(self._store.compare_set(KEY, "", report.text()).decode())
        end = time.monotonic() + self._patience
        while not self._store.check([KEY]):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        return FailureReport.parse(self._store.get(KEY).decode())


def _print(report: FailureReport, lines: Sequence[str]) -> None:
    print("\n".join([f"penstock: {one_line(report)}", *lines]), file=sys.stderr, flush=True)


class Reporter:
    """`sys.excepthook` of a rank; a process that the rank forks keeps Python's own.

    A failed rank leaves as soon as the exit handlers registered after this have run: the interpreter's teardown
    takes longer, and the other ranks learn of the failure only when it is over.
    """

    def __init__(self, rank: int, sink: ReportSink) -> None:
        self.rank, self.sink = rank, sink
        self.failed = False
        self._process = os.getpid()
        atexit.register(self._leave)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            sys.__excepthook__(kind, error, trace)
            return
        self.failed = True
        self.sink.take(FailureReport.of(error, self.rank))
        _flush()
        timer = threading.Timer(LINGER, os._exit, [1])
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        if self.failed and os.getpid() == self._process:
            _flush()
            os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def watch() -> None:
    """The lifeline and the failure report, without torch.distributed; `init_process` does it too.

    Call it first in a program that has much to do before `init_process`: until then what a rank writes to stderr is
    held, and shown at the end of the first rank to fail only. Does nothing where no launcher of ours
    is the parent but see to it that lines come out whole, and nothing the second time.
    """
    _write_whole_lines()
    launch_env = LaunchEnvironment.of(os.environ)
    if launch_env and not isinstance(sys.excepthook, Reporter):
        environment = _environment()
        rank = 0 if environment is None else environment.rank
        sys.excepthook = Reporter(rank, FolderReportSink(launch_env.reports))
        hold(launch_env.lifeline, launch_env.reports)
        let_through(launch_env.reports, rank, launch_env.stderr)


def init_process(timeout: float) -> tuple[int, int]:
    """Joins the other ranks; returns this one's rank and their number.

    Under `launch` or `torchrun`, from the environment; (0, 1) in a plain process. The default group is gloo, with
    NCCL for CUDA tensors where every rank has a GPU of its own, which becomes the current device. Every collective
    has `timeout` seconds. From here on an uncaught exception ends with one message for all ranks.

    Raises `RuntimeFailure` for an environment that cannot be, `DeadlineExceeded` when not all ranks have come
    within `timeout`, `PeerLost` when one went.
    """
    watch()
    deadline = timedelta(seconds=timeout)
    rank, num_ranks = 0, 1
    try:
        environment = _environment()
        if environment is None:
            store: dist.Store = dist.HashStore()
        else:
            rank, num_ranks = environment.rank, environment.num_ranks
            store = _store(environment, deadline)
        if not isinstance(sys.excepthook, Reporter) and num_ranks > 1:
            sys.excepthook = Reporter(rank, StoreReportSink(store))
        hook = sys.excepthook
        dist.init_process_group(_backend(environment), store=store, rank=rank, world_size=num_ranks, timeout=deadline)
        sys.excepthook = hook  # torch puts one around it that writes "[rank2]:" before every line
        dist.all_reduce(torch.zeros(1))  # nobody needs rank 0's store any more to find the others
    except RuntimeError as error:
        loss = loss_of(error)
        if loss is None and "address already in use" in str(error).lower():
            raise RuntimeFailure(
                f"rank {rank} can't listen on port {os.environ['MASTER_PORT']} (MASTER_PORT), which is in use by "
                "another program or run; choose another port"
            ) from None
        if loss is None:
            raise
        if loss is LossKind.LATE:
            text = f"rank {rank} waited {timeout:g} s for all {num_ranks} ranks to start{_advice()}"
            raise DeadlineExceeded(text) from None
        raise PeerLost(f"rank {rank} lost another rank while all {num_ranks} started{_advice()}") from None
    atexit.register(_leave)
    return rank, num_ranks


def load_optimizer() -> None:
    """Makes torch load what the first optimizer of a process loads, before ranks that train are forked.

    That is torch's compiler and takes a second per process. A build for GPUs may ask for one as it loads, and a rank
    that is forked after that has none; so there each rank loads it by itself.
    """
    if not torch.backends.cuda.is_built():
        torch.optim.SGD([torch.zeros(1)])


MALLOC_WARMUP_BYTES = 28 << 20
"""Bytes; glibc's limit grows up to 32 MiB."""


def warm_up_malloc() -> None:
    """Keeps the memory that a step frees in the process, since the next step needs it again.

    glibc keeps freed memory once a program has freed one large tensor.
    Otherwise each step returns its activations to the system and faults them in again, page by page. On one core of
    an AMD EPYC that was 800 to 1800 faults per step of a small GPT, or 3% of its time.
    """
    torch.empty(MALLOC_WARMUP_BYTES, dtype=torch.uint8)  # freed at once


def _advice() -> str:
    """What to do where other hosts can't reach this one.

    gloo listens on the address of the host's name, which on Debian and Ubuntu is 127.0.1.1 until somebody changes it.
    """
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if is_one_host or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f"; this host does not know its own name, {name}: set GLOO_SOCKET_IFNAME to its interface, like eth0"
    if not address.startswith("127."):
        return ""
    return (
        f"; the name of this host, {name}, stands for {address}, where no other host reaches it: on each host set "
        "GLOO_SOCKET_IFNAME to the interface by which the others reach it, like eth0"
    )


def _write_whole_lines() -> None:
    """Lines of several ranks then never mix, also where Python was told not to buffer (PYTHONUNBUFFERED)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _store(environment: RankEnvironment, deadline: timedelta) -> dist.Store:
    launch_env = LaunchEnvironment.of(os.environ)
    if launch_env is None:
        return next(dist.rendezvous("env://", timeout=deadline))[0]
    host, port, num_ranks = environment.host, environment.port, environment.num_ranks
    if launch_env.store is None:
        return dist.TCPStore(host, port, num_ranks, False, deadline)
    return dist.TCPStore(
        host, port, num_ranks, True, deadline, wait_for_workers=False, master_listen_fd=launch_env.store
    )


def _backend(environment: RankEnvironment | None) -> str:
    local, num_local = (0, 1) if environment is None else (environment.local_rank, environment.num_local)
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_local:
        torch.cuda.set_device(local)
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _environment() -> RankEnvironment | None:
    """What the launcher says. Raises RuntimeFailure where that cannot be."""
    try:
        return RankEnvironment.of(os.environ)
    except RankEnvironmentError as error:
        raise RuntimeFailure(str(error)) from None


def _leave() -> None:
    if dist.is_initialized() and not (isinstance(sys.excepthook, Reporter) and sys.excepthook.failed):
        dist.destroy_process_group()
