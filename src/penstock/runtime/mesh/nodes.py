"""The nodes of a device mesh: which processes keep together, and where they lie.

    node 3 of (pp 2, dp 2, tp 2)     rank 1, replica 1 of torch's own mesh: its shards are processes 6 and 7

Nodes count by their lowest process, so that each keeps its number wherever it lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from penstock.cost import Mesh
from penstock.runtime.mesh.process_mesh import PIPELINE, REPLICAS, SHARDS


@dataclass(frozen=True)
class Nodes:
    """Attributes:
    mesh: where they lie. processes: of each node, by shard, their numbers in all of torch.distributed.
    """

    mesh: Mesh
    processes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, device_mesh: Any) -> Nodes:
        """Those of a device mesh with some of the dimensions pp, dp and tp."""
        names = list(device_mesh.mesh_dim_names)
        table = device_mesh.mesh
        for name in (PIPELINE, REPLICAS, SHARDS):
            if name not in names:
                table = table.unsqueeze(-1)
                names.append(name)
        table = table.permute(*(names.index(name) for name in (PIPELINE, REPLICAS, SHARDS)))
        pp, dp, tp = table.shape
        rows = [tuple(row) for row in table.reshape(pp * dp, tp).tolist()]
        by_number = sorted(rows, key=min)
        return cls(Mesh(pp, dp, tp, tuple(by_number.index(row) for row in rows)), tuple(by_number))

    def at(self, nodes: tuple[int, ...]) -> Nodes:
        """The same nodes at other places."""
        return replace(self, mesh=replace(self.mesh, nodes=nodes))

    @property
    def layout(self) -> torch.Tensor:
        """Process numbers by rank, replica and shard."""
        mesh = self.mesh
        rows = [[self.processes[node] for node in mesh.ring(rank)] for rank in range(mesh.pp)]
        return torch.tensor(rows)

    @property
    def is_everything(self) -> bool:
        """Whether no process of torch.distributed lies outside."""
        return sum(map(len, self.processes)) == dist.get_world_size()
