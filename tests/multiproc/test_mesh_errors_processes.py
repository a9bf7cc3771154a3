"""Meshes whose processes wait for one another inside torch's own ops: every wait ends, and says what it was for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.runtime import DeadlineExceeded
from processes import appears, run_ranks
from tie_runs import by_columns

pytestmark = pytest.mark.multiproc

MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "fsdp": ((1, 2, 1), {"sharding": "fsdp"}),
    "shards": ((1, 1, 2), {"parallelize": by_columns}),
}


def late(rank: int, name: str, folder: str) -> str:
    """Two steps; process 1 does not come to the second."""
    shape, options = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    pipe = ps.Pipeline(model, ps.build("1f1b", 1, 2), loss_fn=nn.MSELoss(), mesh=mesh, timeout=1, **options)
    x = torch.randn(8, 4)
    pipe.step(x, x)
    if rank == 1:
        appears(Path(folder) / "failed", within=40)
        return ""
    try:
        pipe.step(x, x)
    except DeadlineExceeded as error:
        return str(error)
    finally:
        (Path(folder) / "failed").touch()
    return "a step went on alone"


@pytest.mark.parametrize("name", MESHES)
def test_a_process_that_is_late_with_its_parts_is_named_when_the_timeout_has_passed(
    name: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, late, name, str(tmp_path))
    assert (first.code, second.code) == (0, 0), first.text[-2000:] + second.text[-2000:]
    assert first.value.startswith("rank 0 waited 1 s for parts of a stage from the other ranks"), first.value
