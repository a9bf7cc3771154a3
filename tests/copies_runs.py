"""Runs of schedules with several pipelines, without updates as ops: each beside a loop grouped alike.

The reference keeps a whole copy of the model a pipeline, runs that pipeline's microbatches through it with autograd,
and adds the copies' gradients up in the order of the pipelines.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.tensors.rng import mix
from plain_loop import call, cut, differences, plain_evaluate, weights
from runtime_cases import batches, mlp
from waiting import PATIENCE

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("chimera", {}),
    ("chimera", {"backward": "split"}),
    ("bitpipe", {}),
    ("vchimera", {"backward": "split"}),
    ("dualpipe", {}),
    ("amdp", {}),
]
NUM_MICROBATCHES = 8
MSE = nn.MSELoss()
ADAM = partial(torch.optim.AdamW, lr=0.05)


def grouped_step(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    schedule: ps.Schedule,
    step: int,
    autocast: torch.dtype | None = None,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, and the gradients by name."""
    num = schedule.num_microbatches
    models = [copy.deepcopy(model) for _ in schedule.placement.pipelines]
    losses: dict[int, Tensor] = {}
    scales = weights(inputs, targets, num, MSE)
    with torch.random.fork_rng(devices=[]):
        for m, (x, y) in enumerate(zip(cut(inputs, num), cut(targets, num), strict=True)):
            own = models[schedule.microbatch_pipeline[m]]
            with torch.autocast("cpu", autocast) if autocast else nullcontext():
                loss = MSE(call(own, x, mix(mix(0, step), m)), y) * scales[m]
            loss.backward()
            losses[m] = loss.detach()
    total = losses[0].clone()
    for m in range(1, num):
        total += losses[m]
    sums: dict[str, Tensor | None] = {}
    for each in models:
        for name, parameter in each.named_parameters():
            so_far, part = sums.get(name), parameter.grad
            sums[name] = part if so_far is None or part is None else so_far + part
    return total, sums


class Grouped:
    """The grouped loop over two steps of a schedule: losses, gradients and values after each, an evaluation."""

    def __init__(self, model: nn.Module, schedule: ps.Schedule) -> None:
        plain = copy.deepcopy(model)
        adam = ADAM(plain.parameters())
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        self.values: list[dict[str, Tensor]] = []
        for number, (x, y) in enumerate(steps(), start=1):
            loss, want = grouped_step(plain, x, y, schedule, number)
            for n, p in plain.named_parameters():
                p.grad = want[n]
            adam.step()
            self.losses.append(loss)
            self.gradients.append(want)
            self.values.append({n: p.detach().clone() for n, p in plain.named_parameters()})
        self.evaluated = plain_evaluate(plain, x, y, NUM_MICROBATCHES, MSE)


_GROUPED: dict[ps.Schedule, Grouped] = {}
"""The loop does not know who has the optimizer's state, and is run once for all."""


def steps() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return batches(NUM_MICROBATCHES, 3, 8)


def wrong(name: str, options: dict[str, Any], zero: bool, ranks: int = 4) -> list[str]:
    """What is not as in the grouped loop over two steps, in words."""
    schedule = ps.build(name, ranks, NUM_MICROBATCHES, **options)
    torch.manual_seed(3)
    model = nn.Sequential(*(mlp() for _ in range(schedule.num_stages + 1)))
    if schedule not in _GROUPED:
        _GROUPED[schedule] = Grouped(model, schedule)
    want = _GROUPED[schedule]
    found: list[str] = []
    pipe = ps.Pipeline(
        model,
        schedule,
        loss_fn=MSE,
        optimizer=ADAM,
        timeout=PATIENCE,
        parallel=ps.ParallelOptions(sharding="copies" if zero else "none"),
    )
    for number, (x, y) in enumerate(steps()):
        result = pipe.step(x, y, update=False)
        own = {n: p.grad for n, p in pipe.named_parameters()}
        found += differences({n: want.gradients[number][n] for n in own}, own)
        same = torch.equal(result.loss, want.losses[number])
        found += [] if same else [f"loss {result.loss} is not {want.losses[number]}"]
        pipe.update()
        values = {n: p.detach() for n, p in pipe.named_parameters()}
        found += differences({n: want.values[number][n] for n in values}, values)
    evaluated = pipe.evaluate(x, y).loss
    found += [] if torch.equal(evaluated, want.evaluated) else [f"evaluated {evaluated} is not {want.evaluated}"]
    return found
