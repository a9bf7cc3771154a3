"""Finds what a user's optimizer keeps in attributes: other optimizers, and state that belongs to no parameter.

    class Both(Optimizer):
        self.muon = Muon(...)              an optimizer within it, at "muon"
        self.halves = [AdamW(...), ...]    the same, at "halves.0"
        self.num_steps = 3                 an attribute, which steps may change
        self.clock = Clock()               the same, by the attributes that it has itself

Optimizers of torch and of this package keep nothing that counts in attributes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

_OF_TORCH = {*vars(Optimizer([Parameter(torch.zeros(0))], {})), "step", "zero_grad", "grad_scale", "found_inf"}
"""Attributes that torch gives every optimizer, or that its schedulers and scalers add."""
_STATELESS = (type, FunctionType, MethodType, BuiltinFunctionType, partial, ModuleType, Enum, logging.Logger)


def optimizers_in(holder: Any) -> dict[str, Optimizer]:
    """Returns by path the optimizers within an object, each once. The object itself comes first, at ""."""
    found: dict[str, Optimizer] = {}
    seen: set[int] = set()

    def visit(path: str, value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found[path] = value
        for name, each in _inside(value):
            visit(f"{path}.{name}" if path else str(name), each)

    visit("", holder)
    return found


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns by name the attributes of an optimizer that may be state: neither torch's own nor other optimizers.

    An object of the user's is given as the dict of its attributes.
    """
    found: dict[str, Any] = {}
    for name, value in _inside(optimizer):
        if isinstance(value, dict) or _is_object(value):
            left_out = _left_out(value)
            is_same = isinstance(value, dict) and not left_out
            found[name] = value if is_same else {key: one for key, one in _inside(value) if key not in left_out}
        elif not optimizers_in(value):
            found[name] = value
    return found


def plain_attributes(optimizer: Optimizer | None) -> dict[str, str]:
    """Returns by path the text of each attribute without tensors, to tell later whether the attribute changed."""
    return {
        mark_of(path) + name: repr(value)
        for path, one in optimizers_in(optimizer).items()
        for name, value in attributes_of(one).items()
        if isinstance(value, int | float | str | tuple | list | dict) and next(tensors_in(value), None) is None
    }


def mark_of(path: str) -> str:
    """The prefix of names of state, for an optimizer at a path within another one."""
    return f"{path}:" if path else ""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in data and modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping):
        for each in (*value.keys(), *value.values()):
            yield from tensors_in(each)
    elif isinstance(value, Set | list | tuple | deque):
        for each in value:
            yield from tensors_in(each)


def set_attribute(optimizer: Optimizer, name: str, value: Any) -> None:
    """Sets an attribute to a value, which is data. Tensors and collections stay the same objects, as others may hold
    them as well.
    """
    known = vars(optimizer).get(name)
    known = vars(known) if _is_object(known) else known
    if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape == value.shape:
        known.detach().copy_(value)
    elif isinstance(known, dict) and isinstance(value, dict):
        for key in known.keys() - _left_out(known):
            del known[key]
        known.update(value)
    elif isinstance(known, list) and isinstance(value, list):
        known[:] = value
    else:
        vars(optimizer)[name] = value


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns names and values of the attributes or items of an optimizer, a user's object or a collection."""
    if isinstance(value, Optimizer):
        is_known = type(value).__module__.startswith(("torch.", "penstock."))
        named = {} if is_known else {name: each for name, each in vars(value).items() if name not in _OF_TORCH}
        return [item for item in named.items() if not isinstance(item[1], _STATELESS)]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(vars(value).items()) if _is_object(value) else ()


def _left_out(value: Any) -> set[Any]:
    """The keys of a dict or an object under which functions lie, or optimizers, which are stored by themselves."""
    return {key for key, each in _inside(value) if isinstance(each, _STATELESS) or optimizers_in(each)}


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a user's class that keeps its state in attributes."""
    if isinstance(value, (*_STATELESS, Optimizer, nn.Module, Tensor, dict)) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith(("torch.", "builtins", "numpy", "collections"))
