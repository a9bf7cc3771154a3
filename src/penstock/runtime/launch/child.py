"""A rank's own side: its lifeline, its reporter and its process group."""

from __future__ import annotations

import atexit
import io
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.launch import lifeline
from penstock.runtime.launch.held_stderr import let_through
from penstock.runtime.launch.launch_env import Handover
from penstock.runtime.launch.peer_loss import LossKind, loss_of
from penstock.runtime.launch.reporter import FolderDesk, Reporter, StoreDesk

__all__ = ["init_process", "watch"]


def watch() -> None:
    """The lifeline and the failure report, without torch.distributed; `init_process` does it too.

    Call it first in a program that has much to do before `init_process`: until then what a rank writes to stderr is
    held, and shown at the end of the first rank to fail only. Does nothing where no launcher of ours
    is the parent but see to it that lines come out whole, and nothing the second time.
    """
    _write_whole_lines()
    handover = Handover.of(os.environ)
    if handover and not isinstance(sys.excepthook, Reporter):
        sys.excepthook = Reporter(_number("RANK"), FolderDesk(handover.reports))
        lifeline.hold(handover.lifeline, handover.reports)
        let_through(handover.reports, _number("RANK"), handover.stderr)


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
        if "RANK" not in os.environ:
            store: dist.Store = dist.HashStore()
        else:
            rank, num_ranks = _number("RANK"), _number("WORLD_SIZE")
            store = _store(rank, num_ranks, deadline)
        if not isinstance(sys.excepthook, Reporter) and num_ranks > 1:
            sys.excepthook = Reporter(rank, StoreDesk(store))
        hook = sys.excepthook
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=num_ranks, timeout=deadline)
        sys.excepthook = hook  # torch puts one around it that writes "[rank2]:" before every line
        dist.all_reduce(torch.zeros(1))  # nobody needs rank 0's store any more to find the others
    except RuntimeError as error:
        loss = loss_of(error)
        if loss is None:
            raise
        if loss is LossKind.LATE:
            raise DeadlineExceeded(f"rank {rank} waited {timeout:g} s for all {num_ranks} ranks to start") from None
        raise PeerLost(f"rank {rank} lost another rank while all {num_ranks} started") from None
    atexit.register(_leave)
    return rank, num_ranks


def _write_whole_lines() -> None:
    """Lines of several ranks then never mix, also where Python was told not to buffer (PYTHONUNBUFFERED)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _store(rank: int, num_ranks: int, deadline: timedelta) -> dist.Store:
    handover = Handover.of(os.environ)
    if handover is None:
        return next(dist.rendezvous("env://", timeout=deadline))[0]
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    if handover.store is None:
        return dist.TCPStore(host, port, num_ranks, False, deadline)
    return dist.TCPStore(
        host, port, num_ranks, True, deadline, wait_for_workers=False, master_listen_fd=handover.store
    )


def _backend() -> str:
    local, num_local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_local:
        torch.cuda.set_device(local)
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not text.isdigit():
        raise RuntimeFailure(
            f"environment variable {variable} is {text!r}, not a number: start with `penstock train` or torchrun"
        )
    return int(text)


def _leave() -> None:
    if dist.is_initialized() and not (isinstance(sys.excepthook, Reporter) and sys.excepthook.failed):
        dist.destroy_process_group()
