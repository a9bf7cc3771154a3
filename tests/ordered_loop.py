"""The plain loop in declared orders: forwards stage by stage in the order of each, gradients summed in that of each.

Written from the words alone: every stage runs its forwards in the order of its row; each microbatch's gradients are
taken by autograd; those of a parameter are added up in the order of the backwards of the first stage that has it;
with several pipelines each has a copy of the model, and the copies' sums are added up in the order of the pipelines.
The loss is the sum of the microbatches' losses in ascending order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from penstock.runtime.tensors.rng import mix
from plain_loop import cut, differences, named_as, seed_devices, weights
from runtime_cases import W, mlp
from waiting import PATIENCE

MSE = nn.MSELoss()
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SOME_WORTH = 300
"""A threshold that weight gradients of three samples reach and those of two do not."""


def row_order(schedule: ps.Schedule, kinds: str, stage: int, pipeline: int) -> list[int]:
    """The microbatches of some kinds of ops of a stage as the row has them."""
    rank = schedule.placement.pipelines[pipeline][stage]
    of = schedule.microbatch_pipeline
    return [op.microbatch for op in schedule.order[rank] if op.stage == stage and op.kind in kinds
            and of[op.microbatch] == pipeline]  # fmt: skip


def ordered_step(
    stages: Sequence[nn.Module], inputs: Tensor, targets: Tensor, schedule: ps.Schedule, step: int
) -> Tensor:
    """Gives the parameters, which have no gradients, those of a step; returns the loss. Each entry is one stage."""
    num = schedule.num_microbatches
    batch = cut(inputs, num), cut(targets, num), weights(inputs, targets, num, MSE)
    models = [list(stages), *(copy.deepcopy(list(stages)) for _ in schedule.placement.pipelines[1:])]
    losses: dict[int, Tensor] = {}
    sums: list[Tensor | None] = []
    with torch.random.fork_rng(devices=[]):
        for pipeline, model in enumerate(models):
            part = _gradients(model, schedule, pipeline, batch, losses, step)
            sums = [_sum(a, b) for a, b in zip(sums, part, strict=True)] if pipeline else part
    for parameter, gradient in zip(nn.ModuleList(stages).parameters(), sums, strict=True):
        parameter.grad = gradient
    total = losses[0].clone()
    for m in range(1, num):
        total += losses[m]
    return total


def _gradients(
    model: list[nn.Module],
    schedule: ps.Schedule,
    pipeline: int,
    batch: tuple[list[Tensor], list[Tensor], list[float]],
    losses: dict[int, Tensor],
    step: int,
) -> list[Tensor | None]:
    """One pipeline's sums, in the order of the model's parameters."""
    xs, ys, scales = batch
    values = dict(enumerate(xs))
    for index, stage in enumerate(model):
        for m in row_order(schedule, "F", index, pipeline):
            seed_devices(mix(mix(mix(0, step), m), index))
            values[m] = stage(values[m])
    parameters = list(nn.ModuleList(model).parameters())
    owner = {id(p): index for index, stage in reversed(list(enumerate(model))) for p in stage.parameters()}
    found: dict[int, list[Tensor | None]] = {}
    for m in row_order(schedule, "F", 0, pipeline):
        loss = MSE(values[m], ys[m]) * scales[m]
        losses[m] = loss.detach()
        loss.backward()
        found[m] = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
    sums: list[Tensor | None] = []
    for place, parameter in enumerate(parameters):
        total: Tensor | None = None
        for m in row_order(schedule, "BW", owner[id(parameter)], pipeline):
            total = _sum(total, found[m][place])
        sums.append(total)
    return sums


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def model_of(num_stages: int, tied: bool = False) -> list[nn.Module]:
    """Stages with dropout and with statistics of what they are given; the outer ones share a weight where `tied`."""
    stages: list[nn.Module] = [nn.Sequential(mlp(), nn.BatchNorm1d(W)) for _ in range(num_stages)]
    if tied and num_stages > 1:
        stages[-1][0][0].weight = stages[0][0][0].weight  # type: ignore[index, union-attr]
    return stages


def wrong(
    schedule: ps.Schedule, dispatch: str = "frozen", merge: int = 0, extra: int = 1, tied: bool = False
) -> list[str]:
    """Where two steps of a pipeline are not those of the ordered loop, in words.

    Args:
        merge: work from which a weight gradient waits for W.
        extra: samples more than two a microbatch.
    """
    torch.manual_seed(5)
    stages = model_of(schedule.num_stages, tied)
    plain = copy.deepcopy(stages)
    whole = named_as(plain)
    optimizer = SGD(whole.parameters())
    found: list[str] = []
    before, slot_module.MERGE_WORK = slot_module.MERGE_WORK, merge
    pipe = ps.Pipeline(stages, schedule, loss_fn=MSE, optimizer=SGD, dispatch=dispatch, timeout=PATIENCE)
    try:
        for step in (1, 2):
            x, y = (torch.randn(2 * schedule.num_microbatches + extra, W) for _ in range(2))
            loss = ordered_step(plain, x, y, schedule, step)
            got = pipe.step(x, y, update=False).loss
            found += [] if torch.equal(got, loss) else [f"step {step}: loss {got.item()!r}, want {loss.item()!r}"]
            mine = {n: p.grad for n, p in pipe.named_parameters()}
            want = {n: p.grad for n, p in whole.named_parameters()}
            found += [f"step {step}: {d}" for d in differences({n: want[n] for n in mine}, mine)]
            pipe.update()
            optimizer.step()
            optimizer.zero_grad()
        values = {n: p.detach() for n, p in whole.named_parameters()}
        mine = {n: p.detach() for n, p in pipe.named_parameters()}
        found += [f"after the updates: {d}" for d in differences({n: values[n] for n in mine}, mine)]
        kept = dict(whole.named_buffers())
        own = {n: b for stage in pipe._local.model.stages.values() for n, b in stage.named_buffers()}
        found += [f"buffer: {d}" for d in differences({n: kept[n] for n in own}, own)]
    finally:
        slot_module.MERGE_WORK = before
        pipe.close()
    return found
