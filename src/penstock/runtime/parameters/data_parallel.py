"""Data parallelism: replicas of a pipeline work on different microbatches, and add up their gradients.

    rank 0, replica 0 | ... B2 B3 REDUCE0                 a REDUCE starts the sum of its stage's gradients and
    rank 0, replica 1 | ... B6 B7 REDUCE0                 returns; the step's end waits for all of them

Every microbatch's loss is weighted within the whole batch, so gradients are summed, not averaged.

If updates are ops of the schedule, each update sums its window's gradients over the replicas. All replicas run the
same order, so no rank waits at an update for a replica that waits for something later.

`sharding.py` says what a replica keeps of each parameter, and so where sums go and what is sent after an update.
`LateRing` injects link conditions into the rings that add gradients up: a sum ends when it would over such links.

    sum of a bucket   |=== really ===|.......| due: `Ring.all_reduce_ms` of its bytes over the links around
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.cost import LinkCondition, Links, Ring
from penstock.cost.conditions import LinkQueue
from penstock.passes.reduce import REDUCE, add_reductions
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.buckets import GradientBucket, SumBucket, cut_into_buckets, send_values
from penstock.runtime.parameters.given_optimizer import is_plain
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.sharding import OwnedParameters, UnshardedParameters
from penstock.runtime.stage.registered_ops import OpFunction
from penstock.runtime.tensors.dtensor import as_shard, local
from penstock.runtime.transport.link_conditions import Conditions
from penstock.schedule import Schedule


class LateRing:
    """The ring of one rank's replicas.

    Args:
        ring: how it moves bytes. around: the condition of each link, from each replica to the next.
        conditions: in whose time they are.
    """

    def __init__(self, ring: Ring, around: Sequence[LinkCondition | None], conditions: Conditions) -> None:
        self._ring, self._around, self._conditions = ring, tuple(around), conditions
        self._free = 0

    def due(self, num_bytes: float) -> int:
        """When a sum that begins now, or after the one before, ends (nanoseconds of the monotonic clock)."""
        begin = max(time.perf_counter_ns(), self._free)
        ms = self._ring.all_reduce_ms(num_bytes, self._around, 0.0, (begin - self._conditions.origin) / 1e6)
        self._free = begin + round(ms * 1e6)
        return self._free


def sleep_until(due: int) -> None:
    """Returns at a moment of the monotonic clock (ns)."""
    while (left := due - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9)


def probed_besides(links: Links, conditions: Conditions) -> dict[tuple[int, int], float]:
    """What injected conditions add to a probe now (ms), by two nodes, the lower one first."""
    at = (time.perf_counter_ns() - conditions.origin) / 1e6
    pairs = {(min(pair), max(pair)) for pair in links.conditions}
    return {(a, b): links.delay_of(a, b, 0.0, at, LinkQueue(at, at)).arrived - at for a, b in pairs}


SUM = "a sum of gradients over the replicas"
"""What a sum is called in errors."""


_OWN = "params", "param_names", "foreach", "fused", "capturable"
"""Of an optimizer's group, what may differ: replicas have parts of what they divide, and step what they hold by other
kernels."""

State = tuple[tuple[tuple[object, ...], ...], tuple[tuple[tuple[str, object], ...], ...]]


class _Versions:
    """Tells which of some tensors were changed in place since a moment, by torch's own count of such changes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [
            torch.empty(0, device="cpu") if tensor.is_inference() else tensor for tensor in tensors
        ]  # has no count
        self.note()

    def note(self) -> None:
        """Now is the moment."""
        self._before = self._now()

    def changed(self) -> list[int]:
        """Their places."""
        if (now := self._now()) == self._before:
            return []
        return [place for place, pair in enumerate(zip(now, self._before, strict=True)) if pair[0] != pair[1]]

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


class ReplicaAgreement:
    """What replicas must have alike when a step begins: which parameters are trained, and the optimizer's options.

        begin   each tells a digest --> the first ops run --> before a gradient is summed: are all the same?
                                                              if not, each tells the rest, and all raise

    Replicas would become other models without a word where they differ, and sums of other lengths end a process.

    Args:
        peers: the replicas.
        parameters: those of this process, in an order that all replicas have. names: of them, by id.
        whole: whether each replica keeps all of a parameter and its gradient, and steps it.
        in_step: what a step computes with in the place of each; None where its ops update them.
    """

    def __init__(
        self,
        peers: GroupPeers,
        parameters: Sequence[Parameter],
        names: dict[int, str],
        whole: bool,
        in_step: Sequence[Parameter] | None,
    ) -> None:
        self._peers, self._parameters, self._names, self._whole = peers, tuple(parameters), names, whole
        self._between = _Versions(parameters if in_step is not None else ())
        self._within = _Versions(in_step or ())
        self._places: list[int] = []
        self._written = [False] * len(self._parameters)
        self._state: State = ((), ())
        self._digest = 0.0
        self._told: Callable[[], Tensor] | None = None

    def begin(self, optimizer: Optimizer | None) -> None:
        """Tells the others how this replica begins a step."""
        places = self._where()
        self.see_values()
        self._within.note()
        state: State = (
            tuple(
                (p.requires_grad, p.dtype, self._whole and p.grad is not None, now != before, written)
                for p, now, before, written in zip(
                    self._parameters, places, self._places or places, self._written, strict=True
                )
            ),
            () if optimizer is None else tuple(self._options(group) for group in optimizer.param_groups),
        )
        if state != self._state or not self._digest:
            self._state = state
            self._digest = float(int.from_bytes(hashlib.sha256(repr(state).encode()).digest()[:6]) + 1)
        row = torch.zeros(self._peers.num_ranks, dtype=torch.float64, device="cpu")
        row[self._peers.here[0]] = self._digest
        self._told = self._peers.begin_sum(row)
        self._written = [False] * len(self._parameters)

    def end(self) -> None:
        """The step is over: what lies elsewhere when the next one begins was moved by the caller."""
        self._places = self._where()

    def see_values(self) -> None:
        """Before a step, or the optimizer's: what has changed in place since the one before was changed by the
        caller.
        """
        if changed := self._between.changed():
            self._written = [known or place in changed for place, known in enumerate(self._written)]
            self._between.note()

    def note_values(self) -> None:
        """All replicas have come to the same values."""
        self._between.note()

    def require_unchanged(self) -> None:
        """Raises RuntimeFailure where something changed a parameter in the middle of the step, such as a hook that
        steps, or a layer that averages another one.
        """
        if changed := self._within.changed():
            name = self._names.get(id(self._parameters[changed[0]]), "")
            raise RuntimeFailure(
                f"parameter {name} was changed in the middle of a step, in which each of the {self._peers.num_ranks} "
                "replicas runs a part of the microbatches alone, so they would become other models; change it "
                "between two steps, alike on every rank, or leave it to the optimizer"
            )

    def _where(self) -> list[int]:
        """The memory of each parameter, where each replica keeps all of it."""
        return [p.data_ptr() if self._whole else 0 for p in self._parameters]

    def require(self) -> None:
        """Raises RuntimeFailure, in every replica, if they began the step with other parameters or options."""
        if self._told is None:
            return
        told, self._told = self._told, None
        digests = told().tolist()
        if digests.count(digests[0]) == len(digests):
            return
        first, *others = self._peers.gather(self._facts())
        replica, subject = next(
            (number, subject)
            for number, other in enumerate(others, 1)
            for subject in {**first, **other}
            if other.get(subject) != first.get(subject)
        )
        there, here = others[replica - 1].get(subject, "not there"), first.get(subject, "not there")
        raise RuntimeFailure(
            f"{subject} is {there} in replica {replica}, and {here} in replica 0, so they would train other models; "
            "change it on every rank, between the same two steps"
        )

    def _options(self, group: dict[str, object]) -> tuple[tuple[str, object], ...]:
        """Of a group, what is plain numbers and words, and how many parameters it has."""
        found: list[tuple[str, object]] = []
        for name, value in sorted(group.items()):
            one = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda else value
            if name not in _OWN and is_plain(one):
                found.append((name, one))
        parameters = group["params"]
        if self._whole and isinstance(parameters, list):
            found.append(("number of parameters", len(parameters)))
        return tuple(found)

    def _facts(self) -> dict[str, str]:
        """By subject, the state in words."""
        parameters, groups = self._state
        facts = {}
        for parameter, state in zip(self._parameters, parameters, strict=True):
            is_trained, dtype, has_gradient, has_moved, was_written = state
            words = ["trained" if is_trained else "frozen", f"of {dtype}"]
            words += ["with a gradient before the step"] if has_gradient else []
            words += ["given other data since the last step"] if has_moved else []
            words += ["changed in place since the last step"] if was_written else []
            facts[f"parameter {self._names.get(id(parameter), '')}"] = ", ".join(words)
        for number, options in enumerate(groups):
            facts |= {f"{name} of the optimizer's group {number}": repr(value) for name, value in options}
        return facts


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
    """

    def __init__(
        self,
        model: LocalModel,
        peers: Peers,
        order: Sequence[int],
        sharding: UnshardedParameters,
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
        self._under_way: list[tuple[SumBucket, Any, int]] = []
        self._agreement: ReplicaAgreement | None = None
        if self._peers is not None:
            names = {id(parameter): name for name, parameter in model.named.items()}
            whole = type(sharding) is UnshardedParameters and not has_updates
            in_step = None if has_updates else [sharding.in_step(parameter) for parameter in model.parameters]
            self._agreement = ReplicaAgreement(self._peers, model.parameters, names, whole, in_step)

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

    def unshard(self) -> None:
        """Before forwards: all parameters are whole here."""
        self.sharding.unshard()

    def reshard(self) -> None:
        """After them: what other replicas keep is given up."""
        self.sharding.reshard(self._has_updates)

    # Gradients.

    def begin(self, optimizer: Optimizer | None) -> None:
        """Starts a step: gradients of earlier ones are sums already, and kept aside. Where updates are ops, what is
        left of an open window stays where it is.

        Args:
            optimizer: what steps afterwards; its options must be the same in every replica.
        """
        if self._agreement is not None:
            self._agreement.begin(optimizer)
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
        self._require_alike()
        self._ready.add(stage)
        while self._due and self._due[0] in self._ready:
            for parameters in self._early[self._due.popleft()]:
                self._reduce(parameters)

    def finish(self) -> None:
        """Sums what no REDUCE has, waits for all, and adds what was kept aside. Where updates are ops, they have made
        all sums.
        """
        self._require_alike()
        if self._peers is None or self._has_updates:
            return
        if self._agreement is not None:
            self._agreement.require_unchanged()
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

    def _require_alike(self) -> None:
        """Raises RuntimeFailure, in every replica, if this step began otherwise in another one."""
        if self._agreement is not None:
            self._agreement.require()

    def end(self) -> None:
        """A step is over, with its update where it has one."""
        if self._agreement is not None:
            self._agreement.end()

    def _reduce(self, parameters: Sequence[Parameter]) -> None:
        assert self._peers is not None, "sums are asked for where there are others"
        self._begin(self.sharding.bucket(parameters, self._peers), parameters)

    def _begin(self, bucket: SumBucket, parameters: Sequence[Parameter]) -> None:
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
        if self._peers is None:
            return list(gradients)
        self._require_alike()
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

    def see_values(self) -> None:
        """Before an update outside of a step."""
        if self._agreement is not None:
            self._agreement.see_values()

    def note_values(self) -> None:
        """All replicas have come to the same values by now: of an update, or of what was loaded."""
        if self._agreement is not None:
            self._agreement.note_values()

    def share_stepped(self, stepped: Iterable[Parameter] | None = None) -> None:
        """After an update: every replica gets what others have stepped, of all parameters where none are named."""
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
    sharding: UnshardedParameters = model.sharded or UnshardedParameters(peers)
    if mesh.sharding == "zero1" and peers is not None:
        sharding = OwnedParameters(peers, model.parameters, model.shared.followers())
    return Replicas(model, mesh.replicas, order, sharding, schedule.updates is not None, late)
