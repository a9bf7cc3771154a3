"""Times what the runtime and its messages cost around ops, in a pipeline of two stages that only spin.

Stage 1 spins twice as long as stage 0. So under `gpipe` it never waits for a forward, and stage 0 always waits for a
backward. Each gap between ops then shows one cost:

    rank 0 | F0 F1 F2 F3          .. B0 .... B1 .... B2 .... B3      F to F: send         before a B: delay
    rank 1 | .. F0---F1---F2---F3---B0---B1---B2---B3                F to F: receive      B to B: send

`delay` is the whole time from the end of an op to the start of the op on the other rank that waited for it. What
copies of a stage on two ranks exchange after the last op (`sums`, `values`) is timed by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.library import build
from penstock.runtime import Pipeline
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.parameters.shared_tensors import Holders
from penstock.simulation import Timeline

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the messages that are timed."""

NUM_MICROBATCHES = 8
WARM_UPS = 3
FLOAT_BYTES = 4
DEADLINE = 60.0
NUM_TENSORS = 16
COPIES = Holders((1, 0), (0, 1))
"""Of a stage in two pipelines: the owner is on rank 1."""

Exchange = Callable[[int, list[Tensor], GroupPeers], None]


def measure_transfer(rank: int, num_ranks: int, steps: int, meet: Callable[[], None]) -> dict[str, Any]:
    """The numbers of `MessageCosts`, as far as this many ranks can measure them. Only rank 0's answer counts.

    One rank gives `gap` and `step_alone`, and two ranks give the rest.
    """
    if num_ranks == 1:
        timelines, step, _ = _steps(1, SIZES[0], steps)
        return {"gap": undisturbed(_gaps(timelines, 0, "F", "F")), "step_alone": step}
    rows: dict[str, list[float]] = {name: [] for name in ("send", "receive", "delay", "reduce", "threads")}
    rows |= {"sums": [], "values": []}
    gaps: list[float] = []
    rests: list[float] = []
    measured = []
    for size in SIZES:
        meet()
        timelines, step, threads = _steps(2, size, steps)
        rows["threads"].append(threads)
        measured.append(timelines)
        rests.append(step)
        gaps += _gaps(timelines, 1, "F", "B")
    gap = undisturbed(gaps)
    for size, timelines in zip(SIZES, measured):
        sent = [*_gaps(timelines, 0, "F", "F"), *_gaps(timelines, 1, "B", "B")]
        rows["send"].append(max(0.0, undisturbed(sent) - gap))
        rows["receive"].append(max(0.0, undisturbed(_gaps(timelines, 1, "F", "F")) - gap))
        rows["delay"].append(undisturbed(_delays(timelines)))
        rows["reduce"].append(_reduce(size, steps, meet))
        rows["sums"].append(_of_copies(rank, size, steps, meet, _add_up))
        rows["values"].append(_of_copies(rank, size, steps, meet, _give_values))
    rising = {name: rising_with_size(row) for name, row in rows.items()}
    return {"sizes": list(SIZES), **rising, "gap": gap, "step": undisturbed(rests)}


def undisturbed(values: Sequence[float]) -> float:
    """The lower quartile, since other programs can only make a message later."""
    return quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def rising_with_size(row: Sequence[float]) -> list[float]:
    """Makes the costs rise with the size. If a smaller message seems to cost more than a larger one, it
    was disturbed.
    """
    return list(accumulate(reversed(row), min))[::-1]


class Spin(nn.Module):
    """Spins for some milliseconds and passes its input on; so does its backward."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds
        self.anchor = nn.Parameter(torch.zeros(()))  # so that there is a graph, and a backward

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Spun.apply(x, self.anchor, self.milliseconds)
        return out


class _Spun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, milliseconds: float) -> Tensor:
        ctx.milliseconds = milliseconds
        _spin(milliseconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        _spin(ctx.milliseconds)
        return grad, torch.zeros(()), None


def _spin(milliseconds: float) -> None:
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().sum()  # of a mere sum the gradient would be one number, expanded, and travel as such


def _steps(num_ranks: int, size: int, steps: int) -> tuple[list[Timeline], float, float]:
    """Timelines of some steps with messages of `size` bytes.

    And milliseconds that a step takes beyond them, and that other threads than those of the ops work for a message at
    each of its ends.
    """
    spin = 1.0 + size / 1e6
    pipe = Pipeline(
        [partial(Spin, spin * (stage + 1)) for stage in range(num_ranks)],
        build("gpipe", num_ranks, NUM_MICROBATCHES),
        loss_fn=_loss,
        timeout=DEADLINE,
    )
    x = torch.ones(NUM_MICROBATCHES, size // FLOAT_BYTES)
    timelines, rests, beside = [], [], []
    meeting_points = 2 * NUM_MICROBATCHES  # a forward and a backward of each microbatch pass each rank's only link
    for number in range(WARM_UPS + steps):
        start, work = time.perf_counter(), time.process_time() - time.thread_time()
        pipe.step(x, x)
        whole = (time.perf_counter() - start) * 1e3
        work = (time.process_time() - time.thread_time() - work) * 1e3
        timeline = pipe.timeline()
        if number >= WARM_UPS:
            timelines.append(timeline)
            rests.append(whole - timeline.makespan)
            beside.append(work / meeting_points)
    everywhere = [undisturbed(values) for values in pipe.gather(beside)]
    pipe.close()
    return timelines, max(0.0, undisturbed(rests)), fmean(everywhere)


def _gaps(timelines: list[Timeline], rank: int, before: str, after: str) -> list[float]:
    """Milliseconds between neighbouring ops of these kinds on a rank, without the first such pair of each step."""
    found = []
    for timeline in timelines:
        row = timeline.rows[rank]
        pairs = [b.start - a.end for a, b in pairwise(row) if (a.op.kind, b.op.kind) == (before, after)]
        found += pairs[1:] or pairs
    return found


def _delays(timelines: list[Timeline]) -> list[float]:
    """From the end of each backward on rank 1 to the start of the one on rank 0 that waited for it."""
    found = []
    for timeline in timelines:
        ended = {timed.op.microbatch: timed.end for timed in timeline.rows[1] if timed.op.kind == "B"}
        backwards = [timed for timed in timeline.rows[0] if timed.op.kind == "B"]
        found += [timed.start - ended[timed.op.microbatch] for timed in backwards[1:]]
    return found


def _reduce(size: int, steps: int, meet: Callable[[], None]) -> float:
    values = torch.ones(size // FLOAT_BYTES)
    found = []
    for _ in range(steps):
        meet()
        start = time.perf_counter()
        dist.all_reduce(values)
        found.append((time.perf_counter() - start) * 1e3)
    return undisturbed(found)


def _of_copies(rank: int, size: int, steps: int, meet: Callable[[], None], exchange: Exchange) -> float:
    """Milliseconds until a stage's copies on two ranks have the same values.

    It runs the code of real pipelines, for about as many tensors as a block of a model has. Rank 0 has the copy, so
    it is done last.
    """
    group = dist.group.WORLD
    assert group is not None, "ranks are here"
    peers = GroupPeers(group, DEADLINE)
    parts = list(torch.ones(size // FLOAT_BYTES).chunk(NUM_TENSORS))
    found = []
    for _ in range(steps):
        meet()
        start = time.perf_counter()
        exchange(rank, parts, peers)
        found.append((time.perf_counter() - start) * 1e3)
    return undisturbed(found)


def _add_up(rank: int, parts: list[Tensor], peers: GroupPeers) -> None:
    COPIES.summed({1 - rank: parts}, parts, peers)


def _give_values(rank: int, parts: list[Tensor], peers: GroupPeers) -> None:
    COPIES.share(parts, peers)
