"""How one layer's output becomes the next one's input."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["call_layer"]


def call_layer(layer: nn.Module, value: Any) -> Any:
    """Passes what one layer returned to the next: a tuple as arguments, anything else as one argument.

    A dict is one argument too, as it would be in a `nn.Sequential` whose layers take and return a dict.
    """
    return layer(*value) if isinstance(value, tuple) else layer(value)
