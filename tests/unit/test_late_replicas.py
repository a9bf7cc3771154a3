"""What is injected into the links between replicas, wherever gradients are summed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.parameters.replicas import Replicas
from penstock.runtime.parameters.sharding import ReplicaParameters
from waiting import PATIENCE

pytestmark = pytest.mark.unit


class LateBy:
    """A ring over which every sum ends 40 ms later."""

    def __init__(self) -> None:
        self.num_bytes: list[float] = []

    def due(self, num_bytes: float) -> int:
        self.num_bytes.append(num_bytes)
        return time.perf_counter_ns() + 40_000_000


def test_sums_of_updates_that_are_ops_came_as_over_links_without_delay() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        peers, ring = GroupPeers(dist.group.WORLD, PATIENCE), LateBy()
        parameter = Parameter(torch.zeros(3))
        model: Any = SimpleNamespace(named={"weight": parameter}, parameters=[parameter])
        late: Any = ring
        replicas = Replicas(model, peers, [], ReplicaParameters(peers), True, late)
        begin = time.perf_counter_ns()
        found = replicas.summed([parameter], [torch.ones(3)])
        assert time.perf_counter_ns() - begin >= 40_000_000
        assert ring.num_bytes == [12]
        assert found[0] is not None
        assert torch.equal(found[0], torch.ones(3))
    finally:
        dist.destroy_process_group()
