"""A stage: consecutive layers of the model, run one after another, each from its own random seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.runtime.rng import mix, seed_generators


class Stage(nn.Module):
    """Layers under their names in the whole model, so `named_parameters()` gives the plain names.

    A layer that returns a tuple passes it on as positional arguments, one that returns a dict as keyword
    arguments, anything else as the one argument.

    Args:
        layers: name in the whole model ("layers.3", or "3" for a sequential's fourth) -> the layer.
        indices: each layer's number in the whole model: what its random seed is made of.
    """

    def __init__(self, layers: Mapping[str, nn.Module], indices: Sequence[int]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self._place(name, layer)
        self._layers = tuple(layers.values())
        self._indices = tuple(indices)

    def _place(self, name: str, layer: nn.Module) -> None:
        """Registers a layer so that its dotted name is its path."""
        *folders, last = name.split(".")
        parent: nn.Module = self
        for folder in folders:
            if folder not in parent._modules:
                parent.add_module(folder, nn.Module())
            parent = parent.get_submodule(folder)
        parent.add_module(last, layer)

    def forward(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Runs the layers; `seed` (of this step and microbatch) makes their random draws repeatable."""
        value: Any = None
        for place, (index, layer) in enumerate(zip(self._indices, self._layers, strict=True)):
            if seed is not None:
                seed_generators(mix(seed, index), _device_of(args, kwargs))
            value = layer(*args, **kwargs)
            if place + 1 < len(self._layers):
                args, kwargs = as_arguments(value)
        return value


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a value returned by one layer is passed to the next."""
    if isinstance(value, tuple):
        return value, {}
    if isinstance(value, dict):
        return (), value
    return (value,), {}


StageSource = nn.Module | Callable[[], nn.Module]
"""A stage, or a function that builds it where it is needed."""
