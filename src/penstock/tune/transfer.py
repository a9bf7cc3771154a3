"""Times what the runtime and its messages cost around ops, in a pipeline of two stages that only spin.

Stage 1 spins twice as long as stage 0. So under `gpipe` it never waits for a forward, and stage 0 always waits for a
backward. Each gap between ops then shows one cost:

    rank 0 | F0 F1 F2 F3          .. B0 .... B1 .... B2 .... B3      F to F: send         before a B: delay
    rank 1 | .. F0---F1---F2---F3---B0---B1---B2---B3                F to F: receive      B to B: send

`delay` is the whole time from the end of an op to the start of the op on the other rank that waited for it.

What ranks that hold the same stage exchange at the end of a step is measured on pipelines whose stages do nothing but
hold parameters. It is what a step takes longer after its ops than one of `1f1b`, if it has two pipelines
(`chimera`) or two replicas. It grows with the bytes of a stage, and with the number of its tensors:

    chimera    | ops | sums of both stages' gradients | losses | update | values of both stages |
    1f1b       | ops | losses | update |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.cost import Mesh
from penstock.library import build
from penstock.runtime import Pipeline, device_mesh
from penstock.runtime.arguments import PrecisionOptions
from penstock.simulation import Timeline

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the messages that are timed."""

NUM_MICROBATCHES = 8
WARM_UPS = 3
FLOAT_BYTES = 4
DEADLINE = 60.0
FEW, MANY = 4, 100
"""Tensors of a stage. What one takes is the difference, at `DIVIDED` bytes in all."""

DIVIDED = 1 << 20
COPIES, REPLICAS, ALONE = "copies", "replicas", "alone"
"""Who else holds a stage: another pipeline's rank, another replica's, or nobody."""


def measure_transfer(rank: int, num_ranks: int, steps: int, meet: Callable[[], None]) -> dict[str, Any]:
    """The numbers of `MessageCosts`, as far as this many ranks can measure them. Only rank 0's answer counts.

    One rank gives `gap` and `step_alone`, and two ranks give the rest.
    """
    if num_ranks == 1:
        timelines, step, _ = _steps(1, SIZES[0], steps)
        return {"gap": undisturbed(_gaps(timelines, 0, "F", "F")), "step_alone": step}
    rows: dict[str, list[float]] = {name: [] for name in ("send", "receive", "delay", "reduce", "threads")}
    gaps: list[float] = []
    rests: list[float] = []
    measured = []
    for size in SIZES:
        meet()
        timelines, step, threads = _steps(2, size, steps)
        rows["threads"].append(max(0.0, threads))  # two clocks are read one after the other
        measured.append(timelines)
        rests.append(step)
        gaps += _gaps(timelines, 1, "F", "B")
    gap = undisturbed(gaps)
    for timelines in measured:
        sent = [*_gaps(timelines, 0, "F", "F"), *_gaps(timelines, 1, "B", "B")]
        rows["send"].append(max(0.0, undisturbed(sent) - gap))
        rows["receive"].append(max(0.0, undisturbed(_gaps(timelines, 1, "F", "F")) - gap))
        rows["delay"].append(undisturbed(_delays(timelines)))
    together, per_tensor = of_holders(lambda held_by, num, size: _after_ops(held_by, num, size, steps // 2, meet))
    rising = {name: rising_with_size(row) for name, row in {**rows, **together}.items()}
    return {
        "sizes": list(SIZES), **rising, "gap": gap, "step": undisturbed(rests), "per_tensor": per_tensor,
    }  # fmt: skip


def of_holders(after_ops: Callable[[str, int, int], AfterOps]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of `sums`, `values` and `reduce` of one stage: by its bytes, for each of `SIZES`, and by tensor.

    Args:
        after_ops: gives what a step takes after its ops, for stages that are held so (`COPIES`, ...), with so many
            tensors and bytes in each.
    """

    def exchanged(num_tensors: int, size: int) -> dict[str, float]:
        alone, copies, replicas = (after_ops(held_by, num_tensors, size) for held_by in (ALONE, COPIES, REPLICAS))
        # With copies each of the two ranks holds both stages, which are exchanged one after the other.
        return {
            "sums": (copies.gathered - alone.gathered) / 2,
            "values": (copies.updated - alone.updated) / 2,
            "reduce": replicas.gathered - alone.gathered + replicas.updated - alone.updated,
        }

    few, many = exchanged(FEW, DIVIDED), exchanged(MANY, DIVIDED)
    per_tensor = {name: max(0.0, many[name] - few[name]) / (MANY - FEW) for name in few}
    by_size = [few if size == DIVIDED else exchanged(FEW, size) for size in SIZES]
    rows = {name: [max(0.0, one[name] - FEW * per_tensor[name]) for one in by_size] for name in few}
    return rows, per_tensor


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
    return output.square().mean()  # of a mere mean the gradient would be one number, expanded, and travel as such


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


class AfterOps(NamedTuple):
    """Milliseconds of a step after its ops: until it has the losses and all gradients, and of the update."""

    gathered: float
    updated: float


class _Parameters(nn.Module):
    """Passes its input on. Its backward gives each of its parameters a gradient."""

    def __init__(self, num_tensors: int, size: int) -> None:
        super().__init__()
        each = max(1, size // FLOAT_BYTES // num_tensors)
        self.held = nn.ParameterList([torch.zeros(each) for _ in range(num_tensors)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Passed.apply(x, *self.held)
        return out


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.ones_like(parameter) for parameter in ctx.saved_tensors)


def _after_ops(held_by: str, num_tensors: int, size: int, steps: int, meet: Callable[[], None]) -> AfterOps:
    """What a step takes after its ops, with so many tensors, of `size` bytes in all, in each stage."""
    replicated = held_by == REPLICAS
    schedule = build("chimera" if held_by == COPIES else "1f1b", 1 if replicated else 2, 2)
    pipe = Pipeline(
        [partial(_Parameters, num_tensors, size)] * schedule.num_stages,
        schedule,
        loss_fn=_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        mesh=device_mesh(Mesh(pp=1, dp=2)) if replicated else None,
        timeout=DEADLINE,
        precision=PrecisionOptions(clip_norm=1.0),
    )
    x = torch.ones(4, SIZES[0] // FLOAT_BYTES)
    gathered, updated = [], []
    for _ in range(WARM_UPS + max(3, steps)):
        meet()
        start = time.perf_counter()
        pipe.step(x, x, update=False)
        whole = (time.perf_counter() - start) * 1e3
        gathered.append(whole - pipe.timeline().makespan)
        meet()
        start = time.perf_counter()
        pipe.update()
        updated.append((time.perf_counter() - start) * 1e3)
    pipe.close()
    return AfterOps(undisturbed(gathered[WARM_UPS:]), undisturbed(updated[WARM_UPS:]))
