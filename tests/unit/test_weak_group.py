"""A pipeline does not keep the process group alive that it runs over."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.collective import let_go_of_defaults


@pytest.fixture
def group(tmp_path: Path) -> Iterator[weakref.ref[dist.ProcessGroup]]:
    """The whole of a torch.distributed of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield weakref.ref(dist.group.WORLD)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["host", "direct"])
def test_regression_abort_at_exit_of_a_process_whose_pipeline_kept_the_group(
    group: weakref.ref[dist.ProcessGroup], transport: str
) -> None:
    """The group's threads must end with it; left to the end of Python, they sometimes ended the process instead."""
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(3, 1)),
        ps.build("gpipe", 1, 2),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        mesh=group(),
        transport=transport,
    )
    pipe.step(torch.ones(4, 3), torch.ones(4, 1))
    dist.destroy_process_group()
    let_go_of_defaults()  # as at exit
    assert group() is None
    if transport == "host":  # whose ranks share memory: a step needs no group
        pipe.step(torch.ones(4, 3), torch.ones(4, 1))
    else:
        with pytest.raises(RuntimeFailure, match="destroy_process_group"):
            pipe.step(torch.ones(4, 3), torch.ones(4, 1))
    pipe.close()
