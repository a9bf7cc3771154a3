"""What modules keep in attributes of their own, besides parameters, buffers and layers: numbers, tensors, lists.

Nobody says what a forward does with these. So they can be described, to tell whether it has changed them, and the
tensors among them found; and modules be put back to how they were.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded, memory, overwrite
from penstock.runtime.tensors.pytree import flatten

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""What torch keeps in each: parameters, buffers, layers and hooks, which others look after, and the mode."""
DEPTH = 3
"""Levels of containers in an attribute that are searched."""

Description = Any
"""Numbers and text as they are; tensors and containers by what they hold. None for anything else."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, by name; of a stage, which has none but ours, nothing."""
    if isinstance(module, Stage):
        return {}
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def tensors_in(value: Any, depth: int = DEPTH) -> list[Tensor]:
    """A tensor, or the tensors in containers up to so many levels deep."""
    if isinstance(value, Tensor):
        return [value]
    if not depth or not isinstance(value, (Mapping, list, tuple, set, deque)):
        return []
    if isinstance(value, Mapping):
        value = value.values()
    return [tensor for each in value for tensor in tensors_in(each, depth - 1)]


def described(value: Any, depth: int = DEPTH) -> Description:
    """What a value holds; descriptions of values that are alike are `alike`."""
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else (tuple(value.shape), *measured(value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.shape, value.tobytes()
    if isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if not depth or not isinstance(value, (Mapping, list, tuple, set, deque)):
        return None
    if isinstance(value, set):
        return len(value)
    held = value.values() if isinstance(value, Mapping) else value
    return len(value), *(described(each, depth - 1) for each in held)


def alike(one: Description, other: Description) -> bool:
    """Whether descriptions are of the same values, but for the rounding of tensors' elements."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other or abs(one - other) <= _ROUNDING * max(abs(one), abs(other))
    return bool(one == other)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's elements are numbers that torch can sum."""
    strided = tensor.layout is torch.strided and not is_sharded(tensor) and not tensor.is_meta
    return strided and not tensor.is_quantized and tensor.dtype.itemsize <= 16


def measured(result: Any) -> tuple[float, float]:
    """The size of all numbers in a tensor, or in what a forward returned, and their sum, weighed by their places."""
    size = weighed = 0.0
    for leaf in flatten(result)[0]:
        if not is_plain(leaf) or not leaf.numel():
            continue
        weights = 1 + torch.arange(min(2 * leaf.numel(), _PIECE), device=leaf.device) % 7
        for piece in _numbers_of(leaf).reshape(-1).split(_PIECE):  # so that little memory is needed
            values = piece.double()
            values = torch.where(values.isfinite(), values, 0.0)
            sums = torch.stack([values.abs().sum(), (values * weights[: values.numel()]).sum()]).tolist()
            size, weighed = size + sums[0], weighed + sums[1]
    return size, weighed


_ROUNDING = 1e-5
_PIECE = 7 << 17
"""Numbers that are summed at a time: a multiple of the weights' period."""


def _numbers_of(tensor: Tensor) -> Tensor:
    """The tensor, or the real and imaginary parts of a complex one."""
    plain = tensor.detach()
    return torch.view_as_real(plain.resolve_conj().resolve_neg()) if plain.is_complex() else plain


Snapshot = dict[str, tuple[Any, Any]]
"""Of a module, by name, and what its lists, dicts and sets hold."""


def snapshot_of(module: nn.Module) -> Snapshot:
    """As it is now."""
    return {name: (value, _contents(value)) for name, value in vars(module).items()}


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set) else None


def put_back(before: dict[nn.Module, Snapshot]) -> tuple[nn.Module, str] | None:
    """Sets back all that modules hold now and did not then; returns the first change."""
    first: tuple[nn.Module, str] | None = None
    for module, state in before.items():
        own = module.__dict__
        for name in [name for name in own if name not in state]:
            first = first or (module, name)
            del own[name]
        for name, (value, contents) in state.items():
            if own.get(name) is not value:
                first = first or (module, name)
                own[name] = value
            now = _contents(value)
            if contents is not None and not _same(now, contents):
                if name in _REGISTERED:  # a buffer, as its module's code names it
                    changed = (key for key in {**contents, **now} if now.get(key) is not contents.get(key))
                    first = first or (module, next(changed, name))
                first = first or (module, name)
                value.clear()
                value.extend(contents) if isinstance(value, list) else value.update(contents)
    return first


_REGISTERED = ("_buffers", "_parameters", "_modules")
"""Where torch keeps what a module's code reads as attributes."""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and attributes that change inside are set back, as far as into lists and dicts."""
    modules = [module for module in model.modules() if not isinstance(module, LazyModuleMixin)]  # that become others
    before = {module: snapshot_of(module) for module in modules}
    buffers = {id(buffer): (buffer, buffer.detach().clone()) for buffer in model.buffers()}
    others = {
        id(tensor): (tensor, tensor.detach().clone(), hash_of(tensor))
        for module in modules
        for value in attributes_of(module).values()
        for tensor in tensors_in(value)
        if is_plain(tensor) and not isinstance(tensor, nn.Parameter) and id(tensor) not in buffers
    }
    try:
        yield
    finally:
        put_back(before)
        for buffer, value in buffers.values():
            overwrite(memory(buffer), value)  # which counts as no change in place
        for tensor, value, known in others.values():
            if hash_of(tensor) != known:  # memory may be of a file that is read alone
                overwrite(memory(tensor), value)
