"""Tensors that several ranks of a pipeline hold: who owns them, how their gradients are added, who gets their values.

    stage 0 of two pipelines, on ranks 0 and 3           adds 0 3     holds 0 3
    a weight of stages 0 and 2, on ranks 0 and 2         adds 0       holds 0 2
    the same, in a second pipeline on ranks 3 and 1      adds 0 3     holds 0 1 2 3
    a stage that ranks 0 1 2 share, before it is cut     adds 0       holds 0 1 2

    gradients    ranks that add --((g0 + g1) + ...)--> the first of them, the owner --> all that hold it
    values                                             the owner                    --> all that hold it

Backwards add the gradients of one microbatch between a tie's stages on their way (`tied_gradients.py`). What ranks
add here are sums over all microbatches. Updates that are ops of the schedule send the same over the schedule's edges.
`replicas.py` is about what other replicas hold.

Each process that shares a stage builds it, and then cuts it (`cut_stages`):

    stage 0 on ranks 0 1 2    every rank builds it -> all have rank 0's values -> parallelize(stage, mesh of 0 1 2)
    with two shards of each   all six processes hold a part of stage 0, and two of them a part of stage 1 each

If no function cuts the stage, every rank runs all of it: the numbers are the same, and no work is saved. In one
process there is one stage, and its first rank runs it for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers, groups_of, groups_of_processes
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.buckets import cut_into_buckets
from penstock.runtime.parameters.copies import Copies
from penstock.runtime.parameters.ties import Tie, Ties
from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.autograd import added
from penstock.runtime.tensors.dtensor import as_shard, local, memory, overwrite
from penstock.schedule import Placement
from penstock.schedule.updates import OWNER


@dataclass(frozen=True)
class Holders:
    """The ranks of a pipeline that hold a tensor. All of them must make the same calls in the same order.

    Attributes:
        adds: of each pipeline the rank where the tensor's gradients add up. The first rank owns the tensor, and adds
            these sums in this order. Empty if each rank has its own part, so that nothing is sent.
        holds: all ranks that hold the tensor, ascending.
    """

    adds: tuple[int, ...]
    holds: tuple[int, ...]

    @classmethod
    def of_stage(cls, placement: Placement, stage: int) -> Holders:
        """The holders of tensors in one stage."""
        adds = tuple(ranks[stage] for ranks in placement.pipelines)
        return cls(adds, tuple(sorted(set(adds))))

    @classmethod
    def of_tie(cls, placement: Placement, tie: Tie) -> Holders:
        """The holders of a tied parameter. Ranks that share one of its stages share all, each with its own part."""
        if len(placement.hosts(OWNER, tie.owner)) > 1:
            return cls((), ())
        holds = {ranks[stage] for ranks in placement.pipelines for stage in tie.stages}
        return cls(cls.of_stage(placement, tie.owner).adds, tuple(sorted(holds)))

    def given(
        self, tensors: Sequence[Tensor | None], likes: Sequence[Tensor | None], peers: Peers
    ) -> list[Tensor | None]:
        """Returns the owner's tensors on every rank that holds them.

        Args:
            likes: this rank's tensors, for shape and type; all of one type.
        """
        return _sent(tensors, likes, self.adds[0], self.holds, peers) if self.adds else list(tensors)

    def summed(
        self, parts: Mapping[int, Sequence[Tensor | None]], likes: Sequence[Tensor | None], peers: Peers
    ) -> list[Tensor | None]:
        """Sums of the gradients of all pipelines, ((g0 + g1) + g2) ..., on every rank that holds the tensors.

        Args:
            parts: by pipeline the gradients that add up here, one for each of `likes`.
        """
        nothing = [None] * len(likes)
        totals = list(parts.get(OWNER, nothing))
        for pipeline, rank in enumerate(self.adds[1:], start=1):
            came = _sent(parts.get(pipeline, nothing), likes, rank, self.adds[:1], peers)
            totals = [added(total, part) for total, part in zip(totals, came, strict=True)]
        return self.given(totals, likes, peers)

    def share(self, tensors: Iterable[Tensor], peers: Peers) -> None:
        """Gives tensors the owner's values."""
        with torch.no_grad():
            for bucket in cut_into_buckets(tensors, lambda _: None):
                for tensor, value in zip(bucket, self.given(bucket, bucket, peers), strict=True):
                    if value is not None and value is not tensor:
                        overwrite(memory(tensor), local(value))


def _sent(
    tensors: Sequence[Tensor | None],
    likes: Sequence[Tensor | None],
    source: int,
    targets: Sequence[int],
    peers: Peers,
) -> list[Tensor | None]:
    """Returns one rank's tensors there and on the targets, None on others. In one process, returns the tensors."""
    if not isinstance(peers, GroupPeers):
        return list(tensors)
    is_source = peers.here[0] == source
    if not is_source and peers.here[0] not in targets:
        return [None] * len(tensors)
    mine = [None if t is None or not is_source else local(t.detach()) for t in tensors]
    came = peers.share(mine, [None if like is None else local(like.detach()) for like in likes], source, targets)
    if is_source:
        return list(tensors)
    return [
        None if part is None or like is None else as_shard(part, like.detach())
        for part, like in zip(came, likes, strict=True)
    ]


def share_values_of_stages(stages: Mapping[int, Stage], placement: Placement, peers: Peers) -> None:
    """Gives stages that ranks share, before they are cut, the values of their first rank.

    Every process of the pipeline must call it.
    """
    for stage, ranks in placement.shared:
        if stage in stages:
            one = stages[stage]
            Holders(ranks[:1], tuple(sorted(ranks))).share([*one.parameters(), *one.buffers()], peers)


class SharedSum(NamedTuple):
    """A gradient to be added up. All ranks that hold a parameter list its sum at the same place.

    Attributes:
        parameter: gets the sum here. parts: by pipeline the gradients that add up here.
    """

    parameter: Parameter
    holders: Holders
    parts: Mapping[int, Tensor | None]


class SharedTensors:
    """Shares gradients and values of tensors among the stages of this process and of other ranks.

    Args:
        copies: of stages, once they are cut.
    """

    def __init__(self, copies: Copies, placement: Placement, ties: Ties, peers: Peers) -> None:
        self._copies, self._ties, self._peers = copies, ties, peers
        self._of_ties = [Holders.of_tie(placement, tie) for tie in ties]
        self._of_stages: dict[int, Holders] = {}
        if placement.num_pipelines > 1:
            self._of_stages = {index: Holders.of_stage(placement, index) for index in copies.stages}
        here = copies.stages
        self._tied = [
            next((here[stage].get_parameter(name) for stage, name in tie.names.items() if stage in here), None)
            for tie in ties
        ]
        owners = {tie.owner for tie in ties}
        self._adding = [index for index in copies.stages if index in self._of_stages or index in owners]

    # Gradients.

    def sum_gradients(self) -> None:
        """Adds up the gradients of all pipelines, and gives the sums to all that hold the parameters.

        Gradients of many parameters are one message, because even a small message takes time.
        """
        by_copy = {index: self._copies.take_gradients(index) for index in self._adding}
        owned = {tie.name for tie in self._ties}
        of_stages = [
            SharedSum(parameter, holders, {k: found[name] for k, found in by_copy[index].items()})
            for index, holders in self._of_stages.items()
            for name, parameter in self._copies.own(index).items()
            if name not in owned
        ]
        of_ties = [
            SharedSum(mine, holders, {k: found[tie.name] for k, found in by_copy.get(tie.owner, {}).items()})
            for tie, holders, mine in zip(self._ties, self._of_ties, self._tied, strict=True)
            if mine is not None
        ]
        for sums in (of_stages, of_ties):
            self._sum({id(each.parameter): each for each in sums})

    def _sum(self, sums: Mapping[int, SharedSum]) -> None:
        """Gives parameters their sums, bucket by bucket. `sums`: by the id of the parameter."""
        for bucket in cut_into_buckets((each.parameter for each in sums.values()), lambda p: sums[id(p)].holders):
            mine = [sums[id(p)] for p in bucket]
            pipelines = {k for each in mine for k in each.parts}
            parts = {k: [each.parts.get(k) for each in mine] for k in pipelines}
            totals = mine[0].holders.summed(parts, bucket, self._peers)
            for each, total in zip(mine, totals, strict=True):
                each.parameter.grad = total

    def tied(self, slot: int) -> Parameter | None:
        """The parameter of a tie, if one of its stages is here."""
        return self._tied[slot - 1]

    # Values.

    def share_parameters(self) -> None:
        """Gives the copies of stages in all pipelines the owner's parameters."""
        self._copies.share_weights()
        for index, holders in self._of_stages.items():
            holders.share(self._copies.stages[index].parameters(), self._peers)

    def share_buffers(self) -> None:
        """Gives copies the owner's buffers, such as statistics. In a step each copy has its own."""
        for index, holders in self._of_stages.items():
            holders.share(self._copies.stages[index].buffers(), self._peers)

    def share_tied(self) -> None:
        """Gives all stages that share a parameter its owner's value."""
        for slot, _ in self._ties.slots():
            parameter = self.tied(slot)
            value = self.spread(slot, parameter)
            if parameter is not None and value is not None and value is not parameter:
                with torch.no_grad():
                    local(parameter).copy_(local(value))

    def share_of_stage(self, index: int, tensors: Iterable[Tensor]) -> None:
        """Gives tensors the values of the owner of a stage, in the copies of all pipelines."""
        self._of_stages[index].share(tensors, self._peers)

    def share_of_tie(self, slot: int, tensor: Tensor) -> None:
        """Gives a tensor the value of the owner of a tied parameter, on all ranks that hold the parameter."""
        self._of_ties[slot - 1].share([tensor], self._peers)

    def spread(self, slot: int, tensor: Tensor | None) -> Tensor | None:
        """Returns the tensor of the owner of a tied parameter, on all ranks that hold the parameter."""
        return self._of_ties[slot - 1].given([tensor], [self.tied(slot)], self._peers)[0]


Parallelize = Callable[[nn.Module, Any], Any]
"""(stage, one-dimensional device mesh): changes a whole stage into this rank's shard of it."""


def cut_stages(
    stages: Mapping[int, Stage],
    placement: Placement,
    mesh: ProcessMesh,
    parallelize: Parallelize | None,
    device: torch.device,
) -> None:
    """Makes stages this process's shards of them: over the mesh's shards, over the ranks that share a stage, or over
    both where there are both. All processes with a stage start from the first one's values.

    Args:
        stages: each once. A module that lies in several is cut in each of them.
        device: on which stages will lie.

    Raises:
        RuntimeFailure: nothing says how to cut a stage.
    """
    if mesh.shards is not None:
        if parallelize is None:
            raise RuntimeFailure(
                f"the mesh has {mesh.num_shards} tensor-parallel shards of each stage, and nothing says how to cut "
                "one; give ps.ParallelOptions(parallelize=penstock.models.parallelize) for the models here, or a "
                "function of your own that takes a stage and a device mesh"
            )
        _part(stages)
        for stage in stages.values():
            for tensor in (*stage.parameters(), *stage.buffers()):
                dist.broadcast(tensor.data, group=mesh.shards.get_group(), group_src=0)
    if parallelize is None:
        return
    over = _meshes_of_shared(placement, mesh, device.type)
    for index, stage in stages.items():
        if (across := over.get(index, mesh.shards)) is not None:
            parallelize(stage, across)


def _meshes_of_shared(placement: Placement, mesh: ProcessMesh, device_type: str) -> dict[int, Any]:
    """By stage that ranks of the pipeline share, the device mesh of all processes that hold it, this one included."""
    peers = mesh.pipeline
    if not placement.shared or not isinstance(peers, GroupPeers):
        return {}
    sets = {ranks: ranks for _, ranks in placement.shared}
    if mesh.shards is None:
        groups = groups_of(sets, peers.group, peers.timeout)
    else:
        # A row per rank: the processes that hold its other stages together.
        rows = peers.gather(dist.get_process_group_ranks(mesh.shards.get_group()))
        inside = {ranks: [process for rank in ranks for process in rows[rank]] for ranks in sets}
        groups = groups_of_processes(inside, peers.timeout, whole=False)
    kind = device_type if mesh.shards is None else mesh.shards.device_type
    meshes = {
        ranks: dist.device_mesh.DeviceMesh.from_group(group, kind, mesh_dim_names=("shared",))
        for ranks, group in groups.items()
        if group is not None
    }
    return {stage: meshes[ranks] for stage, ranks in placement.shared if ranks in meshes}


def _part(stages: Mapping[int, Stage]) -> None:
    """Gives each stage modules of its own: what an earlier one has too is copied, its parameters tied by name."""
    seen: set[int] = set()
    for _, stage in sorted(stages.items()):
        copies: dict[int, Any] = {}
        for module in [each for each in stage.modules() if id(each) in seen]:
            stage.replace(module, copy.deepcopy(module, copies))
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = copies.get(id(parameter), parameter)
        seen.update(id(module) for module in stage.modules())
