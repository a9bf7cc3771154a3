"""Layers that reach for one another without being called with it: by a reference in a list, a closure, a global.

Such a layer sees, in another process, a parameter or a buffer that nobody changes there. What it reaches is found
before anything runs, by following what its modules hold besides their own layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

_OWN = ("_modules", "_parameters", "_buffers")
_MOST = 20_000
"""Objects that are looked at in one module."""


class Reached(NamedTuple):
    """What a module reaches: a module or tensor of the model, by which attribute."""

    module: nn.Module
    attribute: str
    what: nn.Module | Tensor


def reached(
    layer: nn.Module, model_modules: Mapping[nn.Module, str], tensors: Mapping[int, str]
) -> Iterator[Reached]:
    """Modules and tensors of the model that a layer reaches and that are not its own.

    Args:
        model_modules: those of the model. tensors: its parameters and buffers, by id.
    """
    inside = set(layer.modules())
    own = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    for module in inside:
        for name, value in (*vars(module).items(), *_of_forward(module)):
            if name in _OWN:
                continue
            for what in _followed(value):
                if isinstance(what, nn.Module):
                    if what in model_modules and what not in inside:
                        yield Reached(module, name, what)
                elif id(what) in tensors and id(what) not in own:
                    yield Reached(module, name, what)


def _of_forward(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a forward reads that is no attribute: globals and variables of the function around it."""
    forward = getattr(type(module).forward, "__func__", type(module).forward)
    if type(module).__module__.startswith("torch.") or not isinstance(forward, FunctionType):
        return
    for name in forward.__code__.co_names:
        if isinstance(forward.__globals__.get(name), nn.Module | Tensor | list | dict | tuple):
            yield name, forward.__globals__[name]
    for name, cell in zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=False):
        try:
            if name != "__class__":
                yield name, cell.cell_contents
        except ValueError:
            continue


def _followed(value: Any) -> Iterator[nn.Module | Tensor]:
    """The modules and tensors that are reached through plain containers, functions and objects."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, str | bytes | int | float | bool | type | type(None)):
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module | Tensor):
            yield each
        elif isinstance(each, list | tuple | set | frozenset):
            waiting.extend(each)
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, MethodType):
            waiting.extend((each.__self__, each.__func__))
        elif isinstance(each, partial):
            waiting.extend((each.func, *each.args, *each.keywords.values()))
        elif isinstance(each, FunctionType):
            for cell in each.__closure__ or ():
                try:
                    waiting.append(cell.cell_contents)
                except ValueError:
                    continue
            waiting.extend(each.__defaults__ or ())
        elif not type(each).__module__.startswith(("torch.", "builtins", "numpy")):
            waiting.extend(getattr(each, "__dict__", {}).values())
