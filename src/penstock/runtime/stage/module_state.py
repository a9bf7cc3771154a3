"""What modules keep in attributes of their own, besides parameters, buffers and layers: numbers, tensors, lists.

Nobody says what a forward does with these. So modules can be put back to how they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded, memory, overwrite

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""What torch keeps in each: parameters, buffers, layers and hooks, which others look after, and the mode."""
DEPTH = 3
"""Levels of containers in an attribute that are searched."""


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


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's elements are numbers that torch can sum."""
    strided = tensor.layout is torch.strided and not is_sharded(tensor) and not tensor.is_meta
    return strided and not tensor.is_quantized and tensor.dtype.itemsize <= 16


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
