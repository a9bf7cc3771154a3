"""Stages of real modules under every rule, equal to the bit to a loop with a module of its own for each microbatch.

Autograd saves LayerNorm's weight itself and a view of Linear's; both must give the backward what the rule says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import Op, Schedule, Updates, count_mismatch, with_updates

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("small_work_is_deferred")]

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Tied(nn.Module):
    """A linear layer used twice, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Linear(8, 8)
        self.again = self.once
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.once(x)))


def model(num_stages: int) -> list[nn.Module]:
    """Stages with an embedding, layer norms, linear layers, tied and frozen parameters, and one with none at all."""
    frozen = nn.Linear(8, 8)
    frozen.weight.requires_grad_(False)
    first = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    inner = [nn.Sequential(nn.LayerNorm(8), Tied(), frozen), nn.Tanh()]
    last = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5))
    return [first, *inner[: num_stages - 2], last]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(num: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    x = [torch.randint(11, (2, 3), generator=draw) for _ in range(num)]
    return x, [torch.randint(5, (2, 3), generator=draw) for _ in range(num)]


# -- the reference -----------------------------------------------------------------------------------------------


class Reference:
    """Runs F and B of every microbatch on a deep copy of its stage, whose weights are set to what each reads."""

    def __init__(self, stages: Sequence[nn.Module], schedule: Schedule, make: Make) -> None:
        self.schedule = schedule
        self.newest = [copy.deepcopy(stage) for stage in stages]
        self.optimizers = [make(trained(s) or [nn.Parameter(torch.zeros(0))]) for s in self.newest]
        self.versions: list[list[list[Tensor]]] = [[copies(trained(s))] for s in self.newest]
        """Of each stage, after so many updates."""
        self.states: list[list[list[Any]]] = [[[{} for _ in trained(s)]] for s in self.newest]
        """Of each stage, what the optimizer had of each parameter after so many updates."""

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor], clip_norm: float | None = None) -> None:
        windows, rule = self.schedule.windows, self.schedule.updates.rule if self.schedule.updates else ""
        assert windows is not None
        first = len(self.versions[0]) - 1
        applied: dict[tuple[int, int], int] = {}
        own: dict[tuple[int, int], nn.Module] = {}
        held: dict[Any, Any] = {}
        sums: dict[tuple[int, int, int], list[Tensor | None]] = {}
        for op in run_order(self.schedule):
            kind, i, m = op
            pipeline = self.schedule.pipeline_of(op)
            passed, window = applied.get((pipeline, i), 0), m // windows.window
            if kind == "F":
                version = max(first + window - 1, 0) if rule == "pipedream-2bw" else first + passed
                own[i, m] = copy.deepcopy(self.newest[i])
                write(own[i, m], self.predicted(i, version, "F", window - passed))
                x = inputs[m] if i == 0 else held.pop((i - 1, m)).detach().requires_grad_()
                y = held[i, m] = own[i, m](x)
                if i == len(self.newest) - 1:
                    y = loss(y, targets[m]) / len(windows.microbatches(window))
                held["graph", i, m] = x, y
            elif kind in "BI":
                x, y = held.pop(("graph", i, m))
                module = own.pop((i, m))
                if rule in ("none", "spectrain", "xpipe"):
                    write(module, self.predicted(i, first + passed, "B", 0))
                torch.autograd.backward(y, held.pop(("g", i + 1, m), None))
                held["g", i, m] = x.grad
                gradients = [p.grad for p in trained(module)]
                before = sums.get((pipeline, i, window))
                sums[pipeline, i, window] = gradients if before is None else added(before, gradients)
            elif kind == "U":
                update, _ = windows.update_of(m)
                applied[pipeline, i] = update + 1
                if pipeline == 0:
                    parts = [sums[j, i, update] for j in range(windows.num_pipelines) if (j, i, update) in sums]
                    self.step(i, reduce(added, parts), clip_norm)

    def step(self, i: int, total: list[Tensor | None], clip_norm: float | None) -> None:
        parameters = trained(self.newest[i])
        for p, gradient in zip(parameters, total, strict=True):
            p.grad = gradient
        if clip_norm is not None and parameters:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        self.optimizers[i].step()
        self.versions[i].append(copies(parameters))
        self.states[i].append([copy.deepcopy(self.optimizers[i].state.get(p, {})) for p in parameters])

    def predicted(self, i: int, version: int, kind: str, ahead: int) -> list[Tensor]:
        assert self.schedule.updates is not None
        rule, window = self.schedule.updates.rule, self.schedule.updates.window
        weights, states, group = (
            self.versions[i][version],
            self.states[i][version],
            self.optimizers[i].param_groups[0],
        )
        if rule == "spectrain":
            s = (i // 2 + (self.schedule.num_stages - i - 1 if kind == "F" else 0)) // window
            factor = -(s * group["lr"])
            return [w + factor * own["momentum_buffer"] if own else w for w, own in zip(weights, states)]
        if rule == "xpipe" and ahead:
            return [adam_ahead(w, ahead, group, own) if own else w for w, own in zip(weights, states)]
        return weights


def adam_ahead(weight: Tensor, s: int, group: dict[str, Any], own: dict[str, Any]) -> Tensor:
    (b1, b2), t = group["betas"], float(own["step"])
    divisor = own["exp_avg_sq"].sqrt() / (1 - b2**t) ** 0.5 + group["eps"]
    return torch.addcdiv(weight, own["exp_avg"], divisor, value=-(s * (group["lr"] / (1 - b1**t))))


def copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def write(module: nn.Module, values: Sequence[Tensor]) -> None:
    for p, value in zip(trained(module), values, strict=True):
        p.data.copy_(value)


def added(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]


# -- schedules ---------------------------------------------------------------------------------------------------


def run_order(schedule: Schedule) -> list[Op]:
    """An order in which one process can run all ops: each rank's own, as far as it gets, in turn."""
    rows = [list(row) for row in schedule.order]
    present = {op: 0 for row in rows for op in row}
    done: set[Op] = set()
    order: list[Op] = []
    while any(rows):
        before = len(order)
        for row in rows:
            while row and is_ready(schedule, row[0], present, done):
                done.add(row[0])
                order.append(row.pop(0))
        assert len(order) > before, "the schedule is stuck"
    return order


def is_ready(schedule: Schedule, op: Op, present: Mapping[Op, int], done: set[Op]) -> bool:
    kind, i, m = op
    if kind == "F":
        return i == 0 or Op("F", i - 1, m) in done
    if kind in "BI":
        last = i == schedule.num_stages - 1
        return last or Op("B", i + 1, m) in done or Op("I", i + 1, m) in done
    if kind == "W":
        return Op("I", i, m) in done
    assert kind == "U"
    assert schedule.windows is not None
    return all(each in done for each in schedule.windows.needed(op, present))


def with_rule(schedule: Schedule, rule: str) -> Schedule:
    assert schedule.updates is not None
    schedule = replace(schedule, updates=Updates(schedule.updates.window, None, rule))
    ps.check(schedule)
    return schedule


def split(num_ranks: int, num: int, window: int) -> Schedule:
    """1F1B whose W waits for the next microbatch's I: across the end of a window, too."""
    rows = []
    for row in ps.build("1f1b", num_ranks, num).order:
        ops: list[Op] = []
        for op in row:
            if op.kind == "F":
                ops.append(op)
                continue
            ops.append(Op("I", op.stage, op.microbatch))
            if op.microbatch:
                ops.append(Op("W", op.stage, op.microbatch - 1))
        rows.append((*ops, Op("W", row[0].stage, num - 1)))
    return with_updates(replace(ps.build("1f1b", num_ranks, num), order=tuple(rows)), window)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def nadam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(
        parameters, lr=0.01, betas=(0.99, 0.999), momentum_decay=0.004, decoupled_weight_decay=True, weight_decay=0.01
    )


RULES: dict[str, Make] = {
    "none": sgd,
    "pipedream": adam,
    "pipedream-2bw": sgd,
    "spectrain": sgd,
    "xpipe": adam,
    "vnag": nadam,
}
ORDERS = {
    "window 1": lambda: ps.build("pipedream", 4, 7, window=1),
    "window 4": lambda: ps.build("pipedream", 4, 14, window=4),
    "split": lambda: split(4, 7, 1),
    "split, window 4": lambda: split(4, 14, 4),
}


def parameters_of(stages: Sequence[nn.Module]) -> list[Tensor]:
    return [p.detach() for stage in stages for p in stage.parameters()]


@pytest.mark.parametrize(
    ("rule", "order"),
    [(rule, order) for rule in RULES for order in ORDERS if rule != "pipedream-2bw" or "window 4" in order],
)
def test_stages_train_as_on_copies_of_their_own(rule: str, order: str) -> None:
    train_beside_the_reference(with_rule(ORDERS[order](), rule), RULES[rule], clip_norm=0.5)


@pytest.mark.parametrize(
    ("rule", "zero"),
    # Predictions need the optimizer's state on every copy.
    [(rule, zero) for rule in RULES for zero in (True, False) if not zero or rule not in ("spectrain", "xpipe")],
)
def test_copies_in_several_pipelines_train_as_one(rule: str, zero: bool) -> None:
    schedule = with_rule(ps.build("amdp", 4, 24, window=8), rule)
    sharding = "copies" if zero else "none"
    pipe = train_beside_the_reference(schedule, RULES[rule], parallel=ps.ParallelOptions(sharding=sharding))
    copies = pipe._local.model.copies.here
    for stage in range(4):
        for ours, other in zip(copies[0, stage].parameters(), copies[1, stage].parameters(), strict=True):
            assert torch.equal(ours, other)


def train_beside_the_reference(
    schedule: Schedule, make: Make, clip_norm: float | None = None, **options: Any
) -> ps.Pipeline:
    stages = model(4)
    reference = Reference(stages, schedule, make)
    precision = ps.PrecisionOptions(clip_norm=clip_norm)
    pipe = ps.Pipeline(stages, schedule, loss_fn=loss, optimizer=make, precision=precision, **options)
    for seed in range(2):
        inputs, targets = batch(schedule.num_microbatches, seed)
        reference.run(inputs, targets, clip_norm=clip_norm)
        pipe.step(inputs, targets)
        for ours, want in zip(parameters_of(stages), parameters_of(reference.newest), strict=True):
            assert torch.equal(ours, want)
        assert pipe.mismatch() == count_mismatch(schedule)
        assert all(p.grad is None for stage in stages for p in stage.parameters())
    return pipe
