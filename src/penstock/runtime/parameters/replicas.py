"""Data parallelism: replicas of a pipeline work on different microbatches, and add up their gradients.

    rank 0, replica 0 | ... B2 B3 REDUCE0                 a REDUCE starts the sum of its stage's gradients and
    rank 0, replica 1 | ... B6 B7 REDUCE0                 returns; the step's end waits for all of them

Every microbatch's loss is weighted within the whole batch, so gradients are summed, not averaged.

If updates are ops of the schedule, each update sums its window's gradients over the replicas. All replicas run the
same order, so no rank waits at an update for a replica that waits for something later.

`sharding.py` says what a replica keeps of each parameter, and so where sums go and what is sent after an update.
Where link conditions are injected, a sum ends when it would over such links (`LateRing` of
`transport/link_conditions.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.passes.reduce import REDUCE, add_reductions
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.buckets import GradientBucket, PartBucket, cut_into_buckets, send_values
from penstock.runtime.parameters.checksum import HolderChecksums
from penstock.runtime.parameters.gradients import taken_from
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.sharding import OwnedParameters, ReplicaParameters
from penstock.runtime.stage.registered_ops import OpFunction
from penstock.runtime.tensors.dtensor import as_shard, local
from penstock.runtime.transport.link_conditions import LateRing, sleep_until
from penstock.schedule import Schedule

SUM = "a sum of gradients over the replicas"
"""What a sum is called in errors."""


class Replicas:
    """Adds up gradients over the replicas of a process's stages, and shares what replicas have stepped.

    Args:
        peers: the processes with the same stages and shards.
        order: the stages here whose gradients a REDUCE adds up, in an order that all replicas keep.
        has_updates: whether updates are ops of the schedule, each of which sums its own gradients.
        late: the lateness that is injected into links between replicas; None for none.

    Attributes:
        sharding: says which part of a parameter each replica keeps.
        keeps_aside: whether earlier gradients are put aside as a step begins, and added when it ends.
        agreement: tells whether all replicas began a step alike; None: they always do.
    """

    agreement: HolderChecksums | None = None

    def __init__(
        self,
        model: LocalModel,
        peers: Peers,
        order: Sequence[int],
        sharding: ReplicaParameters,
        has_updates: bool,
        late: LateRing | None = None,
    ) -> None:
        self.sharding = sharding
        self._model, self._has_updates, self._late_ring = model, has_updates, late
        self._peers = peers if isinstance(peers, GroupPeers) else None
        self.keeps_aside = self._peers is not None and not has_updates
        self._number, self._order = peers.here[0], tuple(order)
        self._early: dict[int, list[list[Parameter]]] = {}
        self._late: list[list[Parameter]] = []
        self._wanting: list[Parameter] | None = None
        self._to_share: dict[int, Parameter] = {}
        self._earlier: list[tuple[Parameter, Tensor | None]] = []
        """The gradients of earlier steps, while a step runs."""
        self._ready: set[int] = set()
        self._due: deque[int] = deque()
        self._under_way: list[tuple[GradientBucket | PartBucket, Any, int]] = []

    def _cut(self) -> None:
        """Puts the parameters that are trained now into buckets, the same in every replica."""
        wanting = [p for p in self._model.parameters if p.requires_grad]
        if self._wanting is not None and list(map(id, wanting)) == list(map(id, self._wanting)):
            return
        self._wanting = wanting
        # If a parameter was trained in one step and frozen before the next, the optimizer still steps its gradient.
        self._to_share |= {id(p): p for p in wanting}
        self._early.clear()
        slots = range(1, len(self._model.ties) + 1)
        tied = {id(p): p for slot in slots if (p := self._model.shared.tied(slot)) is not None}
        self._late = [[p] for p in tied.values() if p.requires_grad]
        seen = set(tied)
        for index, stage in self._model.copies.stages.items():
            mine = [p for p in stage.parameters() if p.requires_grad and id(p) not in seen]
            seen.update(map(id, mine))
            buckets = cut_into_buckets(reversed(mine), self.sharding.goes_to)
            if index in self._order:
                self._early[index] = buckets
            else:
                self._late += buckets

    @property
    def is_first(self) -> bool:
        """Whether this replica keeps and writes what only one replica has to."""
        return self._number == 0

    @property
    def can_unshard(self) -> bool:
        """Whether replicas that keep parts can gather them.

        If updates are no ops, all replicas must have begun the step alike, with parts of one type.
        """
        return self._has_updates or self.sharding.keeps_whole or self._are_alike()

    def unshard(self) -> None:
        """Makes all parameters whole here before forwards, if they can be."""
        if self.can_unshard:
            self.sharding.unshard()

    def reshard(self) -> None:
        """Gives up what other replicas keep, after forwards."""
        self.sharding.reshard(self._has_updates)

    # Gradients.

    def begin(self) -> None:
        """Starts a step: puts the gradients of earlier steps aside, as they are sums already.

        If updates are ops, the gradients of an open window stay where they are.
        """
        self.unshard()
        self._under_way.clear()
        if not self.keeps_aside:
            return
        self._cut()
        parameters = self._model.parameters
        self._earlier = list(zip(parameters, taken_from(parameters), strict=True))
        self._ready.clear()
        self._due = deque(self._order)

    def start(self, stage: int) -> None:
        """Starts the sum of a stage's gradients, which are complete, after the sums that come earlier in the order.

        Ranks may finish stages in different orders, but must start sums in one order.
        """
        if not self._are_alike():
            return
        self._ready.add(stage)
        while self._due and self._due[0] in self._ready:
            for parameters in self._early[self._due.popleft()]:
                self._reduce(parameters)

    def finish(self) -> None:
        """Sums what no REDUCE has summed, waits for all sums, and adds what was put aside.

        If updates are ops, they have made all sums.
        """
        if self._peers is None or self._has_updates or not self._are_alike():
            return
        for stage in list(self._due):
            self.start(stage)
        for parameters in self._late:
            self._reduce(parameters)
        self._wait(self._peers)
        for parameter, before in self._earlier:
            if before is not None:
                parameter.grad = before if parameter.grad is None else _added(before, parameter.grad)
        self._earlier = []

    def _are_alike(self) -> bool:
        """Whether all replicas began the step alike; all get the same answer.

        If they did not, sums would differ in length, so nothing is summed, and the step's end raises an error.
        """
        return self._peers is None or self.agreement is None or self.agreement.is_alike()

    def _reduce(self, parameters: Sequence[Parameter]) -> None:
        assert self._peers is not None, "sums are asked for where there are others"
        self._begin(self.sharding.bucket(parameters, self._peers), parameters)

    def _begin(self, bucket: GradientBucket | PartBucket, parameters: Sequence[Parameter]) -> None:
        due = 0
        if self._late_ring is not None:
            due = self._late_ring.due(sum(local(p).numel() * p.element_size() for p in parameters))
        self._under_way.append((bucket, bucket.start(), due))

    def _wait(self, peers: GroupPeers) -> None:
        """Waits for all sums that are under way."""
        for bucket, work, due in self._under_way:
            peers.wait_for(work, SUM)
            sleep_until(due)
            bucket.unpack()
        self._under_way.clear()

    def summed(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums over all replicas, if updates are ops; of shards, the local part.

        Every replica must call it for the same parameters.
        """
        if self._peers is None or not self._are_alike():
            return list(gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else as_shard(local(gradient), parameter)
        for part in cut_into_buckets(parameters, lambda _: None):
            self._begin(GradientBucket(part, self._peers, None), part)
        self._wait(self._peers)
        return [None if gradient is None else local(gradient) for gradient in taken_from(parameters)]

    def sum_of(self, value: float) -> float:
        """The sum of a number over all replicas, if updates are ops. Every replica must call it."""
        if self._peers is None or not self._are_alike():
            return value
        return float(self._peers.sum(torch.tensor([value], dtype=torch.float64)))

    # Updates.

    def share_stepped(self, stepped: Iterable[Parameter] | None = None) -> None:
        """Gives every replica what others have stepped, after an update; of all parameters if none are named."""
        if not self._are_alike():
            return
        if stepped is not None:
            self.sharding.spread(stepped)
            return
        if self._wanting is None:  # no step has run yet: gradients came with a checkpoint
            self._to_share = {id(p): p for p in self._model.parameters if p.requires_grad}
        self.sharding.spread(self._to_share.values())

    def forget_stepped(self) -> None:
        """After an update, all replicas have what others have stepped."""
        self._to_share = {id(p): p for p in self._wanting or ()}

    def share_buffers(self) -> None:
        """Gives every replica the buffers of the first, such as statistics. In a step each replica has its own."""
        if self._peers is not None:
            send_values(self._model.buffers(), lambda _: 0, self._peers)


def _added(before: Tensor, now: Tensor) -> Tensor:
    with torch.no_grad():
        local(before).add_(local(now))
    return before


def with_reductions(schedule: Schedule, mesh: ProcessMesh) -> Schedule:
    """Adds REDUCE ops to a schedule if there are replicas, and no updates that add up gradients themselves."""
    if mesh.num_replicas == 1 or schedule.updates is not None:
        return schedule
    return add_reductions(schedule, asynchronous=False)


def without_reductions(schedule: Schedule, mesh: ProcessMesh) -> Schedule:
    """Removes the REDUCE ops that `with_reductions` adds."""
    graph = schedule.graph
    if mesh.num_replicas == 1 or all(registered.kind != REDUCE for registered in graph.registered):
        return schedule
    return replace(
        schedule,
        order=tuple(tuple(op for op in row if op.kind != REDUCE) for row in schedule.order),
        stage_graph=replace(
            graph,
            registered=tuple(each for each in graph.registered if each.kind != REDUCE),
            needs=tuple(each for each in graph.needs if each.after[0] != REDUCE),
        ),
    )


def reductions_of(schedule: Schedule, start: Callable[[int], None]) -> dict[str, OpFunction]:
    """Returns the function that runs a schedule's REDUCE ops, if it has any: `start` with an op's stage."""
    return {each.kind: lambda call: start(call.stage) for each in schedule.graph.registered if each.kind == REDUCE}


def replicas_of(model: LocalModel, mesh: ProcessMesh, schedule: Schedule, late: LateRing | None = None) -> Replicas:
    """Makes the exchange with other replicas. `schedule` has its REDUCE ops; `late` is injected into their links."""
    order = [op.stage for rank in mesh.pipeline.here for op in schedule.order[rank] if op.kind == REDUCE]
    peers = mesh.replicas if isinstance(mesh.replicas, GroupPeers) else None
    sharding: ReplicaParameters = model.sharded or ReplicaParameters(peers)
    if mesh.sharding == "zero1" and peers is not None:
        tied = {slot: p for slot, _ in model.ties.slots() if (p := model.shared.tied(slot)) is not None}
        sharding = OwnedParameters(peers, model.parameters, tied)
    return Replicas(model, mesh.replicas, order, sharding, schedule.updates is not None, late)
