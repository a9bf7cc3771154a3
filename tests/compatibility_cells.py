"""Cells of a covering array of the runtime's features: each trained for two updates beside the plain loop.

    cell = Cell("amdp", mesh="pp 2 dp 2", sharding="zero1")
    cell.refusal                   the row of the table that refuses it; None where it is to run
    run_cell(cell)                 in one process, or in each of `cell.num_processes`: how it ended

The models are a block a stage. A schedule without updates runs beside a loop over all microbatches that adds up by
replica and pipeline; one with updates beside the loop that keeps every version (tests/tied_updates_loop.py). Where
every sum is made in the order of one process all bits must be the same.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from fuzz_cases import Outcome
from mesh_cases import distance
from offload_programs import offloaded
from penstock.runtime.compatibility import FeatureCombination, Refusal, refusal_of
from penstock.runtime.tensors.dtensor import whole
from penstock.schedule import Needs, Op, Registered
from plain_loop import cut, weights
from tied_updates_loop import VersionsLoop, with_rule

WIDTH, NUM, WINDOW, NUM_STEPS = 8, 8, 4, 2
"""Of the model; microbatches of each replica; microbatches of an update that is an op; steps."""
MSE = nn.MSELoss()
ADAM = partial(torch.optim.AdamW, lr=0.02)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
"""For sums in another order: Adam makes much of the rounding of a gradient near nothing."""
SMOOTH_ADAM = partial(torch.optim.AdamW, lr=0.02, eps=0.01)
"""And less of it the larger its epsilon is: for rules that predict what Adam does."""

TOLERANCE = {"float32": 2e-5, "clipped": 2e-5, "bfloat16": 5e-2}
"""By precision, of the largest entry, where replicas or shards add up in another order than one process."""

FEATURES: dict[str, tuple[Any, ...]] = {
    "family": ("1f1b", "zb-v", "interleaved-1f1b", "chimera", "mllm", "fork", "amdp", "pipedream-2bw"),
    "mesh": ("one process", "pp 4", "dp 2", "pp 2 dp 2", "pp 2 tp 2", "pp 2 dp 2 tp 2", "tp 2"),
    "sharding": ("none", "copies", "zero1", "fsdp"),
    "dispatch": ("frozen", "hinted", "dynamic"),
    "transport": ("host", "gloo", "direct", "delegate", "late links"),
    "adapt": (False, True),
    "asynchronous": ("no", "note", "offload"),
    "recompute": (False, True),
    "tied": (False, True),
    "precision": ("float32", "clipped", "bfloat16"),
}
"""The values of each feature."""

SHAPES = {
    "one process": None,
    "pp 4": (4, 1, 1),
    "dp 2": (1, 2, 1),
    "pp 2 dp 2": (2, 2, 1),
    "pp 2 tp 2": (2, 1, 2),
    "pp 2 dp 2 tp 2": (2, 2, 2),
    "tp 2": (1, 1, 2),
}
"""By mesh the processes along pp, dp and tp. Where there is one along pp, each has all ranks of its pipeline."""

PREDICTING = {
    "xpipe": ("xpipe", "xpipe", 4),
    "spectrain": ("spectrain", "spectrain", 1),
    "tentative": ("amdp", "tentative", 4),
    "amdp, xpipe": ("amdp", "xpipe", 4),
}
"""Families whose rule predicts weights: an order, a rule, and the microbatches of an update."""

FEATURES_OF_RULES = {**FEATURES, "family": tuple(PREDICTING)}
"""The values of each feature in the array of these rules."""

LATE_LINKS = ps.Links({(0, 1): 1.0})
FORK = ps.schedule.StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
UPDATING = ("amdp", "pipedream-2bw", *PREDICTING)


@dataclass(frozen=True)
class Cell:
    """One value of each feature. `FEATURES` has what there is.

    Attributes:
        device: on which all stages lie; several processes share it. No feature: the same cells run on each.
    """

    family: str = "1f1b"
    mesh: str = "one process"
    sharding: str = "copies"
    dispatch: str = "frozen"
    transport: str = "host"
    adapt: bool = False
    asynchronous: str = "no"
    recompute: bool = False
    tied: bool = False
    precision: str = "float32"
    device: str = "cpu"

    @property
    def shape(self) -> tuple[int, int, int]:
        return SHAPES[self.mesh] or (1, 1, 1)

    @property
    def num_processes(self) -> int:
        pp, dp, tp = self.shape
        return pp * dp * tp

    @property
    def exact(self) -> bool:
        """Whether every sum is made in the order of one process."""
        return self.shape[1:] == (1, 1)

    @property
    def schedule(self) -> ps.Schedule:
        pp = self.shape[0]
        return _schedule(self.family, pp if pp > 1 else 4, self.recompute, self.asynchronous)

    @property
    def tied_stages(self) -> dict[str, tuple[int, ...]]:
        last = self.schedule.num_stages - 1
        return {f"0.up.weight, {last}.up.weight": (0, last)} if self.tied and last else {}

    @property
    def combination(self) -> FeatureCombination:
        """What the table is asked about."""
        pp, dp, _ = self.shape
        return FeatureCombination(self.schedule, dp, device=self.device, one_process=pp == 1, tied=self.tied_stages)

    @property
    def refusal(self) -> Refusal | None:
        return refusal_of(self.combination)

    def __str__(self) -> str:
        plain = Cell()
        changed = {k: v for k, v in asdict(self).items() if v != getattr(plain, k)}
        return "Cell(" + ", ".join(f"{k}={v!r}" for k, v in changed.items()) + ")"


def read_cells(name: str = "cells") -> list[Cell]:
    """The cells of the covering array, or those of the array of rules that predict ("rules")."""
    path = Path(__file__).parents[1] / "benchmarks" / "compatibility" / f"{name}.json"
    return [Cell(**each) for each in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def some_cells(num_processes: int, num: int, name: str = "cells") -> list[Cell]:
    """So many of those with a number of processes that are to run, from all over the array."""
    cells = [cell for cell in read_cells(name) if cell.num_processes == num_processes and cell.refusal is None]
    return [cells[place * len(cells) // num] for place in range(num)]


# Schedules.


@cache
def _schedule(family: str, ranks: int, recompute: bool, asynchronous: str) -> ps.Schedule:
    if family == "fork":
        made = ps.Program(ps.placements.circular(ranks, FORK.num_stages), NUM, stages=FORK).build()
    else:
        name, rule, window = PREDICTING.get(family, (family, None, WINDOW))
        made = ps.build(name, ranks, NUM, **({"window": window} if family in UPDATING else {}))
        if rule is not None:
            made = with_rule(made, rule)
    if recompute:
        made = _recomputed(made)
    if asynchronous == "note":
        made = _noted(made)
    elif asynchronous == "offload":
        made = offloaded(made, every=2)
    ps.check(made)
    return made


def _recomputed(schedule: ps.Schedule) -> ps.Schedule:
    """Every other microbatch's forwards run again, but for those that ranks run together."""
    shared = {stage for stage, _ in schedule.placement.shared}
    rows = []
    for row in schedule.order:
        made: list[Op] = []
        for op in row:
            if op.kind in "BI" and op.microbatch % 2 and op.stage not in shared:
                made.append(Op("R", op.stage, op.microbatch))
            made.append(op)
        rows.append(tuple(made))
    return replace(schedule, order=tuple(rows))


def _noted(schedule: ps.Schedule) -> ps.Schedule:
    """Between each forward of a stage that one rank has and its backward an asynchronous op, which both wait for."""
    shared = {stage for stage, _ in schedule.placement.shared}
    stages = [stage for stage in range(schedule.num_stages) if stage not in shared]
    numbers = {
        stage: sorted({op.microbatch for row in schedule.order for op in row if op[:2] == ("F", stage)})
        for stage in stages
    }
    notes = [
        Registered("NOTE", stage, len(numbers[stage]), asynchronous=True, microbatches=tuple(numbers[stage]))
        for stage in stages
    ]
    needs = [
        each
        for stage in stages
        for each in (Needs(("F", stage), ("NOTE", stage)), Needs(("NOTE", stage), ("B", stage)))
    ]
    order = tuple(
        tuple(
            made
            for op in row
            for made in (op, Op("NOTE", op.stage, op.microbatch))[: 1 + (op.kind == "F" and op.stage not in shared)]
        )
        for row in schedule.order
    )
    graph = schedule.graph
    graph = replace(graph, registered=(*graph.registered, *notes), needs=(*graph.needs, *needs))
    return replace(schedule, order=order, stage_graph=graph)


_SLEEPERS = ThreadPoolExecutor(16)


def note(call: ps.runtime.OpCall) -> Any:
    """What a NOTE does: nothing, for up to 3 ms, which are others in every process."""
    return _SLEEPERS.submit(time.sleep, random.Random(f"{os.getpid()} {call.op}").random() * 0.003)


# Models.


class Block(nn.Module):
    """One stage. What two stages give is joined first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if other is not None:
            x = x * torch.sigmoid(other)
        return x + self.down(torch.tanh(self.up(x)))


def model_of(cell: Cell) -> list[Block]:
    torch.manual_seed(3)
    model = [Block().to(cell.device) for _ in range(cell.schedule.num_stages)]
    if cell.tied_stages:
        model[-1].up.weight = model[0].up.weight
    return model


def parallelize(stage: nn.Module, mesh: Any) -> None:
    """Cuts a block as a transformer's MLP is cut."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = [name for name, module in stage.named_modules() if isinstance(module, Block)]
    styles = {f"{name}.up".lstrip("."): ColwiseParallel() for name in names}
    parallelize_module(stage, mesh, {**styles, **{f"{name}.down".lstrip("."): RowwiseParallel() for name in names}})


def batch_of(cell: Cell, step: int) -> tuple[Tensor, Tensor]:
    """Ragged, where a loop says what a sample weighs."""
    generator = torch.Generator().manual_seed(step)
    size = 2 * NUM * cell.shape[1] + (cell.family not in UPDATING), WIDTH
    return tuple(torch.randn(size, generator=generator).to(cell.device) for _ in range(2))  # type: ignore[return-value]


def optimizer_of(cell: Cell) -> Any:
    if cell.family == "spectrain":
        return SGD
    if cell.family in PREDICTING and not cell.exact:
        return SMOOTH_ADAM
    return ADAM if cell.exact else SGD


def _clip_norm(cell: Cell) -> float | None:
    return 0.05 if cell.precision == "clipped" else None


def _autocast(cell: Cell) -> torch.dtype | None:
    return torch.bfloat16 if cell.precision == "bfloat16" else None


# The plain loops.


@dataclass
class Wanted:
    """Of each step the loss (None where it is not compared) and the gradients; the parameters after it."""

    losses: list[Tensor | None]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]


def wanted(cell: Cell) -> Wanted:
    return _with_updates(cell) if cell.family in UPDATING else _plain(cell)


def _plain(cell: Cell) -> Wanted:
    model, schedule, want = nn.ModuleList(model_of(cell)), cell.schedule, Wanted([], [], [])
    optimizer = optimizer_of(cell)(model.parameters())
    for step in range(1, NUM_STEPS + 1):
        x, y = batch_of(cell, step)
        num = NUM * cell.shape[1]
        scales = weights(x, y, num, MSE)
        parts = list(zip(cut(x, num), cut(y, num), scales, strict=True))
        groups: dict[tuple[int, int], list[int]] = {}
        for m in range(num):
            groups.setdefault((m // NUM, schedule.microbatch_pipeline[m % NUM]), []).append(m)
        losses: dict[int, Tensor] = {}
        sums: dict[str, Tensor] = {}
        for key in sorted(groups):
            model.zero_grad()
            for m in groups[key]:
                losses[m] = _forward_backward(model, schedule, *parts[m], _autocast(cell))
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] = sums[name] + p.grad if name in sums else p.grad
        for name, p in model.named_parameters():
            p.grad = sums[name]
        total = losses[0].clone()
        for m in range(1, num):
            total += losses[m]
        want.losses.append(total)
        want.gradients.append({name: g.clone() for name, g in sums.items()})
        if (clip := _clip_norm(cell)) is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        want.parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return want


def _forward_backward(
    model: Any, schedule: ps.Schedule, x: Tensor, y: Tensor, scale: float, autocast: torch.dtype | None
) -> Tensor:
    made: dict[int, Tensor] = {}
    with torch.autocast(x.device.type, autocast) if autocast else nullcontext():
        for stage, sources in enumerate(schedule.graph.sources):
            # What goes to several stages goes to each by itself: a stage's gradient is a sum of its own.
            given = [made[source].view_as(made[source]) for source in sources]
            made[stage] = model[stage](*given or [x])
        loss = MSE(made[len(model) - 1], y) * scale
    loss.backward()
    return loss.detach()


def _with_updates(cell: Cell) -> Wanted:
    num, want = NUM * cell.shape[1], Wanted([], [], [])
    loop = VersionsLoop(
        nn.Sequential(*model_of(cell)),
        cell.schedule,
        optimizer_of(cell),
        _clip_norm(cell),
        cell.shape[1],
        _autocast(cell),
    )
    for step in range(1, NUM_STEPS + 1):
        x, y = batch_of(cell, step)
        loop.step(cut(x, num), cut(y, num))
        want.losses.append(None)
        want.gradients.append({})
        want.parameters.append({name: found[-1].clone() for name, found in loop.versions.items()})
    return want


# The pipeline.


def place_of(cell: Cell) -> Any:
    """The mesh of a cell, with groups of its own."""
    if cell.num_processes == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    pp, dp, tp = cell.shape
    if pp == 1:
        return init_device_mesh(cell.device, (dp, tp), mesh_dim_names=("dp", "tp"))
    return init_device_mesh(cell.device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def pipeline_of(cell: Cell, model: Sequence[nn.Module], place: Any, timeout: float = 60.0) -> ps.Pipeline:
    late = cell.transport == "late links"
    links = LATE_LINKS if late else None
    name = "host" if late else cell.transport
    return ps.Pipeline(
        list(model),
        cell.schedule,
        loss_fn=MSE,
        optimizer=optimizer_of(cell),
        mesh=place,
        dispatch=cell.dispatch,
        ops={"NOTE": note} if cell.asynchronous == "note" else None,
        timeout=timeout,
        precision=ps.PrecisionOptions(autocast=_autocast(cell), clip_norm=_clip_norm(cell)),
        parallel=ps.ParallelOptions(
            sharding=cell.sharding,
            parallelize=parallelize if cell.shape[2] > 1 else None,
            device=None if cell.device == "cpu" else cell.device,
        ),
        transport=ps.TransportOptions(name, links=links),
        adapt=ps.AdaptOptions() if cell.adapt else None,
    )


def run_cell(cell: Cell) -> Outcome:
    """How it ended: as a random run does. A refusal that is not the table's is "raw"."""
    if cell.device == "cuda":  # as far as its kernels can be
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        want = wanted(cell)
    except Exception as error:  # before anything of ours has run
        return Outcome("raw", f"in the plain loop, {type(error).__name__}: {error}")
    place = place_of(cell)
    row = cell.refusal
    try:
        pipe = pipeline_of(cell, model_of(cell), place)
    except (Exception, SystemExit) as error:
        if row is not None and row.why in str(error):
            return Outcome("refused", f"{row.one} and {row.other}")
        return Outcome("raw", f"at construction, {type(error).__name__}: {error}")
    if row is not None:
        pipe.close()
        return Outcome("raw", f"the table refuses {row.one} and {row.other}, and it was made")
    try:
        found = differences(cell, pipe, want)
    except Exception as error:
        return Outcome("raw", f"{type(error).__name__}: {error}")
    finally:
        pipe.close()
    wrong = {what: far for what, far in found.items() if not far <= (0.0 if cell.exact else _tolerance(cell))}
    if wrong:
        return Outcome("different", "; ".join(f"{what} by {far:.1e}" for what, far in list(wrong.items())[:6]))
    farthest = max(found.values())
    return Outcome("same", f"within {farthest:.1e}" if farthest else "bitwise")


def _tolerance(cell: Cell) -> float:
    return TOLERANCE[cell.precision]


def differences(cell: Cell, pipe: ps.Pipeline, want: Wanted) -> dict[str, float]:
    """How far each number is from the loop's, by the largest entry."""
    found: dict[str, float] = {}
    for step in range(1, NUM_STEPS + 1):
        x, y = batch_of(cell, step)
        if cell.family in UPDATING:
            pipe.step(x, y)
        else:
            result = pipe.step(x, y, update=False)
            wanted_loss = want.losses[step - 1]
            assert wanted_loss is not None
            found[f"step {step}: loss"] = distance(result.loss, wanted_loss)
            for name, p in pipe.named_parameters():
                if p.grad is not None:
                    wanted_one = want.gradients[step - 1][name]
                    found[f"step {step}: gradient of {name}"] = distance(whole(p.grad), wanted_one)
            pipe.update()
        for name, p in pipe.named_parameters():
            value = whole(p.detach()).clone()
            found[f"step {step}: {name}"] = distance(value, want.parameters[step - 1][name])
    x, y = batch_of(cell, NUM_STEPS)
    last = nn.ModuleList(copy.deepcopy(model_of(cell)))
    for name, p in last.named_parameters():
        p.data.copy_(want.parameters[-1][name])
    evaluated = pipe.evaluate(x, y).loss
    found["evaluated"] = _evaluated_apart(cell, last, x, y, evaluated)
    return found


def _evaluated_apart(cell: Cell, model: Any, x: Tensor, y: Tensor, found: Tensor) -> float:
    num = NUM * cell.shape[1]
    total = torch.zeros((), device=cell.device)
    with torch.no_grad(), torch.autocast(cell.device, torch.bfloat16) if _autocast(cell) else nullcontext():
        for x_m, y_m, scale in zip(cut(x, num), cut(y, num), weights(x, y, num, MSE), strict=True):
            made: dict[int, Tensor] = {}
            for stage, sources in enumerate(cell.schedule.graph.sources):
                made[stage] = model[stage](*[made[source] for source in sources] or [x_m])
            total = total + MSE(made[len(model) - 1], y_m) * scale
    return distance(found, total)
