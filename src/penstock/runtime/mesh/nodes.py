"""The nodes of a device mesh: which processes stay together, and where they are.

    node 3 of (pp 2, dp 2, tp 2)     rank 1, replica 1 of torch's own mesh: its shards are processes 6 and 7

Nodes are numbered in the order of their lowest processes, so each keeps its number wherever it is.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.cost import Mesh
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.process_mesh import PIPELINE, REPLICAS, SHARDS

KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether torch can make a group whose processes are not in ascending order."""


@dataclass(frozen=True)
class Nodes:
    """Attributes:
    mesh: where the nodes are. processes: for each node, by shard, its process numbers in all of torch.distributed.
    """

    mesh: Mesh
    processes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, device_mesh: Any) -> Nodes:
        """The nodes of a device mesh with some of the dimensions pp, dp and tp."""
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
        """Whether the nodes hold all processes of torch.distributed."""
        return sum(map(len, self.processes)) == dist.get_world_size()


def device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """Makes the device mesh of a `ps.Mesh`, with dimensions pp, dp and tp. Every process must call it.

    torch sorts the processes of a group. So for `DeviceMesh("cpu", [[3, 1], [2, 0]])` it says that process 3 is at
    (0, 0), but makes it the second of its group. If nodes are not in ascending order, this function makes unsorted
    groups first, and then the mesh.

    Args:
        mesh: the sizes of the mesh, and the node at each place.
        device_type: "cpu" or "cuda".

    Raises:
        RuntimeFailure: torch.distributed has another number of processes, or this torch can only make sorted groups.

    Examples:
        >>> import penstock as ps
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ps.runtime.device_mesh(ps.Mesh(pp=1, dp=1)).mesh_dim_names
        ('pp', 'dp', 'tp')
        >>> dist.destroy_process_group()
    """
    layout = torch.tensor(mesh.processes())
    if layout.numel() != dist.get_world_size():
        raise RuntimeFailure(
            f"a mesh of {mesh.pp} x {mesh.dp} x {mesh.tp} has {layout.numel()} processes, torch.distributed has "
            f"{dist.get_world_size()}; start as many or change pp, dp or tp"
        )
    return device_mesh_of(layout, device_type)


def device_mesh_of(layout: torch.Tensor, device_type: str = "cpu") -> DeviceMesh:
    """Makes the device mesh of all processes, given by rank, replica and shard. Every process must call it.

    Raises:
        RuntimeFailure: torch can't make one of the groups. Every process raises it, before any group is made.
    """
    require_order(layout)
    made: list[Any] = [_group_of(layout, dim) for dim in range(layout.ndim)]
    return DeviceMesh.from_group(made, device_type, mesh=layout, mesh_dim_names=(PIPELINE, REPLICAS, SHARDS))


def why_sorted() -> str | None:
    """Why groups must have their processes in ascending order, in words; None if any order is possible."""
    if KEEPS_ORDER:
        return None
    return (
        f"torch {torch.__version__} sorts the processes of a group; install a torch whose "
        "torch.distributed.new_group takes sort_ranks (2.13 does)"
    )


def require_order(layout: torch.Tensor) -> None:
    """Raises RuntimeFailure if torch would change the order of processes in some group of the mesh."""
    why = why_sorted()
    unsorted = [row for dim in range(layout.ndim) for row in _rows(layout, dim) if row != sorted(row)]
    if why is not None and unsorted:
        raise RuntimeFailure(f"nodes can't lie so that processes {unsorted[0]} are a group in this order: {why}")


def _rows(layout: torch.Tensor, dim: int) -> list[list[int]]:
    """The processes of each group along a dimension."""
    rows: list[list[int]] = layout.movedim(dim, -1).reshape(-1, layout.shape[dim]).tolist()
    return rows


def _group_of(layout: torch.Tensor, dim: int) -> dist.ProcessGroup:
    """This process's group along a dimension. All processes make all groups, in the same order."""
    mine = None
    options: dict[str, Any] = {"sort_ranks": False} if KEEPS_ORDER else {}
    for row in _rows(layout, dim):
        group = dist.new_group(row, **options)
        if dist.get_rank() in row:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)  # every process lies on every dimension
    return mine


def end_groups(mesh: DeviceMesh) -> None:
    """Ends the groups of a mesh that `device_mesh` has made, and no others."""
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
