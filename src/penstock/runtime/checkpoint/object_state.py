"""State that an object's own code gives and takes: the extra state of modules, and the caller's objects.

A learning-rate schedule, a data loader, whatever has `state_dict`, is the caller's. What is alike in all holders is
stored once, and any number of them may load it. Where holders differ each has its own, under the first of its names
that only holders with the same state have:

    state/scheduler#json                       alike in every process
    state/loader@replica-1-of-2#json           alike within each replica: as many replicas may load it
    state/rng@process-3-of-4#json              of one process: as many processes may
    extra/layers.3#json                        alike in every pipeline, replica and shard that holds the module
    extra/layers.3@1.0.0#json                  of one of them
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.runtime.checkpoint.codec import AS_JSON, digests_of, names_by_base, pack, unpack
from penstock.runtime.checkpoint.reader import TensorSource
from penstock.runtime.errors import CheckpointError
from penstock.runtime.mesh.process_mesh import ProcessMesh

STATE = "state/"
EXTRA = "extra/"
FIRST = "@0.0.0"
"""The holder of extra state that stands for one which a checkpoint does not know."""


class Stateful(Protocol):
    """What `ps.Pipeline.save` and `load` take by name, like a learning-rate scheduler."""

    def state_dict(self) -> Any:
        """Its state: tensors, numbers, text, and dicts, lists, tuples or sets of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes what `state_dict` gave."""


class StatefulObject(NamedTuple):
    """An object with state.

    Attributes:
        base: `extra/` or `state/` and its name. suffixes: of names that it may have, the widest first.
        label: what errors call it. get, put: its code. What `get` gives `put` takes.
    """

    base: str
    suffixes: tuple[str, ...]
    label: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return self.base.partition("/")[2]


class StoredState(NamedTuple):
    """What a process tells the others of an object's state."""

    base: str
    suffixes: tuple[str, ...]
    digest: str


def module_with_extra_state(name: str, holder: str, module: nn.Module) -> StatefulObject:
    """A module of the model that has `get_extra_state`, in one pipeline, replica and shard."""
    label = f"{name} ({type(module).__name__})"
    return StatefulObject(EXTRA + name, ("", f"@{holder}"), label, module.get_extra_state, module.set_extra_state)


def objects_of_caller(stateful: Mapping[str, Stateful] | None, mesh: ProcessMesh) -> list[StatefulObject]:
    """The objects given to `save` or `load`. Raises CheckpointError for one without the two functions."""
    peers = mesh.everyone
    suffixes = (
        "",
        f"@replica-{mesh.replica}-of-{mesh.num_replicas}",
        f"@process-{peers.here[0]}-of-{peers.num_ranks if len(peers.here) == 1 else 1}",
    )
    found = []
    for name, each in (stateful or {}).items():
        label = f"{name} ({type(each).__name__})"
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")) or {"@", "/", "#"} & set(name):
            raise CheckpointError(
                f"stateful= has {label}: give objects with state_dict and load_state_dict, under names without @, / "
                "and #"
            )
        found.append(StatefulObject(STATE + name, suffixes, label, each.state_dict, each.load_state_dict))
    return found


def packed(objects: Iterable[StatefulObject]) -> dict[str, dict[str, Tensor]]:
    """By base and narrowest suffix each object's state as tensors.

    Raises CheckpointError for state that can't be stored.
    """
    found = {}
    for each in objects:
        what = "the extra state" if each.base.startswith(EXTRA) else "the state"
        base = each.base + each.suffixes[-1]
        found[base] = pack(base, each.get(), f"{what} of {each.name or 'the model'}")
    return found


def stored(objects: Iterable[StatefulObject], states: Mapping[str, Mapping[str, Tensor]]) -> list[StoredState]:
    """What the other processes must know of the objects here."""
    digests = digests_of(states)
    return [StoredState(each.base, each.suffixes, digests[each.base + each.suffixes[-1]]) for each in objects]


def to_write(
    states: Mapping[str, Mapping[str, Tensor]], told: Sequence[Sequence[StoredState]], me: int
) -> dict[str, Tensor]:
    """What this process writes: of holders with the same state and the same name the first one writes.

    Args:
        states: as `packed` gives them. told: of every process. me: which of them this one is.

    Raises:
        CheckpointError: processes gave the caller's objects by other names. The same in every process.
    """
    names = [sorted(each.base for each in those if each.base.startswith(STATE)) for those in told]
    for process, given in enumerate(names):
        if given != names[0]:
            mine, first = (
                ", ".join(n.removeprefix(STATE) for n in those) or "nothing" for those in (given, names[0])
            )
            raise CheckpointError(
                f"process {process} saves the state of {mine} and process 0 that of {first}: every process must give "
                "the same names to stateful="
            )
    holders: dict[str, list[tuple[int, StoredState]]] = defaultdict(list)
    for process, those in enumerate(told):
        for each in those:
            holders[each.base].append((process, each))
    tensors: dict[str, Tensor] = {}
    for base, those_of_base in holders.items():
        for level in range(len(those_of_base[0][1].suffixes)):
            digests: dict[str, set[str]] = defaultdict(set)
            for _, each in those_of_base:
                digests[each.suffixes[level]].add(each.digest)
            if all(len(alike) == 1 for alike in digests.values()):
                break
        writers: dict[str, tuple[int, StoredState]] = {}
        for process, each in those_of_base:
            writers.setdefault(each.suffixes[level], (process, each))
        for suffix, (process, each) in writers.items():
            if process == me:
                own = base + each.suffixes[-1]
                tensors |= {base + suffix + name.removeprefix(own): t for name, t in states[own].items()}
    return tensors


def base_of(each: StatefulObject, there: Iterable[str]) -> str | None:
    """Under which of its names the state of an object is there; None for none."""
    suffixes = (*each.suffixes, FIRST) if each.base.startswith(EXTRA) else each.suffixes
    return next((each.base + suffix for suffix in suffixes if each.base + suffix + AS_JSON in there), None)


class LoadedStates:
    """The states of objects as a source has them: read, and not yet given to the objects.

    Raises:
        CheckpointError: there is no state of an object, or only others' where each had its own.
    """

    def __init__(
        self, objects: Iterable[StatefulObject], source: TensorSource, device: torch.device | None = None
    ) -> None:
        self._states: list[tuple[StatefulObject, Any]] = []
        self._before: list[tuple[StatefulObject, Any]] = []
        names = set(source.names())
        parts = names_by_base(sorted(names), STATE) | names_by_base(sorted(names), EXTRA)
        for each in objects:
            base = base_of(each, names)
            if base is None:
                raise CheckpointError(f"checkpoint {source.path} has {_what_there_is(each, parts)}")
            self._states.append((each, unpack(base, source.load(parts[base]), device)))

    def give(self) -> None:
        """Gives each object its state. Raises CheckpointError if one does not take it; see `take_back`."""
        for each, value in self._states:
            self._before.append((each, copy.deepcopy(each.get())))
            try:
                each.put(copy.deepcopy(value))
            except Exception as error:
                what = "extra state" if each.base.startswith(EXTRA) else "state"
                raise CheckpointError(
                    f"{each.label} does not take its {what}: {type(error).__name__}: {error}"
                ) from error

    def take_back(self) -> None:
        """Gives the objects what they had before `give`, as far as they take it."""
        while self._before:
            each, value = self._before.pop()
            with contextlib.suppress(Exception):
                each.put(value)

    def give_again(self) -> None:
        """Once all else is in place, as torch gives modules their extra state."""
        for each, value in self._states:
            if each.base.startswith(EXTRA):
                each.put(value)


def _what_there_is(each: StatefulObject, parts: Mapping[str, Any]) -> str:
    """Why the state of an object is not there, and what to do, as the end of a sentence."""
    if each.base.startswith(EXTRA):
        return (
            f"no extra state of {each.name or 'the model'}, which its module has here: build the model it was "
            "written with, or choose another checkpoint"
        )
    others = [base for base in parts if base.startswith(f"{each.base}@")]
    if others:
        kind, _, rest = others[0].rpartition("@")[2].partition("-")
        here = ", ".join(suffix[1:].replace("-", " ") for suffix in each.suffixes[1:])
        return (
            f"a state of {each.name} for each {kind} of {rest.rpartition('-')[2]}, and this is {here}: run as many, "
            "or leave it out of stateful="
        )
    there = sorted({base.removeprefix(STATE).partition("@")[0] for base in parts if base.startswith(STATE)})
    held = f"it has that of {', '.join(there)}" if there else "it has no state of the caller's"
    return f"no state of {each.name}, {held}: leave it out of stateful=, or save it"
