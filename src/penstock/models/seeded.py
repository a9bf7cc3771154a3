"""Layers whose weights follow from the seed and their name and from nothing else.

A rank builds only its own layers, and any cut over any number of ranks holds the same numbers, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["built", "generator_of", "require_sizes"]


def generator_of(seed: int, name: str | int) -> torch.Generator:
    """The generator that draws the weights of the layer called `name`."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def built(
    make: Callable[[], nn.Module], generator: torch.Generator, std: float, residual: float | None = None
) -> nn.Module:
    """A layer on the CPU in float32: norms of 1, biases of 0, every other weight normal.

    Args:
        std: of the normal weights.
        residual: of those that add to the residual stream, the last of attention and of the MLP; `std` if None.

    Draws nothing from torch's global generators.
    """
    # Built without storage first: torch's own initialisation would draw from the global generator.
    with torch.device("meta"):
        layer = make()
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                adds = residual is not None and name in ("attention.out.weight", "mlp.down.weight")
                parameter.normal_(0.0, residual if adds and residual is not None else std, generator=generator)
    return layer


def require_sizes(what: str, sizes: dict[str, int], width: int, num_heads: int, dropout: float) -> None:
    """Raises ValueError, naming the size, where one is below 1 or they do not go together."""
    for name, value in {**sizes, "width": width, "num_heads": num_heads}.items():
        if value < 1:
            raise ValueError(f"{what} with {name} {value}; it must be at least 1")
    if width % num_heads:
        raise ValueError(
            f"{what} of width {width} with {num_heads} heads; the width must be a multiple of the number of heads"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{what} with dropout {dropout}; it must be at least 0 and below 1")
