"""Whether all processes that hold a tensor begin a step alike: what they train, by which options, from which state.

    replicas              all parameters of a rank's stages            every replica
    copies of a stage     its parameters                               a rank of each pipeline
    a tied parameter      that one                                     the ranks of all stages that share it
    a shared stage        its parameters, or parts of them             the ranks that share it
    shards                parts of parameters, and what is not cut     every shard

Such holders become other models without a word where they differ, and sums of other lengths end a process.

    begin     each tells a digest --> the first ops run --> before a sum of gradients: are all the same?
    the end   where some are not, that sum has been left out, and every process hears it with the losses:
              each tells the rest, and all raise the same

What a caller changes between two steps is seen by what is different since the last step's end. Then holders of the
same values compare what these have become, and holders of different parts compare that something was changed at all.
A step before which nobody has changed anything compares no values.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, MeshPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.given_optimizer import is_plain
from penstock.runtime.parameters.gradients import NO_GRADIENT, GradientChange, KnownGradient
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.sharding import ReplicaParameters
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded, memory, placements_of
from penstock.schedule.updates import OWNER

_OWN = "params", "param_names", "foreach", "fused", "capturable"
"""Of an optimizer's group, what may differ: holders have parts of what they divide, and step what they hold by other
kernels."""

_MOVED, _WRITTEN = "given other data since the last step", "changed in place since the last step"
_VALUES = "with its values"
"""What `HolderAgreement.require` compares where nobody is known to have changed anything."""
_OF_VALUES = _MOVED, _WRITTEN, _VALUES
_OF_GRADIENT = {
    GradientChange.GIVEN: "with a gradient before the step",
    GradientChange.CLEARED: "with its gradient cleared before the step",
    GradientChange.CHANGED: "with its gradient changed before it",
}

_Event = tuple[str, int]
"""What the caller has done to a parameter, and a digest of what it made of it; 0 where holders have other parts of
that, or where nothing is left.
"""


class Versions:
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
        return _differing(self._before, self._now())

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _places_of(tensors: Iterable[Tensor]) -> list[int]:
    """Where their memory is."""
    return [(memory(tensor) if is_sharded(tensor) else tensor).data_ptr() for tensor in tensors]


def _differing(before: Sequence[object], now: Sequence[object]) -> list[int]:
    if before == now:
        return []
    return [place for place, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1]]


class _OptimizerStates:
    """Tells of which tensors an optimizer's state is another one since a moment.

    Args:
        stepped: for each tensor what the optimizer has in its place.
    """

    def __init__(self, stepped: Sequence[Sequence[Tensor]]) -> None:
        self._keys = [(place, one) for place, each in enumerate(stepped) for one in each]
        self._sizes: list[int] = []
        self._values: list[object] = []
        self._versions: list[int] = []

    def note(self, optimizer: Optimizer | None) -> None:
        """Now is the moment."""
        self._sizes, self._values, self._versions = self._now(optimizer)

    def changed(self, optimizer: Optimizer | None) -> list[tuple[int, str]]:
        """Their places, and what is there now, in words."""
        sizes, values, versions = self._now(optimizer)
        is_same = sizes == self._sizes and versions == self._versions
        if is_same and all(map(operator.is_, values, self._values)):
            return []
        before = iter(zip(self._values, self._versions, strict=True))
        now = iter(zip(values, versions, strict=True))
        found: dict[int, str] = {}
        for (place, one), size, size_before in zip(self._keys, sizes, self._sizes or [0] * len(sizes), strict=True):
            pairs = list(zip_longest(islice(before, size_before), islice(now, size)))
            if any(old is None or new is None or old[0] is not new[0] or old[1] != new[1] for old, new in pairs):
                found[place] = _said_of_state({} if optimizer is None else optimizer.state.get(one, {}))
        return list(found.items())

    def digest(self, place: int, optimizer: Optimizer | None) -> int:
        """Tells the state of a tensor from others; 0 where there is none."""
        state: Mapping[Tensor, Mapping[str, object]] = {} if optimizer is None else optimizer.state
        held = [state.get(one, {}) for at, one in self._keys if at == place]
        found = [(name, _content_of(value)) for each in held for name, value in sorted(each.items())]
        return _digest_of(found) if found else 0

    def _now(self, optimizer: Optimizer | None) -> tuple[list[int], list[object], list[int]]:
        """How many values there are of each tensor, the values, and torch's count of changes in place of them."""
        state: Mapping[Tensor, Mapping[str, object]] = {} if optimizer is None else optimizer.state
        if not state:
            return [0] * len(self._keys), [], []
        held = [state.get(one, {}) for _, one in self._keys]
        values = [value for each in held for value in each.values()]
        versions = [value._version if isinstance(value, Tensor) else 0 for value in values]
        return [len(each) for each in held], values, versions


def _content_of(value: object) -> object:
    """Plain data that is the same where a value is."""
    return (str(value.dtype), hash_of(value)) if isinstance(value, Tensor) else repr(value)


def _said_of_state(held: Mapping[str, object]) -> str:
    if not held:
        return "with its optimizer state cleared since the last step"
    step = held.get("step")
    if isinstance(step, Tensor):
        step = step.item() if step.numel() == 1 and step.device.type == "cpu" else None
    at = f" (it is at step {step:g})" if isinstance(step, int | float) else ""
    return f"with another optimizer state since the last step{at}"


@dataclass(frozen=True)
class HolderSet:
    """Parameters that several processes of a group hold.

    Attributes:
        holders: their numbers in the group, ascending.
        parameters: by name those here, in an order that all holders have; empty on others.
        has_gradients: whether each of them has a parameter's gradient between two steps, or none has.
        steps: whether each has the optimizer's state of a parameter, and all its options.
        by_group: options are compared group by group, which all holders have alike.
        in_parts: of a parameter that is cut, each holder has another part.
        window: in words, what each holder has summed of the gradients of an open window. Where it is given, this is
            all that is compared: whether the caller has left it alone.
    """

    holders: tuple[int, ...]
    parameters: Mapping[str, Parameter]
    has_gradients: bool
    steps: bool
    by_group: bool = False
    in_parts: bool = False
    window: str = ""

    def has_same_values(self, parameter: Parameter) -> bool:
        """Whether all holders have the same of a parameter."""
        return not self.in_parts or all(placement.is_replicate() for placement in placements_of(parameter))


Facts = dict[str, str]
"""By subject, how it is, in words."""

_Options = tuple[Facts, int]
"""Of an optimizer's group by name what is plain numbers and words, and how many parameters it has."""


class _Meeting:
    """The processes along one dimension of the mesh, some of which hold something together.

    Args:
        kind: what they are, in words: "replica", "rank", "shard".
        at: tells this meeting from those of other processes.
    """

    def __init__(self, kind: str, at: tuple[int, ...], peers: GroupPeers, sets: Sequence[HolderSet]) -> None:
        self.kind, self.at, self.peers, self.sets = kind, at, peers, list(sets)
        self._wait_for_sum: Callable[[], Tensor] | None = None
        self._alike = True

    def begin(self, digests: Sequence[float]) -> None:
        me = self.peers.here[0]
        row = torch.zeros(sum(len(each.holders) for each in self.sets), dtype=torch.float64, device="cpu")
        start = 0
        for each, digest in zip(self.sets, digests, strict=True):
            if me in each.holders:
                row[start + each.holders.index(me)] = digest
            start += len(each.holders)
        self._wait_for_sum = self.peers.begin_sum(row)

    @property
    def is_alike(self) -> bool:
        """Whether all holders have begun the step alike: the same on all these processes. Waits for the others."""
        if self._wait_for_sum is None:
            return self._alike
        wait_for_sum, self._wait_for_sum = self._wait_for_sum, None
        row, start = wait_for_sum().tolist(), 0
        self._alike = True
        for each in self.sets:
            digests = row[start : start + len(each.holders)]
            self._alike = self._alike and len({digest for digest in digests if digest}) <= 1
            start += len(digests)
        return self._alike


class HolderAgreement:
    """What all holders of a tensor must have alike when a step begins.

    Args:
        meetings: those of this process.
        everyone: all processes, which hear where some are not alike.
        stepped: for each parameter here what the optimizer has in its place.
        in_step: what a step computes with in the place of a parameter; None where its ops update it.
        optimizer: gives the one that steps.
    """

    def __init__(
        self,
        meetings: Sequence[_Meeting],
        everyone: Peers,
        stepped: Callable[[Parameter], Sequence[Tensor]],
        in_step: Callable[[Parameter], Parameter] | None,
        optimizer: Callable[[], Optimizer | None],
    ) -> None:
        self._meetings, self._everyone, self._optimizer = meetings, everyone, optimizer
        held = {id(p): (p, name) for m in meetings for s in m.sets for name, p in s.parameters.items()}
        self._parameters = [parameter for parameter, _ in held.values()]
        self._names = [name for _, name in held.values()]
        # Holders of parts have other values of what is cut, whatever the caller has made of them.
        whole = {id(p) for m in meetings for s in m.sets for p in s.parameters.values() if s.has_same_values(p)}
        self._is_whole = [id(parameter) in whole for parameter in self._parameters]
        self._number = {key: number for number, key in enumerate(held)}
        self._stepped = [stepped(parameter) for parameter in self._parameters]
        steps = {id(p) for m in meetings for s in m.sets if s.steps for p in s.parameters.values()}
        stated = [one if id(p) in steps else () for p, one in zip(self._parameters, self._stepped, strict=True)]
        self._versions = Versions(self._parameters)
        in_parts = {id(p) for m in meetings for s in m.sets if s.in_parts for p in s.parameters.values()}
        self._in_parts = [id(parameter) in in_parts for parameter in self._parameters]
        self._states = _OptimizerStates(stated)
        self._within = Versions([] if in_step is None else [in_step(p) for p in self._parameters])
        self._events: dict[int, set[_Event]] = {}
        """By the place of a parameter."""
        self._known: dict[int, KnownGradient] = {}
        """The gradients that there were, by the place of their parameter."""
        self._changed_between_modes: list[int] | None = None
        """The places of what an evaluation has changed; None in a step."""
        self._refused: str | None = None
        self._state: object = None
        self._facts: list[list[Facts]] = []
        self._digests: list[list[float]] = []
        self._as_made = [hash_of(parameter) for parameter in self._parameters]
        """Of each parameter's values, until the first step. A trainer may give them other memory by then."""
        self.note()

    @property
    def is_needed(self) -> bool:
        """Whether any process here holds what another one holds too."""
        return bool(self._meetings)

    # What a caller changes between two steps.

    def note(self) -> None:
        """All that is changed from now on is changed by the caller: a step, an update or a load is over."""
        if not self._meetings:
            return
        with torch.inference_mode(False):  # which a step that is refused there may have been called under
            self._versions.note()
            self._places = _places_of(self._parameters)
            self._states.note(self._optimizer())
            gradients = enumerate([parameter.grad for parameter in self._parameters])
            self._known = {place: KnownGradient(gradient) for place, gradient in gradients if gradient is not None}

    def see(self) -> None:
        """Takes note of what the caller has changed by now."""
        if not self._meetings:
            return
        moved = _differing(self._places, _places_of(self._parameters))
        if self._as_made:  # the same values elsewhere are no change
            moved = [place for place in moved if hash_of(self._parameters[place]) != self._as_made[place]]
        found = [(place, _MOVED) for place in moved]
        found += [(place, _WRITTEN) for place in set(self._versions.changed()).difference(moved)]
        found += self._states.changed(self._optimizer())
        for place, gradient in enumerate([parameter.grad for parameter in self._parameters]):
            if gradient is None and place not in self._known:
                continue
            if (change := self._known.get(place, NO_GRADIENT).change(gradient)) is not None:
                found.append((place, _OF_GRADIENT[change]))
        for place, said in found:
            digest, events = self._digest_of_change(place, said), self._events.setdefault(place, set())
            if said in _OF_VALUES:  # what it has now counts, whatever it had before
                events = {(event, digest if event in _OF_VALUES else known) for event, known in events}
            self._events[place] = {*events, (said, digest)}
        if found:
            self.note()

    def _digest_of_change(self, place: int, said: str) -> int:
        """Of what the caller has made of a parameter, its gradient or its state; see `_Event`."""
        parameter = self._parameters[place]
        if not self._is_whole[place]:
            return 0
        if said in _OF_VALUES:
            return hash_of(parameter)
        if said in _OF_GRADIENT.values():
            gradient = parameter.grad
            is_summed = not any(one.is_partial() for one in placements_of(gradient))
            return hash_of(gradient) if gradient is not None and is_summed else 0
        return self._states.digest(place, self._optimizer())

    @contextmanager
    def noting_own_changes(self) -> Iterator[None]:
        """Around what changes parameters or gradients between two steps, and is no change of the caller's. Raises
        RuntimeFailure as `require_settled`.
        """
        self.require_settled()
        self.see()
        try:
            yield
        finally:
            self.note()

    # A step.

    def begin(self, rates: Sequence[float] | None = None) -> None:
        """Tells the others how this process begins a step, or an evaluation.

        Args:
            rates: of updates that are ops, in place of the optimizer's.
        """
        if not self._meetings:
            return
        self.see()
        self._as_made.clear()
        self._within.note()
        self._changed_between_modes = None
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        options = [_options_of(group) for group in groups]
        members = [[id(one) for one in group["params"]] for group in groups]
        trained = [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters]
        given = None if rates is None else tuple(map(float, rates))
        windows = [self._of_window(each) for meeting in self._meetings for each in meeting.sets if each.window]
        state = (
            trained,
            options,
            members,
            given,
            windows,
            sorted((place, sorted(each)) for place, each in self._events.items()),
        )
        if state != self._state:
            self._state = state
            of_group = {one: number for number, those in enumerate(members) for one in those}
            self._facts = [
                [
                    self._of_window(each)
                    if each.window
                    else self._facts_of(each, options, of_group, optimizer is not None)
                    | ({"rates= of the step": str(given)} if each.by_group or each.steps else {})
                    for each in meeting.sets
                ]
                for meeting in self._meetings
            ]
            self._digests = [
                [float(_digest_of(facts) + 1) if facts else 0.0 for facts in found] for found in self._facts
            ]
        for meeting, digests in zip(self._meetings, self._digests, strict=True):
            meeting.begin(digests)

    @contextmanager
    def between_modes(self) -> Iterator[None]:
        """After `begin`, around what runs while all modules are in evaluation mode. Modules may change parameters as
        they enter that mode and leave it, such as by merging adapters, and do so alike wherever these are held.
        """
        self._within.note()
        try:
            yield
        finally:
            self._changed_between_modes = self._within.changed()

    def is_alike(self, peers: Peers) -> bool:
        """Whether these processes have begun the step alike; the same on all of them. Where they have not, sums of
        theirs are to be left out.
        """
        return all(meeting.is_alike for meeting in self._meetings if meeting.peers is peers)

    def agrees(self) -> bool:
        """At the end of a step: whether all that this process knows of is alike, and was left alone in the step."""
        found = [meeting.is_alike for meeting in self._meetings]  # waits for all of them
        return all(found) and not self._changed_within()

    def _changed_within(self) -> list[int]:
        """The places of what the ops have changed, which is none of theirs to change."""
        return self._within.changed() if self._changed_between_modes is None else self._changed_between_modes

    def settle(self) -> None:
        """All processes agree, or have loaded the same: what the caller has changed so far is no news any more."""
        self._refused = None
        self._events.clear()

    def require_settled(self) -> None:
        """Raises RuntimeFailure, in every process, where a step was refused and none has run since."""
        if self._refused is not None:
            raise RuntimeFailure(self._refused)

    def require(self, everyone: Peers, compares_values: bool = False) -> None:
        """Between two steps. Every process must call it. Raises RuntimeFailure as `conclude`.

        Args:
            compares_values: of all that is held, whether anybody is known to have changed it or not. Torch does not
                count changes through `parameter.data`.
        """
        if not any(everyone.gather(self.is_needed)):
            return
        if compares_values:
            for place, parameter in enumerate(self._parameters):
                if not self._in_parts[place]:
                    self._events.setdefault(place, set()).add((_VALUES, hash_of(parameter)))
        try:
            self.begin()
            self.conclude(all(everyone.gather(self.agrees())))
        finally:
            self._events = {
                place: {event for event in events if event[0] != _VALUES} for place, events in self._events.items()
            }

    def conclude(self, alike: bool) -> None:
        """Ends a step. Raises RuntimeFailure, the same in every process, where some did not begin it alike.

        Args:
            alike: whether all processes agree; the same on all of them.
        """
        if alike:
            self.settle()
            return
        try:
            self._refuse()
        except RuntimeFailure as error:
            self._refused = str(error)
            raise

    def _refuse(self) -> None:
        within = [self._names[place] for place in self._changed_within()[:1]]
        mine = [
            ((meeting.kind, *meeting.at, number), meeting.peers.here[0], facts)
            for meeting, found in zip(self._meetings, self._facts, strict=True)
            for number, facts in enumerate(found)
            if facts and meeting.peers.here[0] in meeting.sets[number].holders
        ]
        gathered = self._everyone.gather((within, mine))
        for process, (changed, _) in enumerate(gathered):
            for name in changed:
                raise RuntimeFailure(
                    f"parameter {name} was changed in the middle of a step in process {process}; other processes "
                    "hold it too, each of which runs a part of the microbatches alone, so they would become other "
                    "models; change it between two steps, alike on every rank, or leave it to the optimizer"
                )
        by_set: dict[tuple[object, ...], dict[int, Facts]] = {}
        for _, found in gathered:
            for key, holder, facts in found:
                by_set.setdefault(key, {})[holder] = facts
        for key, of_holders in sorted(by_set.items(), key=lambda item: str(item[0])):
            _require_alike(str(key[0]), dict(sorted(of_holders.items())))
        raise RuntimeFailure(
            "processes that hold the same parameters did not begin a step alike; change what they hold on every "
            "rank, between the same two steps"
        )

    def _of_window(self, held: HolderSet) -> Facts:
        """What the caller has done to what is summed of an open window; empty where nothing was."""
        done: dict[str, str] = {}
        for name, parameter in held.parameters.items():
            events = {said for said, _ in self._events.get(self._number[id(parameter)], ())}
            if _OF_GRADIENT[GradientChange.CLEARED] in events:
                done[name] = "cleared"
            elif parameter.grad is not None:
                done[name] = "changed" if _OF_GRADIENT[GradientChange.CHANGED] in events else "left alone"
        words = list(dict.fromkeys(done.values()))
        if len(words) > 1:
            words = [", ".join(f"{word} for {name}" for name, word in done.items() if word != "left alone")]
        return {held.window: words[0]} if words else {}

    def _facts_of(
        self, held: HolderSet, options: Sequence[_Options], of_group: Mapping[int, int], is_stepped: bool
    ) -> Facts:
        facts: Facts = {}
        for name, parameter in held.parameters.items():
            place = self._number[id(parameter)]
            words = ["trained" if parameter.requires_grad else "frozen", f"of {parameter.dtype}"]
            is_same = held.has_same_values(parameter)
            words += [
                f"{said} (digest of what is there: {digest:x})" if digest and is_same else said
                for said, digest in sorted(self._events.get(place, ()))
                if _is_told(said, held, parameter)
            ]
            known = [of_group.get(id(one)) for one in self._stepped[place]]
            by_itself = is_stepped and held.steps and not held.by_group and parameter.requires_grad
            words += ["left out of the optimizer"] if by_itself and None in known else []
            facts[f"parameter {name}"] = ", ".join(words)
            for number in dict.fromkeys(known if by_itself else ()):
                those = {} if number is None else options[number][0]
                facts |= {f"{option} of parameter {name} in the optimizer": value for option, value in those.items()}
        for number, (those, num) in enumerate(options if held.by_group else ()):
            facts |= {f"{name} of the optimizer's group {number}": value for name, value in those.items()}
            if held.steps:
                facts[f"number of parameters of the optimizer's group {number}"] = str(num)
        return facts


def _digest_of(value: object) -> int:
    """48 bits that tell plain data from others, which doubles hold exactly."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:6])


def _is_told(event: str, held: HolderSet, parameter: Parameter) -> bool:
    if event in _OF_GRADIENT.values():
        return held.has_gradients
    return event in _OF_VALUES or held.steps


def _options_of(group: Mapping[str, object]) -> _Options:
    found: Facts = {}
    for name, value in sorted(group.items()):
        one = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda else value
        if name not in _OWN and is_plain(one):
            found[name] = repr(one)
    parameters = group["params"]
    return found, len(parameters) if isinstance(parameters, list) else 0


def _require_alike(kind: str, of_holders: Mapping[int, Facts]) -> None:
    """Raises RuntimeFailure where holders tell other facts."""
    first = next(iter(of_holders))
    for subject in {subject: None for facts in of_holders.values() for subject in facts}:
        said = {holder: facts.get(subject, "not there") for holder, facts in of_holders.items()}
        other = next((holder for holder, one in said.items() if one != said[first]), None)
        if other is None:
            continue
        mine, theirs = said[first], said[other]
        where = _where(kind, [holder for holder, one in said.items() if one == theirs])
        there = _where(kind, [holder for holder, one in said.items() if one == mine])
        raise RuntimeFailure(
            f"{subject} is {theirs} {where}, and {mine} {there}, so they would train other models; change it on "
            "every rank, between the same two steps"
        )


def _where(kind: str, holders: Sequence[int]) -> str:
    """ "in replica 1", "on ranks 0 and 3"."""
    *others, last = map(str, holders)
    which = f"{kind}s {', '.join(others)} and {last}" if others else f"{kind} {last}"
    return f"on {which}" if kind == "rank" else f"in {which}"


def agreement_of(
    model: LocalModel,
    mesh: ProcessMesh,
    sharding: ReplicaParameters,
    masters: Mapping[int, Sequence[Tensor]] | None,
    one_copy_steps: bool,
    optimizer: Callable[[], Optimizer | None],
) -> HolderAgreement:
    """What is to be alike of this process's model. Every process must call it.

    Args:
        masters: by id of a parameter, what updates that are ops step in its place; None where there are no such ops.
        one_copy_steps: of several copies of a stage only the owner's is stepped.
        optimizer: gives the one that steps.
    """
    is_dealt = sharding.keeps_whole and not sharding.has_all_state
    at_rest = masters is None and not is_dealt
    everything = HolderSet((), _named(model), at_rest, not is_dealt, by_group=True)
    meetings: list[_Meeting] = []
    shard, rank, replica = mesh.shard, mesh.pipeline.here[0], mesh.replica
    if isinstance(mesh.replicas, GroupPeers):
        alike = replace(everything, holders=tuple(range(mesh.num_replicas)), in_parts=not sharding.keeps_whole)
        meetings.append(_Meeting("replica", (rank, shard), mesh.replicas, [alike]))
    together = list(_sets_of_ranks(model, is_dealt, masters is not None, one_copy_steps))
    if isinstance(mesh.pipeline, GroupPeers) and together:
        meetings.append(_Meeting("rank", (replica, shard), mesh.pipeline, together))
    if mesh.shards is not None:
        peers = mesh.everyone.along[-1] if isinstance(mesh.everyone, MeshPeers) else None
        assert isinstance(peers, GroupPeers), "shards are a dimension of a mesh"
        alike = replace(everything, holders=tuple(range(mesh.num_shards)), in_parts=True)
        meetings.append(_Meeting("shard", (rank, replica), peers, [alike]))

    def stepped(parameter: Parameter) -> Sequence[Tensor]:
        return (parameter,) if masters is None else masters.get(id(parameter), ())

    in_step = None if masters is not None else sharding.in_step
    return HolderAgreement(meetings, mesh.everyone, stepped, in_step, optimizer)


def _named(model: LocalModel) -> dict[str, Parameter]:
    """All parameters here, each once, by a name of theirs."""
    names: dict[int, str] = {}
    for stage in model.copies.stages.values():
        for name, parameter in stage.named_parameters():
            names.setdefault(id(parameter), model.ties.owned_name(name))
    found: dict[str, Parameter] = {}
    for parameter in model.parameters:
        name = names[id(parameter)]
        while name in found:
            name += " (once more)"
        found[name] = parameter
    return found


def _sets_of_ranks(model: LocalModel, is_dealt: bool, updates: bool, one_copy_steps: bool) -> Iterator[HolderSet]:
    """What several ranks of a pipeline hold, in an order that all ranks have."""
    placement, stages, owned = model.placement, model.copies.stages, model.stages
    pipelines, shared = range(placement.num_pipelines), {stage for stage, _ in placement.shared}

    def holders_of(indices: Iterable[int], those: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted({rank for k in those for index in indices for rank in placement.hosts(k, index)}))

    for index in range(placement.num_stages):
        holders, owners = holders_of([index], pipelines), holders_of([index], [OWNER])
        if len(holders) > 1:
            here = model.copies.own(index) if index in stages else {}
            # What replicas deal out, each rank deals by itself, but for what is tied.
            steps = not is_dealt and (not one_copy_steps or holders == owners)
            yield HolderSet(holders, here, not is_dealt and not updates, steps, in_parts=index in shared)
            if updates:
                yield HolderSet(
                    holders, here, False, False, window=f"what stage {index} has summed of an open window"
                )
    for tie in model.ties:
        holders, owners = holders_of(tie.stages, pipelines), holders_of(tie.stages, [OWNER])
        if len(holders) > 1:
            # Where a rank has it in several stages, and steps that of some: one of these.
            mine = sorted((index for index in tie.stages if index in stages), key=lambda index: index not in owned)
            here = {} if not mine else {tie.name: stages[mine[0]].get_parameter(tie.names[mine[0]])}
            steps = not updates and (not one_copy_steps or holders == owners)
            yield HolderSet(holders, here, not updates, steps, in_parts=not shared.isdisjoint(tie.stages))
