"""A rank's own side: how its failure is reported, and how it joins the other ranks."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from penstock.rank_environment import RankEnvironment, RankEnvironmentError
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.launch.failures import (
    FailureKind,
    FailureReport,
    details,
    loss_of,
    one_line,
)

LINGER = 1.0
"""Seconds that a failed rank may take to run its exit handlers."""
LET_SPEAK = 2.0
"""Seconds that a rank that merely lost another one leaves that one to report why it failed."""


class Reporter:
    """The `sys.excepthook` of a rank. It reports the exception by which the rank ends.

    A failed rank leaves as soon as the exit handlers registered after this have run. The interpreter's teardown takes
    longer, and the other ranks learn of the failure only when the process is gone. A process that the rank forks
    keeps Python's own hook.
    """

    def __init__(self, rank: int, report: Callable[[FailureReport], None]) -> None:
        self.rank, self._report = rank, report
        self.failed = False
        self._process = os.getpid()
        atexit.register(self._leave)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            sys.__excepthook__(kind, error, trace)
            return
        self.failed = True
        self._report(FailureReport.of(error, self.rank))
        _flush()
        timer = threading.Timer(LINGER, os._exit, [1])
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        if self.failed and os.getpid() == self._process:
            _flush()
            os._exit(1)


def print_report(report: FailureReport) -> None:
    """Prints the report of a rank under torchrun, which ends the other ranks once this one has ended.

    So a rank that merely lost another one waits first: the other one then reports the cause.
    """
    if report.kind is FailureKind.INTERRUPT:
        return
    lines = [f"penstock: {one_line(report)}"]
    if report.kind is FailureKind.LOST:
        time.sleep(LET_SPEAK)
    else:
        lines += details(report)
    print("\n".join(lines), file=sys.stderr, flush=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def init_process(timeout: float) -> tuple[int, int]:
    """Joins the other ranks; returns this one's rank and their number.

    Under `launch` or `torchrun`, from the environment; (0, 1) in a plain process. The default group is gloo, with
    NCCL for CUDA tensors where every rank has a GPU of its own, which becomes the current device. Every collective
    has `timeout` seconds. From here on an uncaught exception ends with one message for all ranks.

    Raises `RuntimeFailure` for an environment that cannot be, `DeadlineExceeded` when not all ranks have come
    within `timeout`, `PeerLost` when one went.
    """
    write_whole_lines()
    deadline = timedelta(seconds=timeout)
    rank, num_ranks = 0, 1
    try:
        environment = _environment()
        store: dist.Store = dist.HashStore()
        if environment is not None:
            rank, num_ranks = environment.rank, environment.num_ranks
            store = next(dist.rendezvous("env://", timeout=deadline))[0]
        if num_ranks > 1 and not isinstance(sys.excepthook, Reporter):
            sys.excepthook = Reporter(rank, print_report)
        hook = sys.excepthook
        dist.init_process_group(_backend(environment), store=store, rank=rank, world_size=num_ranks, timeout=deadline)
        sys.excepthook = hook  # torch puts one around it that writes "[rank2]:" before every line
        dist.all_reduce(torch.zeros(1))  # nobody needs the store any more to find the others
    except RuntimeError as error:
        loss = loss_of(error)
        if loss is None and "address already in use" in str(error).lower():
            raise RuntimeFailure(
                f"rank {rank} can't listen on port {os.environ['MASTER_PORT']} (MASTER_PORT), which is in use by "
                "another program or run; choose another port"
            ) from None
        if loss is None:
            raise
        if loss is FailureKind.LATE:
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


def write_whole_lines() -> None:
    """Lines of several ranks then never mix, also where Python was told not to buffer (PYTHONUNBUFFERED)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


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
