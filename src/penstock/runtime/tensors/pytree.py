"""Taking what a stage returns apart into tensors and a skeleton, and putting it together again.

    (x, {"mask": m, "scale": 2})  ->  [x, m],  ["tuple", [0, ["dict", [["mask", 1], ["scale", ["const", 2]]]]]]

The skeleton is JSON, so that it can travel in a message header, and holds an index for each tensor. A named tuple is
one again where it comes in: of its own class if that can be found there, else of one with the same name and fields. A
dataclass is one of its own class again. So is a dict of a class of its own, such as the `ModelOutput` that models of
transformers return, or a plain dict where the class can't be found.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import BrokenContract
from penstock.runtime.tensors.block_mask import HeldMask, is_block_mask
from penstock.runtime.tensors.dtensor import whole

Skeleton = Any
"""An int (index of a tensor) or [kind, ...]: "tuple", "list", "dict", "const", "mask" or what `kind_of` gives."""

_CONSTANTS = (bool, int, float, str, type(None))
"""Of these classes alone: what comes of an Enum or a numpy number in another process is none any more."""


def flatten(value: Any) -> tuple[list[Tensor], Skeleton]:
    """The tensors in `value`, in order, each once, and its skeleton.

    Raises RuntimeFailure for a type that can't travel between stages.
    """
    if isinstance(value, Tensor):
        return [value], 0
    leaves: list[Tensor] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Tensor]) -> Skeleton:
    if isinstance(value, Tensor):
        for place, leaf in enumerate(leaves):
            if leaf is value:
                return place
        leaves.append(value)
        return len(leaves) - 1
    kind = type(value)
    if isinstance(value, tuple):
        return [kind_of(type(value)), [_flatten(v, leaves) for v in value]]
    if isinstance(value, list):
        return ["list", [_flatten(v, leaves) for v in value]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return form_of_dict(kind, [[key, _flatten(v, leaves)] for key, v in value.items()])
    if kind in _CONSTANTS:
        return ["const", value]
    if is_block_mask(value):
        return ["mask", HeldMask(value)]
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value)]
        return [_named("dataclass", kind, names), [_flatten(getattr(value, name), leaves) for name in names]]
    how = "; torch.as_tensor makes a tensor of it" if kind.__module__ == "numpy" else ""
    raise BrokenContract(
        f"a value of type {kind.__name__} can't be cut or pass between stages; use tensors, tuples, lists, dicts "
        f"with string keys, dataclasses, numbers, strings or None{how}",
        6,
    )


def unflatten(leaves: list[Tensor], skeleton: Skeleton) -> Any:
    """The value that `flatten` took apart, with `leaves` in place of its tensors."""
    if isinstance(skeleton, int):
        return leaves[skeleton]
    kind, inside = skeleton
    if kind == "const":
        return inside
    if kind == "mask":
        return inside.on(leaves[0].device if leaves else None)
    if kind == "dict":
        return {key: unflatten(leaves, v) for key, v in inside}
    items = [unflatten(leaves, v) for v in inside]
    if kind == "list":
        return items
    return tuple(items) if kind == "tuple" else _made(kind, items)


def num_leaves(skeleton: Skeleton) -> int:
    """How many tensors a value of this form has."""
    return max((part + 1 for part in parts_of(skeleton) if isinstance(part, int)), default=0)


def require_no_mask(skeleton: Skeleton, stage: int) -> None:
    """Raises BrokenContract for a BlockMask in what a stage passes on: its function can't travel."""
    if "mask" in parts_of(skeleton):
        raise BrokenContract(
            f"stage {stage} returned a BlockMask, whose mask_mod is a function and can't pass between stages; return "
            "the tensors that it is made of, such as document numbers, and call create_block_mask in the next stage",
            6,
        )


def parts_of(skeleton: Skeleton) -> Iterator[int | str]:
    """The numbers of the tensors in a form, and the kinds of all else."""
    if isinstance(skeleton, int):
        yield skeleton
        return
    kind, inside = skeleton
    yield kind
    for each in () if kind in ("const", "mask") else inside:
        yield from parts_of(each[1] if kind == "dict" else each)


def shifted(skeleton: Skeleton, by: int) -> Skeleton:
    """The same form with other numbers of its tensors, for one that stands behind `by` others."""
    if isinstance(skeleton, int):
        return skeleton + by
    kind, inside = skeleton
    if kind in ("const", "mask"):
        return skeleton
    if kind == "dict":
        return [kind, [[key, shifted(each, by)] for key, each in inside]]
    return [kind, [shifted(each, by) for each in inside]]


def shown(value: Any) -> str:
    """For an error: the types and shapes of the tensors in a value, as float32 [2, 8]."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    return repr(value) if type(value) in _CONSTANTS else type(value).__name__


def device_of(value: Any) -> torch.device:
    """The device of the first tensor in a value; the CPU where there is none."""
    leaves, _ = flatten(value)
    return leaves[0].device if leaves else torch.device("cpu")


def kind_of(of: type[Any]) -> str:
    """ "list", "tuple", or of a named tuple also its module, name and fields. Any of them may have a space."""
    names = getattr(of, "_fields", None)
    if names is None or not hasattr(of, "_make"):
        return "list" if issubclass(of, list) else "tuple"
    return _named("tuple", of, names)


def form_of_dict(of: type[Any], items: list[Any]) -> Skeleton:
    """The form of a dict, with pairs of a key and a form; of one of another class, that of a plain dict within."""
    return ["dict", items] if of is dict else [_named("dict", of), [["dict", items]]]


def _named(what: str, of: type[Any], fields: Sequence[str] = ()) -> str:
    """The kind of values of a class, which this process knows from now on."""
    kind = "\0".join((what, of.__module__, of.__qualname__, *fields))
    _CLASSES[kind] = of
    return kind


def _made(kind: str, items: list[Any]) -> Any:
    """A named tuple, a dataclass with these fields, or a dict of its own class, whatever its `__init__` takes."""
    what, module, name, *names = kind.split("\0")
    of = _CLASSES.get(kind) or _class_at(module, name)
    if what == "tuple":
        if getattr(of, "_fields", None) != tuple(names):
            make: Any = namedtuple
            of = make(name.rpartition(".")[2], names)
        return _CLASSES.setdefault(kind, of)._make(items)
    if what == "dict":
        own = of.__new__(of) if isinstance(of, type) and issubclass(of, dict) else {}
        for key, item in items[0].items():
            own[key] = item
        return own
    if not is_dataclass(of):
        raise BrokenContract(
            f"a stage returned a dataclass {name} of module {module}, which this process does not have; define it in "
            "a module that every process imports",
            6,
        )
    made = object.__new__(_CLASSES.setdefault(kind, of))
    for field, item in zip(names, items, strict=True):
        object.__setattr__(made, field, item)
    return made


def _class_at(module: str, name: str) -> Any:
    """A class by its module, if that is loaded, and its name there."""
    found: Any = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, each, None)
    return found


_CLASSES: dict[str, Any] = {}
"""By its kind in a skeleton the class of a named tuple, a dataclass or a dict."""


DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
"""Names of tensor types, for message headers."""


def on_host(value: Any) -> Any:
    """The same value with its tensors detached and whole, in host memory. All who hold a shard of them call it."""
    leaves, skeleton = flatten(value)
    return unflatten([whole(leaf.detach()).cpu() for leaf in leaves], skeleton)
