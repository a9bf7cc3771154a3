"""A model as a flat list of layers, any of which can be built alone.

    0 embedding    1 .. depth blocks    depth + 1 head

Each layer's weights follow from the seed and its name alone. So a rank builds only its own layers, and any cut over
any number of ranks holds the same numbers, bit for bit. If the embedding and the head share one weight and only the
head is built, it gets the numbers that the embedding would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import nn

from penstock.runtime import PartitionError, Stage

__all__ = [
    "ListedConfig", "ListedLayers", "Wrap", "built", "cut_by_counts", "generator_of", "require_sizes", "tied_ends",
]  # fmt: skip

Wrap = Callable[[nn.Module], nn.Module]
"""Puts something around a block, such as activation checkpointing."""


@dataclass(frozen=True)
class ListedLayers:
    """How the layers of a model are built.

    Attributes:
        what: the model, for errors: "a GPT".
        depth, width: the number of blocks, and the numbers per token between them. The spread of the initial weights
            follows from both.
        make: from a layer's number to the layer, its weights not filled.
        tied: whether `token.weight` of the first layer and `output.weight` of the last are one.
        prefix: precedes a layer's number in the name that seeds it.
    """

    what: str
    depth: int
    width: int
    make: Callable[[int], nn.Module]
    tied: bool = False
    prefix: str = ""

    @property
    def last(self) -> int:
        """The head's number."""
        return self.depth + 1

    @property
    def num_parameters(self) -> int:
        """The parameters of the whole model, a tied weight counted once."""
        with torch.device("meta"):
            first, block, last = (self.make(index) for index in (0, 1, self.last))
        counts = [sum(p.numel() for p in layer.parameters()) for layer in (first, block, last)]
        tied = first.get_parameter("token.weight").numel() if self.tied else 0
        return counts[0] + self.depth * counts[1] + counts[2] - tied

    def layers(self, indices: Iterable[int] | None, seed: int) -> list[nn.Module]:
        """The layers at `indices`, or all, in that order, on the CPU in float32.

        Draws nothing from torch's global generators. `ValueError` for an index out of range.
        """
        wanted = list(range(self.depth + 2) if indices is None else indices)
        for index in wanted:
            if not 0 <= index <= self.last:
                raise ValueError(f"layer {index} asked of {self.what} of {self.depth + 2} layers, counted from 0")
        layers = [self._build(index, seed) for index in wanted]
        if self.tied and 0 in wanted:
            embedding: Any = layers[wanted.index(0)]
            for index, layer in zip(wanted, layers, strict=True):
                if index == self.last:
                    layer.get_submodule("output").weight = embedding.token.weight
        return layers

    def stage(self, indices: Iterable[int], seed: int, wrap: Wrap | None = None) -> Stage:
        """The stage that holds the layers at `indices`, under their names in the whole model ("layers.3").

        Args:
            wrap: is called for each block.
        """
        wanted = list(indices)
        named = dict(zip(wanted, self.layers(wanted, seed), strict=True))
        if wrap is not None:
            named |= {index: wrap(layer) for index, layer in named.items() if 0 < index < self.last}
        return Stage({f"layers.{index}": layer for index, layer in named.items()}, wanted)

    def _build(self, index: int, seed: int) -> nn.Module:
        std = 0.5 * self.width**-0.5
        # What a block adds to the residual stream shrinks with the number of such additions.
        residual = std * (2 * self.depth) ** -0.5
        layer = built(lambda: self.make(index), self._generator(index, seed), std, residual)
        if self.tied and index == self.last:
            with torch.no_grad():
                # The embedding draws its tokens first, so its generator's first numbers are its token weight.
                layer.get_parameter("output.weight").normal_(0.0, std, generator=self._generator(0, seed))
        return layer

    def _generator(self, index: int, seed: int) -> torch.Generator:
        return generator_of(seed, f"{self.prefix}{index}")


@dataclass(frozen=True, slots=True)
class ListedConfig:
    """The sizes that GPT and BERT have in common.

    Raises:
        ValueError: a size below 1, heads that do not divide the width, a dropout outside 0 to 1.
    """

    kind: ClassVar[str]
    """The model's name."""

    vocab_size: int
    context: int
    depth: int
    width: int
    num_heads: int
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = {each.name: size for each in fields(self) if type(size := getattr(self, each.name)) is int}
        require_sizes(self.kind, sizes, self.width, self.num_heads, self.dropout)

    @property
    def num_layers(self) -> int:
        """The blocks, the embedding and the head."""
        return self.depth + 2

    @property
    def num_parameters(self) -> int:
        """The parameters of the whole model, a tied weight counted once."""
        return self.listed.num_parameters

    @property
    def listed(self) -> ListedLayers:
        """How the model's layers are built."""
        return ListedLayers(f"a {self.kind}", self.depth, self.width, self.make, self.tied)

    def make(self, index: int) -> nn.Module:
        """The layer of a number, its weights not filled."""
        raise NotImplementedError


def cut_by_counts(num_layers: int, num_stages: int, cut: Sequence[int]) -> list[range]:
    """The layers of each stage if `cut` says how many each holds. Raises PartitionError if it does not fit."""
    if len(cut) != num_stages or min(cut) < 1 or sum(cut) != num_layers:
        raise PartitionError(
            f"cut {','.join(map(str, cut))} is for {len(cut)} stages and {sum(cut)} layers; give each of the "
            f"{num_stages} stages at least one of the {num_layers} layers (embedding and head are two)"
        )
    ends = accumulate(cut)
    return [range(end - count, end) for end, count in zip(ends, cut, strict=True)]


def tied_ends(config: ListedConfig) -> list[list[str]]:
    """The names of an embedding and a head that share one weight; none if they do not."""
    return [["layers.0.token.weight", f"layers.{config.num_layers - 1}.output.weight"]] if config.tied else []


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
