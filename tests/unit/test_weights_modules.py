"""Stages of real modules under every rule, equal to the bit to a loop with a module of its own for each microbatch.

Autograd saves LayerNorm's weight itself and a view of Linear's; both must give the backward what the rule says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import Op, Schedule, count_mismatch, with_updates
from tied_updates_loop import VersionsLoop, with_rule
from tiers import others_nightly

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


# -- schedules ---------------------------------------------------------------------------------------------------


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


STEPPED = [(rule, order) for rule in RULES for order in ORDERS if rule != "pipedream-2bw" or "window 4" in order]


@pytest.mark.parametrize(
    ("rule", "order"),
    others_nightly(STEPPED, STEPPED[::2]),
)
def test_stages_train_as_on_copies_of_their_own(rule: str, order: str) -> None:
    train_beside_the_loop(with_rule(ORDERS[order](), rule), RULES[rule], clip_norm=0.5)


@pytest.mark.parametrize(
    ("rule", "zero"),
    # Predictions need the optimizer's state on every copy.
    [(rule, zero) for rule in RULES for zero in (True, False) if not zero or rule not in ("spectrain", "xpipe")],
)
def test_copies_in_several_pipelines_train_as_one(rule: str, zero: bool) -> None:
    schedule = with_rule(ps.build("amdp", 4, 24, window=8), rule)
    sharding = "copies" if zero else "none"
    pipe = train_beside_the_loop(schedule, RULES[rule], parallel=ps.ParallelOptions(sharding=sharding))
    copies = pipe._local.model.copies.here
    for stage in range(4):
        for ours, other in zip(copies[0, stage].parameters(), copies[1, stage].parameters(), strict=True):
            assert torch.equal(ours, other)


def train_beside_the_loop(
    schedule: Schedule, make: Make, clip_norm: float | None = None, **options: Any
) -> ps.Pipeline:
    stages = model(4)
    loop = VersionsLoop(nn.Sequential(*copy.deepcopy(stages)), schedule, make, clip_norm, loss=loss)
    precision = ps.PrecisionOptions(clip_norm=clip_norm)
    pipe = ps.Pipeline(stages, schedule, loss_fn=loss, optimizer=make, precision=precision, **options)
    for seed in range(2):
        inputs, targets = batch(schedule.num_microbatches, seed)
        loop.step(inputs, targets)
        pipe.step(inputs, targets)
        for name, want in loop.versions.items():
            assert torch.equal(nn.Sequential(*stages).get_parameter(name), want[-1]), name
        assert pipe.mismatch() == count_mismatch(schedule)
        assert all(p.grad is None for stage in stages for p in stage.parameters())
    return pipe
