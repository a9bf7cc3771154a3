"""What modules keep in attributes of their own, besides parameters, buffers and layers: numbers, tensors, lists.

Nobody says what a forward does with these. So they can be described, to tell whether it has changed them, and the
tensors among them found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.dtensor import is_sharded
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
