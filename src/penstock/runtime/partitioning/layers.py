"""Which modules of a model are its layers, which are called as they are, and which are opened to find layers.

    UNet                       opened
      stem                     layer
      down                     ModuleList: its entries are blocks
        0, 1, 2                layers
      up  ...

Blocks are the entries of a `ModuleList`, `ModuleDict` or `Sequential` that has several of one class. A module that
holds blocks is opened. A block itself is opened only if it is large and holds blocks again. This depends on the model
alone, not on the number of stages. So random draws, which are seeded by layer, are the same for any number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import accumulate

import torch
from torch import nn

from penstock.runtime.partitioning.tracer import Untraceable
from penstock.runtime.split_backward import is_compiled

LARGE = 1 / 8
"""The share of the model's parameters from which on a module is worth opening."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module keeps its hooks."""


def opened_modules(model: nn.Module, names: Collection[str] = ()) -> list[nn.Module]:
    """Returns the modules whose forwards are traced, the model first.

    Args:
        names: the names of modules at which a stage begins. The modules that these lie in are opened.

    Raises:
        Untraceable: tracing would lose something around the model's forward, such as a hook.
    """
    why = why_closed(model)
    if why:
        raise Untraceable(f"the {type(model).__name__} {why}, and what is called as a whole cannot be cut", None)
    total = max(1, _size(model))
    found = dict.fromkeys([model, *_within(model, total)])
    for name in names:
        for path in accumulate(name.split(".")[:-1], "{}.{}".format):
            module = model.get_submodule(path)
            if not is_list(module) and not why_closed(module):
                found[module] = None
    return list(found)


def why_closed(module: nn.Module) -> str:
    """Says why a module's forward cannot be traced; empty if it can."""
    for kind in _HOOKS:
        if getattr(module, kind):
            return f"has a hook ({kind.strip('_').replace('_', ' ')})"
    if "parametrizations" in module._modules:
        return "has parametrizations"
    if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.compile or TorchScript as one piece (compile its layers instead)"
    if type(module).__call__ is not nn.Module.__call__:
        return "has a __call__ of its own"
    return ""


def is_list(module: nn.Module) -> bool:
    """Returns whether a module has layers and no forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _within(module: nn.Module, total: int) -> Iterator[nn.Module]:
    for child, is_block in _children(module):
        if why_closed(child) or (type(child).__module__.startswith("torch.") and type(child) is not nn.Sequential):
            continue
        large, holds = _size(child) > LARGE * total, any(map(_repeats, child.modules()))
        if (large and holds) if is_block else (large or holds):
            yield child
            yield from _within(child, total)


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yields the modules that a module calls, and whether each is a block. Lists stand for their entries."""
    repeated = _repeats(module)
    for child in module.children():
        if is_list(child):
            yield from _children(child)
        else:
            yield child, repeated and type(child) is not nn.Sequential


def _repeats(module: nn.Module) -> bool:
    """Returns whether a list has several entries of one class that is not torch's own."""
    if not (is_list(module) or isinstance(module, nn.Sequential)):
        return False
    kinds = Counter(type(child) for child in module._modules.values())
    return any(num > 1 and not kind.__module__.startswith("torch.nn") for kind, num in kinds.items())


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
