"""Data parallelism: replicas of a pipeline that work on other microbatches and add up their gradients.

    rank 0, replica 0 | ... B2 B3 REDUCE0                 a REDUCE starts the sum of its stage's gradients and
    rank 0, replica 1 | ... B6 B7 REDUCE0                 returns; the step's end waits for all of them

The loss of every microbatch is weighed within the whole batch, so gradients are summed, not averaged.

Where updates are ops of the schedule, each sums its window's gradients over the replicas itself: all replicas run one
order, so no rank waits at an update for one that waits for what comes after it.

With ZeRO-1 each parameter has an owner among the replicas: the sum goes to it alone, it alone has the optimizer's
state, and after an update it gives the others the new value. Fully sharded, each replica has a part of every
parameter, and gets that part of the sum.
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
from penstock.runtime.mesh.failure import explain
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.buckets import (
    GradientBucket,
    PartBucket,
    SumBucket,
    ValueBucket,
    cut_into_buckets,
    wait_for,
)
from penstock.runtime.parameters.fsdp import ShardedParameter, ShardedParameters
from penstock.runtime.parameters.late_rings import LateRing, sleep_until
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.versions.gradients import Gradients
from penstock.runtime.stage.registered_ops import OpFunction
from penstock.runtime.tensors.dtensor import as_shard, local, memory
from penstock.schedule import Schedule


class Replicas:
    """What a process does with the other replicas of its stages.

    Args:
        peers: the processes with the same stages and shards.
        order: the stages here whose gradients a REDUCE reduces, in an order that all replicas keep.
        owners: whether every parameter has an owner (ZeRO-1).
        late: what is injected into the links between replicas; None for nothing.

    Attributes:
        keeps_aside: whether a step starts without the gradients of those before, which are added when it ends.
    """

    keeps_aside = True

    def __init__(
        self,
        model: LocalModel,
        peers: GroupPeers,
        order: Sequence[int],
        owners: bool,
        timeout: float,
        late: LateRing | None = None,
    ) -> None:
        self._model, self._peers, self._timeout, self._late_ring = model, peers, timeout, late
        self._order = tuple(order)
        self._owner = _owners(model.parameters, peers.num_ranks) if owners else {}
        tied, slots = model.tied, range(1, len(model.ties) + 1)
        self._tied = {id(p): p for slot in slots if (p := tied.parameter(slot)) is not None}
        # Of a tie's several parameters in this process the first alone is summed, and the others take its sum.
        self._follow = [(p, tied.parameter(slot)) for slot in slots for p in tied.followers(slot)]
        self._owner |= {id(p): self._owner[id(first)] for p, first in self._follow if id(first) in self._owner}
        self._early: dict[int, list[list[Parameter]]] = {}
        self._late: list[list[Parameter]] = []
        self._wanting: list[Parameter] | None = None
        self._kept: list[tuple[Parameter, Tensor]] = []
        self._ready: set[int] = set()
        self._due: deque[int] = deque()
        self._under_way: list[tuple[SumBucket, Any, int]] = []

    def _cut(self) -> None:
        """Puts the parameters that want a gradient by now into buckets, the same in every replica."""
        wanting = [p for p in self._model.parameters if p.requires_grad]
        if self._wanting is not None and list(map(id, wanting)) == list(map(id, self._wanting)):
            return
        self._wanting = wanting
        self._early.clear()
        self._late = [[p] for p in self._tied.values() if p.requires_grad]
        seen = {*self._tied, *(id(p) for p, _ in self._follow)}
        for index, stage in self._model.copies.stages.items():
            mine = [p for p in stage.parameters() if p.requires_grad and id(p) not in seen]
            seen.update(map(id, mine))
            buckets = cut_into_buckets(reversed(mine), self._goes_to)
            if index in self._order:
                self._early[index] = buckets
            else:
                self._late += buckets

    def _goes_to(self, parameter: Parameter) -> Any:
        """Where the sum of a parameter's gradients goes; parameters of one bucket go alike."""
        return self._owner_of(parameter)

    def _at_rest(self, parameter: Parameter) -> Parameter:
        """What stands for a parameter between steps."""
        return parameter

    def _owner_of(self, parameter: Tensor) -> int | None:
        return self._owner.get(id(parameter))

    def owned(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Of some parameters those that this replica steps; where it steps parts of them, these."""
        return [p for p in parameters if self._owner_of(p) in (None, self._peers.here[0])]

    def answers_for(self, parameter: Tensor) -> bool:
        """Whether this replica is the one that tells a tensor, and what the optimizer keeps of it."""
        owner = self._owner_of(parameter)
        return self._peers.here[0] == (0 if owner is None else owner)

    # Gradients.

    def begin(self) -> None:
        """Starts a step: gradients of earlier ones are sums already, and kept aside."""
        self._cut()
        for parameter, _ in self._follow:
            self._at_rest(parameter).grad = None
        self._kept = [(p, p.grad) for p in self._model.parameters if p.grad is not None]
        for parameter, _ in self._kept:
            parameter.grad = None
        self._ready.clear()
        self._due = deque(self._order)
        self._under_way.clear()

    def start(self, stage: int) -> None:
        """A stage's gradients are complete: starts their sum, once those that come before it in the order have
        started. Ranks may finish stages in different orders; sums must be asked for in one.
        """
        self._ready.add(stage)
        while self._due and self._due[0] in self._ready:
            for parameters in self._early[self._due.popleft()]:
                self._reduce(parameters)

    def finish(self) -> None:
        """Sums what no REDUCE has, waits for all, and adds what was kept aside."""
        for stage in list(self._due):
            self.start(stage)
        for parameters in self._late:
            self._reduce(parameters)
        for bucket, work, due in self._under_way:
            self._wait(work, "a sum of gradients over the replicas")
            sleep_until(due)
            bucket.unpack()
        self._under_way.clear()
        for parameter, before in self._kept:
            parameter.grad = before if parameter.grad is None else _added(before, parameter.grad)
        self._kept.clear()
        for parameter, first in self._follow:
            self._at_rest(parameter).grad = None if first is None else self._at_rest(first).grad

    def _reduce(self, parameters: Sequence[Parameter]) -> None:
        bucket = self._bucket(parameters)
        due = 0
        if self._late_ring is not None:
            due = self._late_ring.due(sum(local(p).numel() * p.element_size() for p in parameters))
        self._under_way.append((bucket, bucket.start(), due))

    def _bucket(self, parameters: Sequence[Parameter]) -> SumBucket:
        return GradientBucket(parameters, self._peers, self._owner_of(parameters[0]))

    @property
    def is_first(self) -> bool:
        """Whether this is the replica that keeps, and writes, what one of them has to."""
        return self._peers.here[0] == 0

    def summed(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums over all replicas, where updates are ops, of shards what lies here; every replica must call it for
        the same parameters.
        """
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else as_shard(local(gradient), parameter)
        buckets = [GradientBucket(part, self._peers, None) for part in cut_into_buckets(parameters, lambda _: None)]
        for bucket, work in [(bucket, bucket.start()) for bucket in buckets]:
            self._wait(work, "a sum of gradients over the replicas")
            bucket.unpack()
        found = [None if parameter.grad is None else local(parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    def answer_alike(self, master: Parameter, parameter: Parameter) -> None:
        """What an update steps in place of a parameter has that one's owner."""
        if (owner := self._owner_of(parameter)) is not None:
            self._owner[id(master)] = owner

    def to_step(self, masters: Sequence[Parameter], gradients: Gradients) -> tuple[Sequence[Parameter], Gradients]:
        """At an update that is an op: what the optimizer may step in their place, and the gradients of that."""
        return masters, gradients

    def share_stepped(self, masters: Sequence[Parameter]) -> None:
        """After an update that is an op: every owner gives the others the new values."""
        if self._owner:
            self._share(masters, lambda master: self._owner[id(master)])

    def unshard(self) -> None:
        """Before forwards: everything is whole here."""

    def reshard(self) -> None:
        """After them: everything stays whole here."""

    # Values.

    def share_parameters(self) -> None:
        """After an update: every owner gives the others its parameters' new values."""
        if self._owner:
            stepped = self._wanting or []
            self._share(stepped, lambda p: self._owner[id(p)])

    def share_all(self) -> None:
        """Gives every replica the parameters and buffers of the first."""
        self._share(self._model.parameters, lambda _: 0)
        self.share_buffers()

    def share_buffers(self) -> None:
        """Gives every replica the first one's buffers (statistics, say), which each keeps for itself in a step."""
        stages = self._model.copies.stages.values()
        self._share(list({id(b): b for stage in stages for b in stage.buffers()}.values()), lambda _: 0)

    def _share(self, tensors: Sequence[Any], source: Callable[[Any], int]) -> None:
        buckets = [
            (ValueBucket(part, source(part[0])), source(part[0])) for part in cut_into_buckets(tensors, source)
        ]
        works = [self._peers.start(bucket.op) for bucket, _ in buckets]
        for (bucket, owner), work in zip(buckets, works, strict=True):
            self._wait(work, "parameters of the replica that owns them")
            if owner != self._peers.here[0]:
                bucket.unpack()

    def _wait(self, work: Any, what: str) -> None:
        try:
            wait_for(work, self._timeout)
        except RuntimeError as error:
            raise explain(error, self._peers.here[0], None, what, self._timeout) from None


def _owners(parameters: Sequence[Parameter], num_replicas: int) -> dict[int, int]:
    """By a parameter's id the replica that owns it: the largest first, each to who has least so far."""
    held = [0] * num_replicas
    found: dict[int, int] = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        owner = held.index(min(held))
        held[owner] += parameter.numel()
        found[id(parameter)] = owner
    return found


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


def replicas_of(
    model: LocalModel, mesh: ProcessMesh, schedule: Schedule, timeout: float, late: LateRing | None = None
) -> Replicas | NoReplicas:
    """What there is of other replicas. `schedule` has its REDUCE ops, `late` is injected into links between them."""
    if not isinstance(mesh.replicas, GroupPeers):
        return NoReplicas()
    if schedule.updates is not None and model.sharded is not None:
        return UpdatingParts(model, model.sharded, mesh.replicas, timeout)
    if schedule.updates is not None:
        return UpdatingReplicas(model, mesh.replicas, (), mesh.sharding == "zero1", timeout)
    order = [op.stage for rank in mesh.pipeline.here for op in schedule.order[rank] if op.kind == REDUCE]
    if model.sharded is not None:
        return ShardedReplicas(model, model.sharded, mesh.replicas, order, timeout, late)
    return Replicas(model, mesh.replicas, order, mesh.sharding == "zero1", timeout, late)


class ShardedReplicas(Replicas):
    """Replicas that keep a part each of every parameter but those that stay whole."""

    def __init__(
        self,
        model: LocalModel,
        sharded: ShardedParameters,
        peers: GroupPeers,
        order: Sequence[int],
        timeout: float,
        late: LateRing | None = None,
    ) -> None:
        super().__init__(model, peers, order, False, timeout, late)
        self._sharded = sharded

    def begin(self) -> None:
        self.unshard()
        super().begin()

    def _goes_to(self, parameter: Parameter) -> Any:
        return id(parameter) in self._sharded.of_whole

    def _at_rest(self, parameter: Parameter) -> Parameter:
        one = self._sharded.of_whole.get(id(parameter))
        return parameter if one is None else one.part

    def _bucket(self, parameters: Sequence[Parameter]) -> SumBucket:
        known = [self._sharded.of_whole.get(id(p)) for p in parameters]
        ones = [one for one in known if one is not None]
        if not ones:
            return super()._bucket(parameters)
        return PartBucket(parameters, [one.part for one in ones], [one.dim for one in ones], self._peers)

    def share_all(self) -> None:
        """They started alike, before each kept its part."""

    def unshard(self) -> None:
        self._sharded.unshard()

    def reshard(self) -> None:
        self._sharded.drop_gradients()
        self._sharded.reshard()


class UpdatingReplicas(Replicas):
    """Replicas of a schedule with updates among its ops, which sum gradients when their turn comes."""

    keeps_aside = False

    def begin(self) -> None:
        """What is left of an open window stays where it is."""

    def finish(self) -> None:
        """All sums were made by updates."""


class UpdatingParts(UpdatingReplicas):
    """The same, of which each keeps a part of every parameter: an update steps the parts, and gathers the whole."""

    def __init__(self, model: LocalModel, sharded: ShardedParameters, peers: GroupPeers, timeout: float) -> None:
        super().__init__(model, peers, (), False, timeout)
        self._sharded = sharded
        self._stepped: dict[int, ShardedParameter] = {}

    def answer_alike(self, master: Parameter, parameter: Parameter) -> None:
        if (one := self._sharded.of_whole.get(id(parameter))) is not None:
            self._stepped[id(master)] = one

    def owned(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        found = ((p, self._stepped.get(id(p))) for p in parameters)
        return [p if one is None else one.part for p, one in found]

    def to_step(self, masters: Sequence[Parameter], gradients: Gradients) -> tuple[Sequence[Parameter], Gradients]:
        known = [self._stepped.get(id(master)) for master in masters]
        rows = [g if one is None or g is None else one.rows_of(g) for one, g in zip(known, gradients, strict=True)]
        return self.owned(masters), rows

    def share_stepped(self, masters: Sequence[Parameter]) -> None:
        mine = [master for master in masters if id(master) in self._stepped]
        for bucket in cut_into_buckets(mine, lambda _: None):
            self._sharded.gather([self._stepped[id(master)] for master in bucket], [memory(m) for m in bucket])

    def share_all(self) -> None:
        """They started alike, before each kept its part."""

    def unshard(self) -> None:
        self._sharded.unshard()

    def reshard(self) -> None:
        self._sharded.keep()
        self._sharded.reshard()


class NoReplicas:
    """What a pipeline without replicas does in their place: nothing."""

    is_first = True
    keeps_aside = False

    def begin(self) -> None: ...

    def start(self, stage: int) -> None: ...

    def finish(self) -> None: ...

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def share_parameters(self) -> None: ...

    def share_all(self) -> None: ...

    def share_buffers(self) -> None: ...

    def owned(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        return list(parameters)

    def answers_for(self, parameter: Tensor) -> bool:
        return True

    def summed(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        return list(gradients)

    def answer_alike(self, master: Parameter, parameter: Parameter) -> None: ...

    def to_step(self, masters: Sequence[Parameter], gradients: Gradients) -> tuple[Sequence[Parameter], Gradients]:
        return masters, gradients

    def share_stepped(self, masters: Sequence[Parameter]) -> None: ...
