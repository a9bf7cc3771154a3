"""Short trainings between processes of one machine, which know of two interfaces (of loopback), and whose connections
of gloo are given up at a chosen call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from device_queues import LateLines
from penstock.runtime.transport import choose, nccl
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.repeat import GuardedGroup, GuardedWork
from waiting import PATIENCE

INTERFACES = "127.0.0.3,127.0.0.2"
NUM_STEPS = 4
WIDTH = 16
TIMEOUT = PATIENCE
POINTS = {
    "sending": (GlooTransport, "_isend"),
    "sending by a line": (nccl.DeviceLines, "send"),
    "receiving by a line": (nccl.DeviceLines, "receive"),
    "receiving": (GlooTransport, "_accept"),
    "step ends": (GlooTransport, "end"),
    "step begins": (GlooTransport, "begin"),
    "summing": (GuardedGroup, "start"),
    "summed": (GuardedWork, "wait"),
    "telling": (GuardedGroup, "begin_gather"),
    "sharing": (GuardedGroup, "_watched"),
}
"""Where connections may be cut: before and after a call of these."""


@dataclass(frozen=True)
class LinkCase:
    """Attributes:
    cuts: (rank, point, which call of it, whether after it); none: nothing is cut.
    fails_at: which receive of rank 1 by a line between devices fails by itself; None: none.
    """

    cuts: tuple[tuple[int, str, int, bool], ...] = ()
    fails_at: int | None = None
    dp: int = 1
    sharding: str = "none"
    dispatch: str = "dynamic"
    transport: str = "gloo"
    depth: int | None = None
    links: str = ""
    clip_norm: float | None = None
    evaluates: bool = False
    tied: bool = False
    batch_norm: bool = False
    accumulates: bool = False

    @property
    def uncut(self) -> LinkCase:
        return replace(self, cuts=(), fails_at=None)


def trainings(rank: int, cases: Sequence[LinkCase]) -> list[dict[str, Any]]:
    """What each training gives on this rank."""
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    return [training(rank, case) for case in cases]


@contextmanager
def lines_over_gloo(rank: int, case: LinkCase) -> Iterator[LateLines]:
    """Lines between devices that are gloo's, as there is no GPU; they are aborted as NCCL's are."""
    lines = LateLines(case.fails_at if rank == 1 else None)

    def made(group: Any, timeout: float, wiring: Any, device: torch.device, *_: int) -> nccl.DeviceLines:
        return nccl.DeviceLines(group, nccl.lines_of(wiring), "gloo", timeout, device, lines)

    with pytest_patch() as patch:
        patch(choose, "_lines", made)
        patch(nccl, "dist", lines)
        patch(dist.ProcessGroup, "abort", lambda group: lines.abort(group))
        yield lines


def training(rank: int, case: LinkCase) -> dict[str, Any]:
    with lines_over_gloo(rank, case) as lines:
        told = _training(rank, case)
    assert lines.num_aborts == 0 or (case.transport == "nccl" and case != case.uncut), case
    return told


def _training(rank: int, case: LinkCase) -> dict[str, Any]:
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    if case.tied:
        second.weight = first.weight
    norm = [nn.BatchNorm1d(WIDTH)] if case.batch_norm else []
    pipe = ps.Pipeline(
        nn.Sequential(first, *norm, nn.Tanh(), nn.Dropout(0.1), second, nn.Tanh(), nn.Linear(WIDTH, 1)),
        ps.build("1f1b", num_ranks=2, num_microbatches=4),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        mesh=None if case.dp == 1 else ps.runtime.device_mesh(ps.Mesh(pp=2, dp=case.dp)),
        dispatch=case.dispatch,
        timeout=TIMEOUT,
        precision=ps.PrecisionOptions(clip_norm=case.clip_norm),
        parallel=ps.ParallelOptions(sharding=case.sharding),
        transport=ps.TransportOptions(
            case.transport, depth=case.depth, links=ps.Links.parse(case.links) if case.links else None
        ),
    )
    generator = torch.Generator().manual_seed(1)
    with pipe, cutting(rank, pipe, case.cuts):
        losses: list[Tensor] = []
        for step in range(NUM_STEPS):
            x = torch.randn(16, WIDTH, generator=generator)
            updates = not case.accumulates or step % 2 == 1
            losses.append(pipe.step(x, x.sum(1, keepdim=True), update=updates).losses)
            if case.evaluates:
                losses.append(pipe.evaluate(x, x.sum(1, keepdim=True)).losses)
        state = [p.detach().clone() for p in pipe.parameters()]
        state = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in state]
        state += [buffer.detach().clone() for stage in pipe._local.model.every_stage() for buffer in stage.buffers()]
        return {
            "losses": torch.cat(losses),
            "state": state,
            "number": pipe._local.attempts.failover.number,
            "counters": pipe._local.choice.seen(pipe._local.transport)[1] or {},
            "notices": pipe.notices,
            "repeats": pipe._local.attempts.num_repeats,
        }


@contextmanager
def cutting(rank: int, pipe: ps.Pipeline, cuts: Sequence[tuple[int, str, int, bool]]) -> Iterator[None]:
    """Has all ranks leave their groups of gloo at the calls that are this rank's."""
    mine = {(point, which): after for where, point, which, after in cuts if where == rank}
    counts = dict.fromkeys(POINTS, 0)
    with pytest_patch() as patch:
        for point, (owner, name) in POINTS.items():
            if any(point == at for at, _ in mine):
                patch(owner, name, watched(point, getattr(owner, name), counts, mine, pipe))
        yield


def watched(point: str, method: Any, counts: dict[str, int], mine: dict[tuple[str, int], bool], pipe: Any) -> Any:
    failover = pipe._local.attempts.failover

    def call(*args: Any) -> Any:
        counts[point] += 1
        after = mine.get((point, counts[point]))
        if after is False:
            failover.want(failover.number + 1, "the test says so")
        result = method(*args)
        if after:
            failover.want(failover.number + 1, "the test says so")
        return result

    return call


@contextmanager
def pytest_patch() -> Iterator[Any]:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield patch.setattr
