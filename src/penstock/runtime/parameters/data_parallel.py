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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.passes.reduce import REDUCE, add_reductions
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.agreement import HolderAgreement
from penstock.runtime.parameters.buckets import GradientBucket, PartBucket, cut_into_buckets, send_values
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.sharding import OwnedParameters, ReplicaParameters
from penstock.runtime.stage.registered_ops import OpFunction
from penstock.runtime.tensors.dtensor import as_shard, local
from penstock.runtime.transport.link_conditions import LateRing, sleep_until
from penstock.schedule import Schedule

SUM = "a sum of gradients over the replicas"
"""What a sum is called in errors."""


class Replicas:
    """What a process does with the other replicas of its stages, if there are any.

    Args:
        peers: the processes with the same stages and shards.
        order: the stages here whose gradients a REDUCE reduces, in an order that all replicas keep.
        has_updates: whether updates are ops of the schedule, each of which sums its gradients itself.
        late: what is injected into the links between replicas; None for nothing.

    Attributes:
        sharding: what each replica keeps of a parameter.
        keeps_aside: whether a step starts without the gradients of those before, which are added when it ends.
        agreement: tells whether all replicas begin a step alike; None: they do.
    """

    agreement: HolderAgreement | None = None

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
        # Of a tie's several parameters in this process the first alone is summed, and the others take its sum.
        self._follow = model.shared.followers()
        self._early: dict[int, list[list[Parameter]]] = {}
        self._late: list[list[Parameter]] = []
        self._wanting: list[Parameter] | None = None
        self._to_share: dict[int, Parameter] = {}
        self._kept: list[tuple[Parameter, Tensor]] = []
        self._ready: set[int] = set()
        self._due: deque[int] = deque()
        self._under_way: list[tuple[GradientBucket | PartBucket, Any, int]] = []

    def _cut(self) -> None:
        """Puts the parameters that want a gradient by now into buckets, the same in every replica."""
        wanting = [p for p in self._model.parameters if p.requires_grad]
        if self._wanting is not None and list(map(id, wanting)) == list(map(id, self._wanting)):
            return
        self._wanting = wanting
        # One that a step trains, and a later one no more, has a gradient still when the optimizer steps.
        self._to_share |= {id(p): p for p in wanting}
        self._early.clear()
        slots = range(1, len(self._model.ties) + 1)
        tied = {id(p): p for slot in slots if (p := self._model.shared.tied(slot)) is not None}
        self._late = [[p] for p in tied.values() if p.requires_grad]
        seen = {*tied, *(id(p) for p, _ in self._follow)}
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
        """Whether this is the replica that keeps, and writes, what one of them has to."""
        return self._number == 0

    @property
    def can_unshard(self) -> bool:
        """Whether replicas that keep parts can gather them. Where updates are no ops, that is so if all of them have
        begun the step alike, with parts of one type.
        """
        return self._has_updates or self.sharding.keeps_whole or self._are_alike()

    def unshard(self) -> None:
        """Before forwards: all parameters are whole here, if they can be."""
        if self.can_unshard:
            self.sharding.unshard()

    def reshard(self) -> None:
        """After them: what other replicas keep is given up."""
        self.sharding.reshard(self._has_updates)

    # Gradients.

    def begin(self) -> None:
        """Starts a step: gradients of earlier ones are sums already, and kept aside. Where updates are ops, what is
        left of an open window stays where it is.
        """
        self.unshard()
        self._under_way.clear()
        if not self.keeps_aside:
            return
        self._cut()
        for parameter, _ in self._follow:
            self.sharding.at_rest(parameter).grad = None
        self._kept = [(p, p.grad) for p in self._model.parameters if p.grad is not None]
        for parameter, _ in self._kept:
            parameter.grad = None
        self._ready.clear()
        self._due = deque(self._order)

    def start(self, stage: int) -> None:
        """A stage's gradients are complete: starts their sum, once those that come before it in the order have
        started. Ranks may finish stages in different orders; sums must be asked for in one.
        """
        if not self._are_alike():
            return
        self._ready.add(stage)
        while self._due and self._due[0] in self._ready:
            for parameters in self._early[self._due.popleft()]:
                self._reduce(parameters)

    def finish(self) -> None:
        """Sums what no REDUCE has, waits for all, and adds what was kept aside. Where updates are ops, they have made
        all sums.
        """
        if self._peers is None or self._has_updates or not self._are_alike():
            return
        for stage in list(self._due):
            self.start(stage)
        for parameters in self._late:
            self._reduce(parameters)
        self._wait(self._peers)
        for parameter, before in self._kept:
            parameter.grad = before if parameter.grad is None else _added(before, parameter.grad)
        self._kept.clear()
        for parameter, first in self._follow:
            self.sharding.at_rest(parameter).grad = self.sharding.at_rest(first).grad

    def _are_alike(self) -> bool:
        """Whether all replicas have begun the step alike, the same in each. Where they have not, nothing is summed,
        as sums would be of other lengths, and the step's end refuses it.
        """
        return self._peers is None or self.agreement is None or self.agreement.is_alike(self._peers)

    def _reduce(self, parameters: Sequence[Parameter]) -> None:
        assert self._peers is not None, "sums are asked for where there are others"
        self._begin(self.sharding.bucket(parameters, self._peers), parameters)

    def _begin(self, bucket: GradientBucket | PartBucket, parameters: Sequence[Parameter]) -> None:
        due = 0
        if self._late_ring is not None:
            due = self._late_ring.due(sum(local(p).numel() * p.element_size() for p in parameters))
        self._under_way.append((bucket, bucket.start(), due))

    def _wait(self, peers: GroupPeers) -> None:
        """For all sums that are under way."""
        for bucket, work, due in self._under_way:
            peers.wait_for(work, SUM)
            sleep_until(due)
            bucket.unpack()
        self._under_way.clear()

    def summed(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums over all replicas, where updates are ops, of shards what lies here; every replica must call it for
        the same parameters.
        """
        if self._peers is None or not self._are_alike():
            return list(gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else as_shard(local(gradient), parameter)
        for part in cut_into_buckets(parameters, lambda _: None):
            self._begin(GradientBucket(part, self._peers, None), part)
        self._wait(self._peers)
        found = [None if parameter.grad is None else local(parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    # Updates.

    def share_stepped(self, stepped: Iterable[Parameter] | None = None) -> None:
        """After an update: every replica gets what others have stepped, of all parameters where none are named."""
        if not self._are_alike():
            return
        if stepped is not None:
            self.sharding.spread(stepped)
            return
        if self._wanting is None:  # no step has run yet: gradients came with a checkpoint
            self._to_share = {id(p): p for p in self._model.parameters if p.requires_grad}
        self.sharding.spread(self._to_share.values())
        self._to_share = {id(p): p for p in self._wanting or ()}

    def share_buffers(self) -> None:
        """Gives every replica the first one's buffers (statistics, say), which each keeps for itself in a step."""
        if self._peers is not None:
            send_values(self._model.buffers(), lambda _: 0, self._peers)


def _added(before: Tensor, now: Tensor) -> Tensor:
    with torch.no_grad():
        local(before).add_(local(now))
    return before


def with_reductions(schedule: Schedule, mesh: ProcessMesh) -> Schedule:
    """The schedule with REDUCE ops, where there are replicas to reduce over, and no updates that do it."""
    if mesh.num_replicas == 1 or schedule.updates is not None:
        return schedule
    return add_reductions(schedule, asynchronous=False)


def without_reductions(schedule: Schedule, mesh: ProcessMesh) -> Schedule:
    """The schedule without the REDUCE ops that `with_reductions` puts in."""
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


def reductions_of(
    schedule: Schedule, mesh: ProcessMesh, given: Collection[str], start: Callable[[int], None]
) -> dict[str, OpFunction]:
    """What runs a schedule's REDUCE ops, if it has any: `start` with an op's stage.

    Args:
        given: kinds for which the user gave functions. Where there is nothing to reduce, REDUCE may be one of them.

    Raises:
        RuntimeFailure: it is one of them where there are replicas.
    """
    if REDUCE in given and mesh.num_replicas > 1:
        raise RuntimeFailure(
            f"ops= has a function for kind {REDUCE}, which is that of the reductions over the {mesh.num_replicas} "
            "replicas; give your own ops another kind"
        )
    found = any(registered.kind == REDUCE for registered in schedule.graph.registered)
    return {REDUCE: lambda call: start(call.stage)} if found and REDUCE not in given else {}


def replicas_of(model: LocalModel, mesh: ProcessMesh, schedule: Schedule, late: LateRing | None = None) -> Replicas:
    """What there is of other replicas. `schedule` has its REDUCE ops, `late` is injected into links between them."""
    order = [op.stage for rank in mesh.pipeline.here for op in schedule.order[rank] if op.kind == REDUCE]
    peers = mesh.replicas if isinstance(mesh.replicas, GroupPeers) else None
    sharding: ReplicaParameters = model.sharded or ReplicaParameters(peers)
    if mesh.sharding == "zero1" and peers is not None:
        tied = {slot: p for slot, _ in model.ties.slots() if (p := model.shared.tied(slot)) is not None}
        sharding = OwnedParameters(peers, model.parameters, model.shared.followers(), tied)
    return Replicas(model, mesh.replicas, order, sharding, schedule.updates is not None, late)
