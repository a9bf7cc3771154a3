"""A torch profile of one schedule, recorded here, and a prediction of another from it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile

import penstock as ps
from penstock.analyze import analyze_trace, predict
from penstock.formats.traces import read_trace
from penstock.integrations.torch import PlannedSchedule
from processes import run_ranks_to_end

pytestmark = pytest.mark.multiproc
WIDTH, MICROBATCHES = 8, 4


class Sleeping(PipelineStage):
    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.005)
        return super().forward_one_chunk(*args, **kwargs)


def profiled(rank: int, folder: str) -> None:
    plan = ps.build("1f1b", 2, MICROBATCHES)
    stage = Sleeping(nn.Linear(WIDTH, WIDTH), rank, 2, torch.device("cpu"), group=dist.group.WORLD)
    schedule = PlannedSchedule(stage, plan, loss_fn=nn.MSELoss())
    x = torch.ones(2 * MICROBATCHES, WIDTH)

    def step() -> None:
        schedule.step(*[x] * (rank == 0), target=x if rank == 1 else None)

    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(2):
            step()
            dist.barrier()
    found.export_chrome_trace(f"{folder}/rank{rank}.json")


def test_another_schedule_is_predicted_from_a_profile_of_torch(tmp_path: Path) -> None:
    run_ranks_to_end(2, profiled, str(tmp_path))
    found = analyze_trace(read_trace([tmp_path]))
    assert found.fit is not None
    assert found.fit.name == "1f1b"
    assert found.fit.links.conditions.keys() == {(0, 1), (1, 0)}
    assert all(ms > 0 for kind in "FB" for ms in found.fit.times[kind].ravel())
    late = predict(found, "zb-h1", links=ps.Links({(0, 1): 1e4}), channels="gloo")
    plain = predict(found, "zb-h1", channels="gloo")
    assert plain.bar is not None
    assert plain.bar[0] < plain.time < plain.bar[1]
    assert late.time > 2e4  # there and back
    assert late.time > plain.time
