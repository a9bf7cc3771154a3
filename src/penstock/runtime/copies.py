"""The copies of stages in this process: one of each stage a pipeline, where the schedule has several pipelines.

    pipeline 0   stage 0 on rank 0, stage 1 on rank 1      the owners: what is saved, named and clipped
    pipeline 1   stage 1 on rank 0, stage 0 on rank 1      copies: their gradients go to the owner, values come back

Copies start from their owner's values. Where updates are no ops of the schedule, their gradients are added up at the
end of a step, ((g0 + g1) + g2) ..., in the order of the pipelines, and every copy gets the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.peers import Peers
from penstock.runtime.shards import as_shard, local
from penstock.runtime.stage import Stage, StageSource
from penstock.runtime.stages import build_stage
from penstock.schedule import Placement
from penstock.schedule.updates import OWNER

Copy = tuple[int, int]
"""(pipeline, stage)."""


def build_copies(
    sources: Sequence[Stage | StageSource], placement: Placement, ranks: Sequence[int]
) -> dict[Copy, Stage]:
    """The copies that `ranks` host. A module given is the first of its copies here; the others are copied from it."""
    found: dict[Copy, Stage] = {}
    first: dict[int, Stage] = {}
    for pipeline, hosts in enumerate(placement.pipelines):
        seen: dict[int, object] = {}  # of one pipeline, so that parameters which its stages share stay shared
        for stage in range(len(hosts)):
            if not set(placement.hosts(pipeline, stage)) & set(ranks):
                continue
            source = sources[stage]
            if stage not in first:
                first[stage] = found[pipeline, stage] = build_stage(source, stage)
            elif isinstance(source, nn.Module):
                found[pipeline, stage] = copy.deepcopy(first[stage], seen)
            else:
                found[pipeline, stage] = build_stage(source, stage)
    return found


def require_one_copy_a_rank(placement: Placement) -> None:
    """Raises RuntimeFailure where a rank hosts a stage in two pipelines."""
    for stage in range(placement.num_stages):
        hosts = [ranks[stage] for ranks in placement.pipelines]
        twice = next((rank for rank in hosts if hosts.count(rank) > 1), None)
        if twice is not None:
            pipelines = ", ".join(str(k) for k, rank in enumerate(hosts) if rank == twice)
            raise RuntimeFailure(
                f"rank {twice} hosts stage {stage} in pipelines {pipelines}; the runtime runs a stage on different "
                "ranks in different pipelines, so that copies are there for a reason: give one of them another rank"
            )


class Copies:
    """All copies of all stages, as this process sees them.

    Args:
        here: (pipeline, stage) -> the copy, for those in this process.
    """

    def __init__(self, here: Mapping[Copy, Stage], placement: Placement, peers: Peers) -> None:
        self.here = dict(here)
        self._pipelines, self._placement, self._peers = placement.pipelines, placement, peers

    @property
    def owners(self) -> dict[int, Stage]:
        """Stage -> its owner's copy, for those in this process."""
        return self.of(OWNER)

    def of(self, pipeline: int) -> dict[int, Stage]:
        """Stage -> its copy in a pipeline, for those in this process; ascending stages."""
        return {stage: self.here[k, stage] for k, stage in sorted(self.here) if k == pipeline}

    def of_rank(self, rank: int) -> list[Copy]:
        """The copies that a rank runs: of those that it shares with ranks of this process, the first rank's."""
        found: list[Copy] = []
        for k in range(len(self._pipelines)):
            for stage in range(self._placement.num_stages):
                hosts = self._placement.hosts(k, stage)
                if hosts[0] == rank or (rank in hosts and hosts[0] not in self._peers.here):
                    found.append((k, stage))
        return found

    def parameters(self) -> list[Parameter]:
        """Those in this process, each once."""
        return list({id(p): p for stage in self.here.values() for p in stage.parameters()}.values())

    def stand_ins(self) -> dict[int, list[Parameter]]:
        """By the id of a parameter of the first copy here, that of every copy here."""
        found: dict[int, list[Parameter]] = {}
        first: dict[int, Stage] = {}
        for (_, index), stage in sorted(self.here.items()):
            origin = first.setdefault(index, stage)
            for one, own in zip(origin.parameters(), stage.parameters(), strict=True):
                if all(own is not known for known in found.setdefault(id(one), [])):
                    found[id(one)].append(own)
        return found

    def sum_gradients(self) -> None:
        """Adds up the copies' gradients, in the order of the pipelines, and gives every copy the sum."""
        found: list[tuple[Parameter, Tensor | None]] = []  # set at the end: stages may share a parameter
        for hosts, copies in self._shared():
            sums = [p.grad for p in copies[OWNER].parameters()] if OWNER in copies else None
            likes = list(next(iter(copies.values())).parameters())
            for k in range(1, len(hosts)):
                mine = [p.grad for p in copies[k].parameters()] if k in copies else [None] * len(likes)
                came = [self._sent(g, p, hosts[k], [hosts[OWNER]]) for g, p in zip(mine, likes, strict=True)]
                if sums is not None:
                    sums = [_sum(total, part) for total, part in zip(sums, came, strict=True)]
            totals = sums or [None] * len(likes)
            shared = [self._sent(g, p, hosts[OWNER], hosts) for g, p in zip(totals, likes, strict=True)]
            for stage in copies.values():
                found += zip(stage.parameters(), shared, strict=True)
        for parameter, gradient in found:
            parameter.grad = gradient

    def leave_sums_to_owners(self) -> None:
        """Before a step that adds to what `sum_gradients` gave every copy: it counts once."""
        for (k, _), stage in self.here.items():
            if k != OWNER:
                stage.zero_grad()

    def share_parameters(self) -> None:
        """Gives every copy the owner's values."""
        for hosts, copies in self._shared():
            self._share(hosts, copies, {k: list(stage.parameters()) for k, stage in copies.items()})

    def share_buffers(self) -> None:
        """Gives every copy the owner's buffers (statistics, say), which each copy keeps for itself during a step."""
        for hosts, copies in self._shared():
            self._share(hosts, copies, {k: list(stage.buffers()) for k, stage in copies.items()})

    def _share(
        self, hosts: Sequence[int], copies: Mapping[int, Stage], tensors: Mapping[int, Sequence[Tensor]]
    ) -> None:
        likes = next(iter(tensors.values()))
        values = tensors.get(OWNER, [None] * len(likes))
        with torch.no_grad():
            came = [self._sent(v, like, hosts[OWNER], hosts) for v, like in zip(values, likes, strict=True)]
            for k, own in tensors.items():
                for tensor, value in zip(own, came, strict=True):
                    if k != OWNER and value is not None and tensor is not value:
                        tensor.data.copy_(value)

    def _shared(self) -> Iterator[tuple[list[int], dict[int, Stage]]]:
        """Stage by stage (the rank of each of its copies, the copies here by pipeline), where there are several."""
        if len(self._pipelines) == 1:
            return
        for index in range(len(self._pipelines[0])):
            copies = {k: stage for (k, s), stage in sorted(self.here.items()) if s == index}
            if copies:
                yield [ranks[index] for ranks in self._pipelines], copies

    def _sent(self, tensor: Tensor | None, like: Tensor, source: int, targets: Sequence[int]) -> Tensor | None:
        value = None if tensor is None else local(tensor.detach())
        part = self._peers.share(value, local(like.detach()), source, sorted({source, *targets}))
        return None if part is None else as_shard(part, like.detach())


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total + part
