"""What modules keep in attributes of their own, besides parameters, buffers and layers: numbers, tensors, lists.

Nobody says what a forward does with these. So modules can be put back to how they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import memory, overwrite

DEPTH = 4
"""Levels of containers in a module that are searched for tensors: the first are its own dicts, such as of buffers."""

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
"""The dicts in which torch keeps parameters, buffers and layers, which a module's code reads as attributes."""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


@contextmanager
def untouched(*models: nn.Module | None) -> Iterator[None]:
    """Buffers and attributes that change inside are set back, also within lists and dicts."""
    start = StepStart(models, ())
    try:
        yield
    finally:
        start.put_back()


@contextmanager
def having(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, some attributes have other values; afterwards those that they had.

    Args:
        changes: (object, name of its attribute, value).
    """
    changes = list(changes)
    before = [(one, name, getattr(one, name)) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            setattr(one, name, value)
        yield
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def _copies_of(modules: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """The tensors that modules hold besides parameters, each once, and a copy of each."""
    found = {id(tensor): tensor for module in modules for tensor in _tensors_in(vars(module))}
    return [
        (tensor, tensor.detach().clone())
        for tensor in found.values()
        if not isinstance(tensor, nn.Parameter) and not tensor.is_meta and not tensor.is_quantized
    ]


def _tensors_in(value: Any, depth: int = DEPTH) -> list[Tensor]:
    """A tensor, or the tensors in containers up to so many levels deep."""
    if isinstance(value, Tensor):
        return [value]
    if not depth or not isinstance(value, (Mapping, list, tuple, set, deque)):
        return []
    if isinstance(value, Mapping):
        value = value.values()
    return [tensor for each in value for tensor in _tensors_in(each, depth - 1)]


class StepStart:
    """Copies of the state that a step changes before its end. A step that lost a link is repeated from these copies.

    Parameters and the optimizer change only after all processes have the whole step. A step puts back torch's
    generators itself, and computes with copies of the batch (`StepSettings.keeps_batch`). So only buffers, attributes
    of modules, and gradients of earlier steps are copied here.
    """

    def __init__(self, roots: Iterable[nn.Module | None], parameters: Iterable[nn.Parameter]) -> None:
        every = (module for root in roots if root is not None for module in root.modules())
        # A lazy module becomes a module of another class, which nothing can set back.
        modules = dict.fromkeys(module for module in every if not isinstance(module, LazyModuleMixin))
        self._modules = {module: snapshot_of(module) for module in modules}
        self._tensors = _copies_of(modules)
        self._gradients = [(one, None if one.grad is None else one.grad.detach().clone()) for one in parameters]

    def put_back(self) -> None:
        put_back(self._modules)
        for tensor, value in self._tensors:
            if hash_of(tensor) != hash_of(value):  # memory may be of a file that is read alone
                overwrite(memory(tensor), value)  # which counts as no change in place
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
