"""Where a process lies in a mesh of pipelines, their replicas and the shards of their layers, and its nodes.

mesh (pp 2, dp 2, tp 1)      replica 0: ranks 0 1 of a pipeline on processes 0 and 2
                             replica 1: ranks 0 1 of another on processes 1 and 3

pipeline   the ranks of this process's pipeline: they send one another activations and gradients
replicas   the processes with the same stages and other microbatches: they add up gradients
shards     the processes that hold one stage together (tensor parallelism)
everyone   all of the mesh

A node is one of those places, with the processes that stay together there, its shards (`Nodes`):

    node 3 of (pp 2, dp 2, tp 2)     rank 1, replica 1 of torch's own mesh: its shards are processes 6 and 7

Nodes are numbered in the order of their lowest processes, so each keeps its number wherever it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.cost import Mesh
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.collective import explain, is_of_a_group
from penstock.runtime.mesh.peers import GroupPeers, LocalPeers, MeshPeers, Peers, peers_of

PIPELINE, REPLICAS, SHARDS = "pp", "dp", "tp"
_NOBODY_WAITS: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class ProcessMesh:
    """A process's place.

    Attributes:
        pipeline, replicas, everyone: see above; peers of one where there are no others.
        shards: a one-dimensional device mesh; None where every stage is whole.
        holders: the device mesh of all processes with this stage; None where there is one replica.
        sharding: what replicas keep in parts. "zero1": the optimizer's state. "fsdp": that, parameters and gradients.
            Any other: nothing.
        timeout: seconds that any wait may last.
    """

    pipeline: Peers
    replicas: Peers
    everyone: Peers
    shards: Any = None
    holders: Any = None
    sharding: str = "none"
    timeout: float = 60.0

    def waiting(self) -> AbstractContextManager[None]:
        """Around what may wait inside torch's own ops for others that hold parts of a stage.

        Raises:
            DeadlineExceeded, PeerLost: one of them is late or gone.
        """
        return self._waiting() if self.has_parts or self.shards is not None else _NOBODY_WAITS

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_of_a_group(error):
                raise
            raise explain(error, self.everyone.here[0], None, "parts of a stage", self.timeout) from None

    @property
    def num_replicas(self) -> int:
        return self.replicas.num_ranks

    @property
    def replica(self) -> int:
        """Which replica of the pipeline this process belongs to."""
        return self.replicas.here[0]

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a batch this process's replica has, and of how many."""
        return self.replica, self.num_replicas

    @property
    def has_parts(self) -> bool:
        """Whether each replica keeps a part of every parameter."""
        return self.sharding == "fsdp" and self.num_replicas > 1

    @property
    def shard(self) -> int:
        """Which shard of its stages this process holds."""
        return 0 if self.shards is None else int(self.shards.get_local_rank())

    @property
    def num_shards(self) -> int:
        return 1 if self.shards is None else int(self.shards.size())

    def waits_in_ops(self, shares_stages: bool) -> bool:
        """Whether a process may stand still in the middle of an op until others come to it: they hold the stage
        together, by collectives that the host waits for (gloo's) and not the device (NCCL's).

        Args:
            shares_stages: whether ranks of a pipeline share stages.
        """
        return any("nccl" not in config for config in self._backends(shares_stages))

    def _backends(self, shares_stages: bool) -> list[str]:
        """The backends of the groups that hold parts of a stage together."""
        groups = [] if self.shards is None else [self.shards.get_group()]
        if self.has_parts and isinstance(self.replicas, GroupPeers):
            groups.append(self.replicas.group)
        if shares_stages and isinstance(self.pipeline, GroupPeers):
            groups.append(self.pipeline.group)
        return [dist.get_backend_config(group) for group in groups]

    def require_collectives(self, device: torch.device, cuts_shared: bool) -> None:
        """Raises in every process where parts of parameters lie on a GPU and gloo would gather them in one: it takes
        them for host memory, and the process ends.

        Args:
            device: where the stages of this process lie.
            cuts_shared: whether ranks of a pipeline hold parts of the stages that they share.
        """
        if self.shards is None and not self.has_parts and not cuts_shared:
            return

        def require() -> None:
            goes_on = self.has_parts and isinstance(self.replicas, GroupPeers) and self.replicas.guard is not None
            by_gloo = goes_on or any("cuda:gloo" in config for config in self._backends(cuts_shared))
            if device.type == "cuda" and by_gloo:
                raise RuntimeFailure(
                    "gloo would gather parts of parameters on a GPU, which it can't; initialise torch.distributed "
                    'with "cpu:gloo,cuda:nccl", which takes a GPU for each process; if two interfaces are named '
                    "(PENSTOCK_INTERFACES, DelegateOptions), name one; or keep whole parameters (tp 1, "
                    'sharding="copies" or "zero1")'
                )

        self.everyone.together(require, "gather parts of parameters")

    @property
    def is_flat(self) -> bool:
        """Whether there is a pipeline and nothing else."""
        return self.num_replicas == self.num_shards == 1


def read_mesh(mesh: Any, num_ranks: int, timeout: float, sharding: str = "none") -> ProcessMesh:
    """The place of this process.

    Args:
        mesh: a device mesh with dimensions named pp, dp and tp, any of them left out; a process group or a
            one-dimensional device mesh for a pipeline alone; or None: all of torch.distributed is the pipeline, or
            all ranks are in this process.
        num_ranks: of the schedule.
        sharding: see `ProcessMesh`.

    Raises:
        RuntimeFailure: dimensions of other names, or a pipeline of another size than the schedule's.
    """
    names: tuple[str, ...] = getattr(mesh, "mesh_dim_names", None) or ()
    known, ndim = {PIPELINE, REPLICAS, SHARDS}, getattr(mesh, "ndim", 1)
    if ndim == 1 and not known.intersection(names):
        pipeline = peers_of(mesh, num_ranks, timeout)
        return ProcessMesh(pipeline, LocalPeers(1), pipeline)
    if not names or not known.issuperset(names):
        raise RuntimeFailure(
            f"the device mesh has {ndim} dimensions, named {', '.join(names) or 'nothing'}; name them pp, dp and tp: "
            'init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))'
        )
    _require_order(mesh, names)
    sizes = dict(zip(names, mesh.shape, strict=True))
    if sizes.get(PIPELINE, 1) > 1 or (PIPELINE in sizes and num_ranks > 1):
        pipeline = peers_of(mesh.get_group(PIPELINE), num_ranks, timeout)
    else:
        pipeline = LocalPeers(num_ranks)  # one process runs the whole pipeline
    replicas: Peers = LocalPeers(1)
    shards = mesh[SHARDS] if sizes.get(SHARDS, 1) > 1 else None
    holders = None
    if sizes.get(REPLICAS, 1) > 1:
        replicas = GroupPeers(mesh.get_group(REPLICAS), timeout)
        holders = mesh[REPLICAS] if shards is None else mesh[REPLICAS, SHARDS]
    for name, waits in ((SHARDS, shards is not None), (REPLICAS, sharding == "fsdp" and holders is not None)):
        if waits:  # in torch's own ops
            mesh.get_group(name).set_timeout(timedelta(seconds=timeout))
    if shards is None and isinstance(replicas, LocalPeers):
        return ProcessMesh(pipeline, replicas, pipeline)
    along = [pipeline, replicas, *([] if shards is None else [GroupPeers(shards.get_group(), timeout)])]
    everyone = MeshPeers(_everyone(mesh.mesh.flatten().tolist()), along, timeout)
    return ProcessMesh(pipeline, replicas, everyone, shards, holders, sharding, timeout)


def _require_order(mesh: Any, names: Sequence[str]) -> None:
    """Raises RuntimeFailure where groups call their processes by other numbers than the mesh's coordinates.

    torch sorts the processes of a group, so that a mesh which names them in another order has groups that disagree.
    """
    coordinate = mesh.get_coordinate()
    for name, place in zip(names, coordinate or (), strict=False):
        if mesh[name].size() > 1 and (other := dist.get_rank(mesh.get_group(name))) != place:
            raise RuntimeFailure(
                f"process {dist.get_rank()} lies at {name} {place} of the device mesh and is number {other} of that "
                "group, as torch sorts groups; build the mesh with "
                "ps.runtime.device_mesh(ps.Mesh(pp, dp, tp, nodes=...))"
            )


def _everyone(processes: Sequence[int]) -> dist.ProcessGroup:
    if sorted(processes) == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    made = dist.new_group(list(processes), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # every process of the mesh is in it
    return made


KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether torch can make a group whose processes are not in ascending order."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a mesh, which may change places, and the processes that each of them runs.

    Attributes:
        mesh: where the nodes are.
        processes: for each node, by shard, its process numbers in all of torch.distributed.
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
        return torch.tensor(rows, device="cpu")

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
    layout = torch.tensor(mesh.processes(), device="cpu")
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
