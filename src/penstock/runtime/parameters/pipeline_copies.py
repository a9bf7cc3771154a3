"""The copies of stages in this process: one of each stage a pipeline, where the schedule has several pipelines.

    pipeline 0   stage 0 on rank 0, stage 1 on rank 1      the owners: what is saved, named and clipped
    pipeline 1   stage 1 on rank 0, stage 0 on rank 1      copies: their gradients go to the owner, values come back

Copies of one stage in one process are one module, the user's own; `copy_state.py` keeps what each has for itself.
Where updates are no ops of the schedule, their gradients are added up at the end of a step, ((g0 + g1) + g2) ..., in
the order of the pipelines, and every copy gets the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.parameters.copy_state import CopyStates
from penstock.runtime.parameters.tied import Tie
from penstock.runtime.stage.cut import build_stage
from penstock.runtime.stage.stage import Copy, Stage, StageSource
from penstock.runtime.tensors.dtensor import as_shard, local
from penstock.schedule import Placement
from penstock.schedule.updates import OWNER


def build_copies(
    sources: Sequence[Stage | StageSource], placement: Placement, ranks: Sequence[int]
) -> dict[Copy, Stage]:
    """The copies that `ranks` host; those of one stage are one module."""
    built: dict[int, Stage] = {}
    found: dict[Copy, Stage] = {}
    for pipeline, hosts in enumerate(placement.pipelines):
        for stage in range(len(hosts)):
            if set(placement.hosts(pipeline, stage)) & set(ranks):
                if stage not in built:
                    built[stage] = build_stage(sources[stage], stage)
                found[pipeline, stage] = built[stage]
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
        self._states: dict[int, CopyStates] = {}
        self._twins: set[str] = set()

    def know(self, ties: Sequence[Tie]) -> None:
        """Once stages are as they run: a parameter that several share counts in its owner alone."""
        self._twins = {name for tie in ties for name in tie.twins}
        stages = self.stages
        count = Counter(id(module) for stage in stages.values() for module in stage.modules())
        kept = {module for module, num in count.items() if num > 1}
        for index, stage in stages.items():
            pipelines = sorted(k for k, s in self.here if s == index)
            if len(pipelines) > 1:
                self._states[index] = CopyStates(stage, pipelines, self._counted(index), kept)

    @property
    def stages(self) -> dict[int, Stage]:
        """Stage -> its module, for those that any pipeline has in this process; ascending."""
        return {index: self.here[k, index] for k, index in sorted(self.here, key=lambda key: key[::-1])}

    @property
    def owners(self) -> dict[int, Stage]:
        """Stage -> its owner's copy, for those in this process; ascending stages."""
        return {stage: self.here[k, stage] for k, stage in sorted(self.here) if k == OWNER}

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

    # Whose turn it is.

    @property
    def take_turns(self) -> bool:
        """Whether a stage here has several copies in this process, which are one module."""
        return bool(self._states)

    def select(self, pipeline: int, stage: int) -> None:
        """Before an op of a copy in a training step: its stage holds that copy's gradients, buffers and weights."""
        state = self._states.get(stage)
        if state is not None:
            state.select(pipeline)

    def each(self) -> Iterator[Copy]:
        """Every copy, its turn while it is given; afterwards the owners hold theirs."""
        for key in self.here:
            self.select(*key)
            yield key
        for state in self._states.values():
            state.select(OWNER)

    def separate_weights(self) -> None:
        """Every copy gets weights of its own, as updates are ops."""
        for state in self._states.values():
            state.separate_weights()

    def begin(self) -> None:
        """Starts a training step."""
        for state in self._states.values():
            state.begin()

    def end(self) -> None:
        """Ends it, however it went."""
        for state in self._states.values():
            state.end()

    # Gradients.

    def sum_gradients(self) -> None:
        """Adds up the copies' gradients, in the order of the pipelines, and gives every copy the sum."""
        found: list[tuple[Parameter, Tensor | None]] = []
        for index, hosts, copies in self._shared():
            likes = self._counted(index)
            if index in self._states:
                parts = self._states[index].take_gradients()
            else:
                parts = {k: [p.grad for p in likes] for k in copies}
            sums = parts.get(OWNER)
            for k in range(1, len(hosts)):
                mine = parts.get(k, [None] * len(likes))
                came = [self._sent(g, p, hosts[k], [hosts[OWNER]]) for g, p in zip(mine, likes, strict=True)]
                if sums is not None:
                    sums = [_sum(total, part) for total, part in zip(sums, came, strict=True)]
            totals = sums or [None] * len(likes)
            shared = [self._sent(g, p, hosts[OWNER], hosts) for g, p in zip(totals, likes, strict=True)]
            found += zip(likes, shared, strict=True)
        for parameter, gradient in found:
            parameter.grad = gradient

    def leave_sums_to_owners(self) -> None:
        """Before a step that adds to what `sum_gradients` gave every copy: it counts once."""
        for index in self.stages:
            if (OWNER, index) not in self.here:
                for parameter in self._counted(index):
                    parameter.grad = None

    def drop_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Leaves no gradient in any copy, nor in these parameters of the modules that they are."""
        for state in self._states.values():
            state.drop_gradients()
        for parameter in parameters:
            parameter.grad = None

    def _counted(self, index: int) -> list[Parameter]:
        """Those of a stage here that no other stage owns, in the same order on every rank."""
        return [p for name, p in self.stages[index].named_parameters() if name not in self._twins]

    # Values.

    def share_weights(self) -> None:
        """Gives every copy in this process that has weights of its own the owner's, where that is here."""
        for state in self._states.values():
            state.share_weights()

    def share_parameters(self) -> None:
        """Gives every copy the owner's values."""
        self.share_weights()
        for index, hosts, _ in self._shared():
            self._share(hosts, (OWNER, index) in self.here, list(self.stages[index].parameters()))

    def share_buffers(self) -> None:
        """Gives every copy the owner's buffers (statistics, say), which each copy keeps for itself during a step."""
        for index, hosts, _ in self._shared():
            self._share(hosts, (OWNER, index) in self.here, list(self.stages[index].buffers()))

    def _share(self, hosts: Sequence[int], owns: bool, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                value = self._sent(tensor if owns else None, tensor, hosts[OWNER], hosts)
                if not owns and value is not None:
                    tensor.data.copy_(value)

    def _shared(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Of every stage here (its number, the rank of each copy, the pipelines here), where there are several."""
        if len(self._pipelines) == 1:
            return
        for index in self.stages:
            yield index, [ranks[index] for ranks in self._pipelines], sorted(k for k, s in self.here if s == index)

    def _sent(self, tensor: Tensor | None, like: Tensor, source: int, targets: Sequence[int]) -> Tensor | None:
        value = None if tensor is None else local(tensor.detach())
        part = self._peers.share(value, local(like.detach()), source, sorted({source, *targets}))
        return None if part is None else as_shard(part, like.detach())


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total + part
