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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

import penstock as ps
from processes import run_ranks_to_end

pytestmark = pytest.mark.multiproc

WIDTH, NUM_MICROBATCHES = 8, 4
NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
if torch.__version__.startswith("2.11."):
    NAMES.remove("zb-v")  # that torch then sends from a rank to itself, which gloo can't
WAYS = ("compute_only", "compute_comms", "compute_comms, sharded", "compute_only, in lock-step")
"""The form of the file, and how torch runs it: with stages sharded by FSDP, or by the older runtime, whose ranks
look at what their neighbours do in the same column, so that bubbles have to be in their place."""


def layers(stage: int) -> nn.Sequential:
    torch.manual_seed(100 + stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    first, second = (torch.randn(3 * NUM_MICROBATCHES, WIDTH, generator=draws) for _ in range(2))
    return first, second


def by_torch(schedule: ps.Schedule, way: str, rank: int, folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of each microbatch, where the last stage is, and this rank's gradients."""
    form: Any = way.split(",")[0]
    path = folder / f"{form}.csv"
    waits = "_waits" if form == "compute_comms" and hasattr(schedules, "WAIT_SEND_F") else ""  # since torch 2.15
    ps.save(schedule, path, dialect=f"torch:{form}{waits}")
    modules = {stage: layers(stage) for stage in schedule.stages_of(rank)}
    mesh = init_device_mesh("cpu", (schedule.num_ranks, 1), mesh_dim_names=("pipeline", "data"))
    if "sharded" in way:
        for module in modules.values():
            fully_shard(module, mesh=mesh["data"])
    group = mesh["pipeline"].get_group()
    stages = [PipelineStage(m, s, schedule.num_stages, torch.device("cpu"), group=group) for s, m in modules.items()]
    kind = PipelineScheduleMulti if "lock-step" in way else _PipelineScheduleRuntime
    runtime = kind(list(stages), schedule.num_microbatches, nn.MSELoss())
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
        f"stage {stage} {name}": p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for stage, module in sorted(modules.items())
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def compare(rank: int, num_ranks: int) -> dict[str, tuple[int, list[str]]]:
    """For each schedule and way, how many values were compared and, in words, those that differ in any bit."""
    found: dict[str, tuple[int, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            schedule = ps.build(name, num_ranks, NUM_MICROBATCHES)
            loss, ours = by_ours(schedule, rank)
            for way in WAYS:
                if "lock-step" in way and name == "zb-v":
                    continue  # it has no place for stages side by side on a rank
                losses, torchs = by_torch(schedule, way, rank, Path(folder))
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
                found[f"{name} {way}"] = len(ours) + bool(losses), wrong
    return found


@pytest.mark.slow
def test_torchs_runtime_gives_our_losses_and_gradients() -> None:
    outcomes = run_ranks_to_end(2, compare, 2)
    wrong = [f"rank {o.rank}, {name}: {text}" for o in outcomes for name, (_, w) in o.value.items() for text in w]
    assert wrong == []
    for key in outcomes[0].value:
        num_stages = ps.build(key.split()[0], 2, NUM_MICROBATCHES).num_stages
        assert sum(o.value[key][0] for o in outcomes) == 4 * num_stages + 1
    assert len(outcomes[0].value) == len(NAMES) * len(WAYS) - ("zb-v" in NAMES)
