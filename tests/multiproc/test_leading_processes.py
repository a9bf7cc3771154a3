"""Shards of the same stages take the same decisions, whatever comes in where and when."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from packed import packed
from penstock.models import CrossEntropy, GPTConfig, gpt_stage, parallelize
from penstock.runtime import partition
from processes import run_ranks_to_end
from waiting import PATIENCE

pytestmark = [pytest.mark.multiproc]

CONFIG = GPTConfig(vocab_size=19, context=8, depth=6, width=16, num_heads=4)
TOKENS = torch.arange(8 * 9).reshape(8, 9) * 7 % 19


def trained(schedule: ps.Schedule, **options: Any) -> tuple[ps.Pipeline, list[float]]:
    parts = partition([1.0] * CONFIG.num_layers, schedule.num_stages)
    pipe = ps.Pipeline(
        [partial(gpt_stage, CONFIG, list(part)) for part in parts],
        schedule,
        loss_fn=CrossEntropy(),
        optimizer=torch.optim.SGD,
        **packed(**options),
    )
    return pipe, [float(pipe.step(TOKENS[:, :-1], TOKENS[:, 1:]).loss) for _ in range(4)]


def late_in_one_shard(rank: int) -> tuple[list[float], list[str]]:
    """Messages are late by random times, and what arrives when is each process's own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    late = "latency:normal:6ms,6ms@5ms..20ms#7"
    links = ps.Links.parse(f"0:1={late} 1:0={late}")
    pipe, losses = trained(
        ps.build("zb-v", 2, 8), mesh=mesh, parallelize=parallelize, dispatch="dynamic", links=links, timeout=PATIENCE
    )
    order = [str(op) for op, _, _ in pipe._local.last[1][0].times]  # type: ignore[index]
    pipe.close()
    return losses, order


@pytest.mark.slow
def test_the_first_shard_decides_for_all() -> None:
    torch.set_num_threads(1)
    outcomes = run_ranks_to_end(4, late_in_one_shard)
    _, expected = trained(ps.build("zb-v", 2, 8))
    for outcome in outcomes:
        assert outcome.value[0] == pytest.approx(expected, rel=1e-5)
    orders = [outcome.value[1] for outcome in outcomes]
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    frozen = [[str(op) for op in row] for row in ps.build("zb-v", 2, 8).order]
    assert [orders[0], orders[2]] != frozen  # or nothing was decided
