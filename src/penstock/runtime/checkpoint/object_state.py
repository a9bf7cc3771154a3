"""Values that are no tensors, and the objects whose own code gives and takes them.

A value is stored as the bytes that `torch.save` makes of it, in a tensor of its own. It is read by `torch.load` with
`weights_only=True`, which executes no code.

Objects are the modules with extra state, the attributes of an optimizer, and whatever the caller saves that has
`state_dict`, such as a learning-rate schedule or a data loader. What is alike in all holders is stored once, and any
number of them may load it. Where holders differ each has its own, under the first of its names that only holders with
the same state have:

    state/scheduler#data                       alike in every process
    state/loader@replica-1-of-2#data           alike within each replica: as many replicas may load it
    state/rng@process-3-of-4#data              of one process: as many processes may
    extra/layers.3#data                        alike in every pipeline, replica and shard that holds the module
    extra/layers.3@1.0.0#data                  of one of them
    attribute/num_steps#data                   of an optimizer
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.runtime.errors import CheckpointError
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.tensors.digest import bytes_of, hash_of

DATA = "#data"
"""What the name of a stored value ends with."""
STATE, EXTRA, ATTRIBUTE = "state/", "extra/", "attribute/"
FIRST = "@0.0.0"
"""The holder of extra state that stands for one which a checkpoint does not know."""
_SAFE: list[Any] = [
    frozenset,
    np.ndarray,
    np.dtype,
    np.zeros(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDU"},
]
"""What `torch.load` may make beside its own: arrays and numbers of numpy."""


def pack(value: Any, what: str) -> Tensor:
    """A value as bytes.

    Raises `CheckpointError`, with `what` the value is, if `torch.load` would not take the bytes.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        unpack(packed)
    except Exception as error:  # pickle raises whatever an object's own code raises
        reason = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).partition("\n")[0]
        raise CheckpointError(
            f"{what} cannot be stored: {reason.partition(' by default')[0]}. It must be tensors, numbers, text, and "
            "dicts, lists, tuples or sets of them; turn the rest into these"
        ) from error
    return packed


def unpack(packed: Tensor, device: torch.device | None = None) -> Any:
    """The value that `pack` was given. Tensors that were not in host memory go to `device`."""

    def placed(storage: Any, location: str) -> Any:
        return storage if device is None or location == "cpu" else storage.to(device=device)

    with torch.serialization.safe_globals(_SAFE):
        return torch.load(io.BytesIO(bytes_of(packed)), map_location=placed, weights_only=True)


def digest_of(value: Any) -> str:
    """The same for equal values, in whatever order a set has its items."""
    return hashlib.sha256(_text_of(value).encode("utf-8", "surrogatepass")).hexdigest()


def _text_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {hash_of(value)}"
    if isinstance(value, Mapping):
        parts = [f"{_text_of(key)}: {_text_of(each)}" for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [_text_of(each) for each in value]
    elif isinstance(value, (set, frozenset)):
        parts = sorted(map(_text_of, value))
    else:
        parts = [repr(value)]
    return f"{type(value).__name__}({', '.join(parts)})"


class Stateful(Protocol):
    """What `ps.Pipeline.save` and `load` take by name, like a learning-rate scheduler."""

    def state_dict(self) -> Any:
        """Its state: tensors, numbers, text, and dicts, lists, tuples or sets of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes what `state_dict` gave."""


class StatefulObject(NamedTuple):
    """An object with state.

    Attributes:
        base: the prefix of its kind, and its name. suffixes: of names that it may have, the widest first.
        what: what errors call its state. get, put: its code. What `get` gives `put` takes.
    """

    base: str
    suffixes: tuple[str, ...]
    what: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]

    @property
    def narrowest(self) -> str:
        """The name of a state that no other holder has."""
        return self.base + self.suffixes[-1] + DATA

    def name_in(self, there: Container[str]) -> str | None:
        """Under which of its names the state is there; None for none."""
        suffixes = (*self.suffixes, FIRST) if self.base.startswith(EXTRA) else self.suffixes
        names = (self.base + suffix + DATA for suffix in suffixes)
        return next((name for name in names if name in there), None)


StoredState = tuple[str, tuple[str, ...], str]
"""What a process tells the others of an object's state: its base, its suffixes, and a digest."""


def suffixes_in(mesh: ProcessMesh) -> tuple[str, ...]:
    """The suffixes of objects that every process has."""
    peers = mesh.everyone
    num_processes = peers.num_ranks if len(peers.here) == 1 else 1
    replica = f"@replica-{mesh.replica}-of-{mesh.num_replicas}"
    return "", replica, f"@process-{peers.here[0]}-of-{num_processes}"


def module_with_extra_state(name: str, holder: str, module: nn.Module) -> StatefulObject:
    """A module of the model that has `get_extra_state`, in one pipeline, replica and shard."""
    what = f"extra state of {name or 'the model'} ({type(module).__name__})"
    return StatefulObject(EXTRA + name, ("", f"@{holder}"), what, module.get_extra_state, module.set_extra_state)


def objects_of_caller(stateful: Mapping[str, Stateful] | None, mesh: ProcessMesh) -> list[StatefulObject]:
    """The objects given to `save` or `load`. Raises CheckpointError for a name that can't be stored."""
    found = []
    for name, each in (stateful or {}).items():
        what = f"state of {name} ({type(each).__name__})"
        if {"@", "/", "#"} & set(name):
            raise CheckpointError(f"stateful= has the name {name!r}: give names without @, / and #")
        get, put = each.state_dict, each.load_state_dict
        found.append(StatefulObject(STATE + name, suffixes_in(mesh), what, get, put))
    return found


def states_of(objects: Iterable[StatefulObject]) -> tuple[dict[str, Tensor], list[StoredState]]:
    """By narrowest name each object's state as bytes, and what the other processes must know of it.

    Raises CheckpointError for state that can't be stored.
    """
    states, told = {}, []
    for each in objects:
        value = each.get()
        states[each.narrowest] = pack(value, f"the {each.what}")
        told.append((each.base, each.suffixes, digest_of(value)))
    return states, told


def to_write(states: Mapping[str, Tensor], told: Sequence[Sequence[StoredState]], me: int) -> dict[str, Tensor]:
    """What this process writes: of holders with the same state and the same name the first one writes.

    Args:
        states: as `states_of` gives them. told: of every process. me: which of them this one is.
    """
    holders: dict[str, list[tuple[int, tuple[str, ...], str]]] = defaultdict(list)
    for process, those in enumerate(told):
        for base, suffixes, digest in those:
            holders[base].append((process, suffixes, digest))
    tensors: dict[str, Tensor] = {}
    for base, held in holders.items():
        for level in range(len(held[0][1])):
            found = {(suffixes[level], digest) for _, suffixes, digest in held}
            if len(found) == len({suffix for suffix, _ in found}):
                break
        writers = {suffixes[level]: (process, suffixes[-1]) for process, suffixes, _ in reversed(held)}
        for suffix, (process, narrowest) in writers.items():
            if process == me:
                tensors[base + suffix + DATA] = states[base + narrowest + DATA]
    return tensors


def bases_in(names: Iterable[str], prefix: str) -> set[str]:
    """The objects of a kind that have states in a checkpoint, by name."""
    there = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return {name.removesuffix(DATA).partition("@")[0] for name in there}


class LoadedStates:
    """The states of objects, read and not yet given to the objects.

    Args:
        what: what has the tensors, in errors.

    Raises:
        CheckpointError: there is no state of an object, or only others' where each had its own.
    """

    def __init__(
        self, objects: Iterable[StatefulObject], tensors: Mapping[str, Tensor], what: str, device: torch.device
    ) -> None:
        self._states: list[tuple[StatefulObject, Any]] = []
        self._before: list[tuple[StatefulObject, Any]] = []
        for each in objects:
            name = each.name_in(tensors)
            if name is None:
                others = sorted(other.removesuffix(DATA) for other in tensors if other.startswith(f"{each.base}@"))
                here = " ".join(each.suffixes[1:]).replace("@", "")
                has = f", but that of {others[0].rpartition('@')[2]}, and here is {here}" if others else ""
                raise CheckpointError(
                    f"{what} has no {each.what}{has}: load what it was written with, on as many "
                    "processes if their states differ"
                )
            self._states.append((each, unpack(tensors[name], device)))

    def give(self) -> None:
        """Gives each object its state. Raises CheckpointError if one does not take it; see `take_back`."""
        for each, value in self._states:
            self._before.append((each, copy.deepcopy(each.get())))
            try:
                each.put(copy.deepcopy(value))
            except Exception as error:
                raise CheckpointError(f"the {each.what} was not taken: {type(error).__name__}: {error}") from error

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
