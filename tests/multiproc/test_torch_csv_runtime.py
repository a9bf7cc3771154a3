"""Schedules written for torch, run by torch's own runtime in two processes: the losses and gradients of ours."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import penstock as ps
from processes import run_ranks

pytestmark = pytest.mark.multiproc

WIDTH, NUM_MICROBATCHES = 8, 4
NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
FORMS = ("compute_only", "compute_comms")


def layers(stage: int) -> nn.Sequential:
    torch.manual_seed(100 + stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    first, second = (torch.randn(3 * NUM_MICROBATCHES, WIDTH, generator=draws) for _ in range(2))
    return first, second


def by_torch(schedule: ps.Schedule, form: Any, rank: int, folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of each microbatch, where the last stage is, and this rank's gradients."""
    path = folder / f"{form}.csv"
    ps.save(schedule, path, dialect=f"torch:{form}")
    modules = {stage: layers(stage) for stage in schedule.stages_of(rank)}
    stages = [PipelineStage(m, stage, schedule.num_stages, torch.device("cpu")) for stage, m in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches, nn.MSELoss())
    runtime._load_csv(str(path), format=form)
    inputs, targets = batch()
    first, last = 0 in modules, schedule.num_stages - 1 in modules
    losses: list[Tensor] = []
    runtime.step(*[inputs] * first, target=targets if last else None, losses=losses if last else None)
    return [loss.detach() for loss in losses], gradients(modules)


def by_ours(schedule: ps.Schedule, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The batch's loss and this rank's gradients."""
    modules: dict[int, nn.Sequential] = {}

    def build(stage: int) -> nn.Sequential:
        modules[stage] = layers(stage)
        return modules[stage]

    pipe = ps.Pipeline(
        [partial(build, stage) for stage in range(schedule.num_stages)],
        schedule,
        loss_fn=nn.MSELoss(),
        mesh=dist.group.WORLD,
    )
    loss = pipe.step(*batch(), update=False).loss
    return loss, gradients(dict(sorted(modules.items())))


def gradients(modules: dict[int, nn.Sequential]) -> dict[str, Tensor]:
    return {
        f"stage {stage} {name}": p.grad.clone()
        for stage, module in sorted(modules.items())
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def compare(rank: int, num_ranks: int) -> dict[str, tuple[int, list[str]]]:
    """For each schedule and form, how many values were compared and, in words, those that differ in any bit."""
    found: dict[str, tuple[int, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            schedule = ps.build(name, num_ranks, NUM_MICROBATCHES)
            loss, ours = by_ours(schedule, rank)
            for form in FORMS:
                losses, torchs = by_torch(schedule, form, rank, Path(folder))
                wrong = [f"{key} is in one only" for key in ours.keys() ^ torchs.keys()]
                for key in ours.keys() & torchs.keys():
                    if not torch.equal(ours[key], torchs[key]):
                        wrong.append(f"{key} differs by {(ours[key] - torchs[key]).abs().max():g}")
                if losses:
                    total = torch.zeros(())
                    for each in losses:
                        total = total + each * (1 / NUM_MICROBATCHES)
                    if not torch.equal(total, loss):
                        wrong.append(f"loss {total} differs from {loss}")
                found[f"{name} {form}"] = len(ours) + bool(losses), wrong
    return found


def test_torchs_runtime_gives_our_losses_and_gradients() -> None:
    outcomes = run_ranks(2, compare, 2, deadline=100)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-3000:] for o in outcomes)
    wrong = [f"rank {o.rank}, {name}: {text}" for o in outcomes for name, (_, w) in o.value.items() for text in w]
    assert wrong == []
    for name in NAMES:
        for form in FORMS:
            stages = ps.build(name, 2, NUM_MICROBATCHES).num_stages
            assert sum(o.value[f"{name} {form}"][0] for o in outcomes) == 4 * stages + 1
