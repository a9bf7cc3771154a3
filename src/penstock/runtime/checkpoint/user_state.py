"""State of the caller's in a checkpoint: a learning-rate schedule's, a data loader's, whatever has `state_dict`.

state/scheduler#json                       the same in every process: any number of them may load it
state/loader@replica-1-of-2#json           the same within each replica: as many replicas may
state/rng@process-3-of-4#json              of one process: as many processes may
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.runtime.checkpoint.codec import AS_JSON, names_by_base, pack
from penstock.runtime.checkpoint.reader import Reader, load_packed
from penstock.runtime.errors import CheckpointError

PREFIX = "state/"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class Stateful(Protocol):
    """What `ps.Pipeline.save` and `load` take by name, like a learning-rate scheduler."""

    def state_dict(self) -> Any:
        """Its state: tensors, numbers, text, and dicts, lists, tuples or sets of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes what `state_dict` gave."""


class ProcessPlace(NamedTuple):
    """Where a process lies: its replica of so many, its number of so many."""

    replica: int
    num_replicas: int
    process: int
    num_processes: int

    @property
    def of_replica(self) -> str:
        return f"@replica-{self.replica}-of-{self.num_replicas}"

    @property
    def of_process(self) -> str:
        return f"@process-{self.process}-of-{self.num_processes}"


def require_stateful(stateful: Mapping[str, Stateful]) -> None:
    """Raises CheckpointError for a name that is none, or an object without the two functions."""
    for name, each in stateful.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise CheckpointError(f"stateful= has the name {name!r}: give letters, digits, _ . and -")
        for function in ("state_dict", "load_state_dict"):
            if not callable(getattr(each, function, None)):
                raise CheckpointError(
                    f"stateful= has {name}, a {type(each).__name__} without {function}: give objects with state_dict "
                    "and load_state_dict"
                )


def packed(stateful: Mapping[str, Stateful]) -> dict[str, dict[str, Tensor]]:
    """By base each object's state as tensors. Raises CheckpointError for what cannot be stored."""
    require_stateful(stateful)
    return {
        PREFIX + name: pack(PREFIX + name, each.state_dict(), f"the state of {name}")
        for name, each in stateful.items()
    }


def to_write(
    states: Mapping[str, Mapping[str, Tensor]],
    digests: Sequence[Mapping[str, str]],
    places: Sequence[ProcessPlace],
    me: int,
) -> dict[str, Tensor]:
    """What this process writes: what is alike is written once.

    Args:
        digests, places: of every process. me: which of them this one is.

    Raises:
        CheckpointError: processes gave other names; alike in every process.
    """
    for process, found in enumerate(digests):
        if found.keys() != digests[0].keys():
            raise CheckpointError(
                f"process {process} saves the state of {_listed(found)} and process 0 that of {_listed(digests[0])}: "
                "every process must give the same names to stateful="
            )
    tensors: dict[str, Tensor] = {}
    for base, state in states.items():
        suffix = _suffix([found[base] for found in digests], places, me)
        if suffix is not None:
            tensors |= {base + suffix + name.removeprefix(base): tensor for name, tensor in state.items()}
    return tensors


def _suffix(digests: Sequence[str], places: Sequence[ProcessPlace], me: int) -> str | None:
    """What is put behind a state's name here; None where another process writes the same."""
    if len(set(digests)) == 1:
        return "" if me == 0 else None
    mine = [p for p, place in enumerate(places) if place.replica == places[me].replica]
    by_replica: dict[int, set[str]] = {}
    for digest, place in zip(digests, places, strict=True):
        by_replica.setdefault(place.replica, set()).add(digest)
    if all(len(found) == 1 for found in by_replica.values()):
        return places[me].of_replica if me == mine[0] else None
    return places[me].of_process


def _listed(bases: Mapping[str, Any]) -> str:
    return ", ".join(sorted(base.removeprefix(PREFIX) for base in bases)) or "nothing"


class StateToGive(NamedTuple):
    """State of an object that its own code saves and loads.

    Attributes:
        owner, kind: in words, whose it is and what. value: to be given.
        get, put: the object's code; what `get` gives, `put` takes.
    """

    owner: str
    kind: str
    value: Any
    get: Callable[[], Any]
    put: Callable[[Any], Any]


class StateTrial:
    """Gives objects their state, as only their own code can tell whether it takes it."""

    def __init__(self, states: Iterable[StateToGive]) -> None:
        self._states, self._before = tuple(states), list[tuple[StateToGive, Any]]()

    def give(self) -> None:
        """Raises CheckpointError; `take_back` then leaves objects as they were."""
        for each in self._states:
            self._before.append((each, copy.deepcopy(each.get())))
            try:
                each.put(each.value)
            except Exception as error:
                raise CheckpointError(
                    f"{each.owner} does not take its {each.kind}: {type(error).__name__}: {error}"
                ) from error

    def take_back(self, error: BaseException) -> None:
        """Undoes `give`, as far as objects let it: what one does not take back is noted on the error."""
        while self._before:
            each, value = self._before.pop()
            try:
                each.put(value)
            except Exception as another:
                error.add_note(
                    f"{each.owner} does not take back its {each.kind} of before either ({type(another).__name__}: "
                    f"{another}), and may have lost it: make it anew"
                )


class StagedUserState:
    """The state of the caller's objects as a checkpoint has it: read, and not yet given to them.

    Attributes:
        trial: gives it to them. left: names in the checkpoint that nobody asked for.

    Raises:
        CheckpointError: there is none of an object, or it was another in each of other processes; damage.
    """

    def __init__(self, stateful: Mapping[str, Stateful], reader: Reader, place: ProcessPlace) -> None:
        require_stateful(stateful)
        parts = names_by_base(reader.names(), PREFIX)
        there = {base.removeprefix(PREFIX).partition("@")[0] for base in parts}
        self.left = sorted(there - stateful.keys())
        states = []
        for name, each in stateful.items():
            if name not in there:
                held = f"it has that of {', '.join(sorted(there))}" if there else "it has no state of the caller's"
                raise CheckpointError(
                    f"checkpoint {reader.path} has no state of {name}, {held}: leave it out of stateful=, or save it"
                )
            bases = [PREFIX + name + suffix for suffix in ("", place.of_replica, place.of_process)]
            base = next((b for b in bases if b + AS_JSON in parts.get(b, ())), None)
            if base is None:
                found = next(b for b in parts if b.startswith(f"{PREFIX}{name}@")).partition("@")[2]
                raise CheckpointError(
                    f"checkpoint {reader.path} has a state of {name} for each {_words(found)}, and this is replica "
                    f"{place.replica} of {place.num_replicas}, process {place.process} of {place.num_processes}: run "
                    "as many, or leave it out of stateful="
                )
            owner, value = f"{name} ({type(each).__name__})", load_packed(reader, base, parts[base])
            states.append(StateToGive(owner, "state", value, each.state_dict, each.load_state_dict))
        self.trial = StateTrial(states)


def _words(suffix: str) -> str:
    kind, _, rest = suffix.partition("-")
    return f"{kind} of {rest.rpartition('-')[2]}"
