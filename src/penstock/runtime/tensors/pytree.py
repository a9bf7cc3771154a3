"""Taking what a stage returns apart into tensors and a skeleton, and putting it together again.

    (x, {"mask": m, "scale": 2})  ->  [x, m],  ["tuple", [0, ["dict", [["mask", 1], ["scale", ["const", 2]]]]]]

The skeleton is JSON, so that it can travel in a message header, and holds an index for each tensor. A named tuple is
one again where it comes in: of its own class if that can be found there, else of one with the same name and fields.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.dtensor import whole

Skeleton = Any
"""An int (index of a tensor) or a list ["tuple" | "tuple MODULE NAME FIELD ..." | "list" | "dict" | "const", ...]."""

_CONSTANTS = (bool, int, float, str, type(None))


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
    if isinstance(value, tuple):
        return [_kind_of(type(value)), [_flatten(v, leaves) for v in value]]
    if isinstance(value, list):
        return ["list", [_flatten(v, leaves) for v in value]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", [[key, _flatten(v, leaves)] for key, v in value.items()]]
    if isinstance(value, _CONSTANTS):
        return ["const", value]
    raise RuntimeFailure(
        f"a value of type {type(value).__name__} can't pass between stages; use tensors, tuples, lists, "
        f"dicts with string keys, numbers, strings or None"
    )


def unflatten(leaves: list[Tensor], skeleton: Skeleton) -> Any:
    """The value that `flatten` took apart, with `leaves` in place of its tensors."""
    if isinstance(skeleton, int):
        return leaves[skeleton]
    kind, inside = skeleton
    if kind == "const":
        return inside
    if kind == "dict":
        return {key: unflatten(leaves, v) for key, v in inside}
    items = [unflatten(leaves, v) for v in inside]
    if kind == "list":
        return items
    return tuple(items) if kind == "tuple" else _named_tuple(kind)._make(items)


def _kind_of(of: type[tuple[Any, ...]]) -> str:
    """ "tuple", or of a named tuple: "tuple MODULE NAME FIELD FIELD ..."."""
    fields = getattr(of, "_fields", None)
    if fields is None or not hasattr(of, "_make"):
        return "tuple"
    kind = f"tuple {' '.join((of.__module__, of.__qualname__, *fields))}"
    _NAMED_TUPLES[kind] = of
    return kind


def _named_tuple(kind: str) -> Any:
    """The class of a named tuple."""
    if kind not in _NAMED_TUPLES:
        make: Any = namedtuple
        _, module, name, *fields = kind.split(" ")
        found: Any = sys.modules.get(module)
        for each in name.split("."):
            found = getattr(found, each, None)
        if getattr(found, "_fields", None) != tuple(fields):
            found = make(name.rpartition(".")[2], fields)
        _NAMED_TUPLES[kind] = found
    return _NAMED_TUPLES[kind]


_NAMED_TUPLES: dict[str, Any] = {}
"""By its kind in a skeleton the class of a named tuple."""


DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
"""Names of tensor types, for message headers."""


def on_host(value: Any) -> Any:
    """The same value with its tensors detached and whole, in host memory. All who hold a shard of them call it."""
    leaves, skeleton = flatten(value)
    return unflatten([whole(leaf.detach()).cpu() for leaf in leaves], skeleton)
