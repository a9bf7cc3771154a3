"""A GPT as a flat list of layers, so that any cut of the list is a pipeline stage.

Layer 0 embeds, layers 1 to `depth` are blocks, the last layer is the final norm with the head. The weights of a
layer follow from the seed and the layer's index and from nothing else: a rank builds only its own layers, and any
partition over any number of ranks holds the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.models.block import TransformerBlock, dropout_layer
from penstock.models.listed import ListedConfig, Wrap, tied_ends
from penstock.runtime import Stage

__all__ = ["GPTConfig", "build_layers", "gpt_stage", "presets", "tied_parameters"]


@dataclass(frozen=True, slots=True)
class GPTConfig(ListedConfig):
    """Sizes of a GPT.

    Attributes:
        vocab_size: number of tokens.
        context: most tokens per sample.
        depth: number of blocks.
        width: numbers per token between blocks.
        num_heads: attention heads per block; they divide the width.
        dropout: share of numbers that dropout sets to zero while training.
        tied: whether the embedding and the head are one weight.
        bias: whether linear layers and norms have a bias.

    Raises:
        ValueError: a size below 1, heads that do not divide the width.

    Examples:
        >>> import penstock as ps
        >>> from dataclasses import replace
        >>> config = replace(ps.models.presets["nano"], depth=2)
        >>> config.depth, config.num_parameters < ps.models.presets["nano"].num_parameters
        (2, True)
    """

    kind = "GPT"
    bias: bool = True

    def make(self, index: int) -> nn.Module:
        """The layer of a number, its weights not filled."""
        if index == 0:
            return Embedding(self)
        if index == self.num_layers - 1:
            return Head(self)
        return GPTBlock(self.width, self.num_heads, self.dropout, self.bias)


presets: dict[str, GPTConfig] = {
    "nano": GPTConfig(vocab_size=256, context=64, depth=4, width=64, num_heads=4),
    "tiny": GPTConfig(vocab_size=256, context=128, depth=8, width=96, num_heads=3),
    "small": GPTConfig(vocab_size=256, context=256, depth=8, width=384, num_heads=6),
    "gpt2-124m": GPTConfig(vocab_size=50257, context=1024, depth=12, width=768, num_heads=12, tied=True),
    "gpt2-355m": GPTConfig(vocab_size=50257, context=1024, depth=24, width=1024, num_heads=16, tied=True),
    "gpt2-774m": GPTConfig(vocab_size=50257, context=1024, depth=36, width=1280, num_heads=20, tied=True),
    "gpt2-1.5b": GPTConfig(vocab_size=50257, context=1024, depth=48, width=1600, num_heads=25, tied=True),
    # AMDP's (table 2): GPT-2's vocabulary padded to a multiple of 128 gives its 1,557,686,400 parameters.
    "amdp-gpt": GPTConfig(vocab_size=50304, context=1024, depth=48, width=1600, num_heads=25, tied=True),
    # FlexPipe's (table 3, whose rows of heads and of widths are swapped), each with the smallest of its vocabularies.
    "flexpipe-5b": GPTConfig(vocab_size=64_000, context=512, depth=64, width=2560, num_heads=64),
    "flexpipe-16b": GPTConfig(vocab_size=256_000, context=1024, depth=80, width=4096, num_heads=32),
}
"""Named sizes; `dataclasses.replace` gives one another vocabulary, depth or context."""


Packed = dict[str, Tensor]
"""Sequences in one row, one after the other: `tokens`[1, T], or `hidden`[1, T, D], and the `lengths` of each."""


class Embedding(nn.Module):
    """Tokens[B, T] to [B, T, D]: the token's row plus the position's.

    Given sequences that lie in one row, positions begin anew with each, and the lengths are passed on for the blocks
    to keep them apart.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = dropout_layer(config.dropout)

    def forward(self, given: Tensor | Packed) -> Tensor | Packed:
        tokens, lengths = (given, None) if isinstance(given, Tensor) else (given["tokens"], given["lengths"])
        spans = [tokens.shape[-1]] if lengths is None else lengths.tolist()
        if lengths is not None and tokens.shape != (1, sum(spans)):
            raise ValueError(
                f"sequences of {sum(spans)} tokens in all were given with tokens{list(tokens.shape)}; they lie in "
                f"one row, [1, {sum(spans)}]"
            )
        if (num_tokens := max(spans, default=0)) > (context := self.position.num_embeddings):
            raise ValueError(f"{num_tokens} tokens given to a GPT of context {context}; crop the input")
        place = torch.cat([torch.arange(span, device=tokens.device) for span in spans])  # T
        out: Tensor = self.dropout(self.token(tokens) + self.position(place))  # B, T, D
        return out if lengths is None else {"hidden": out, "lengths": lengths}


class GPTBlock(TransformerBlock):
    """A block in which every token sees those before it, and of sequences in one row those of its own."""

    def forward(self, value: Tensor | Packed) -> Tensor | Packed:  # type: ignore[override]
        if isinstance(value, Tensor):
            return super().forward(value)
        return {**value, "hidden": super().forward(value["hidden"], lengths=value["lengths"])}


class Head(nn.Module):
    """The final norm and the output matrix, [B, T, D] to logits[B, T, V]."""

    output_layers = ("output",)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, value: Tensor | Packed) -> Tensor:
        x = value if isinstance(value, Tensor) else value["hidden"]
        out: Tensor = self.output(self.norm(x))
        return out


def build_layers(config: GPTConfig, indices: Iterable[int] | None = None, seed: int = 0) -> list[nn.Module]:
    """The layers at `indices`, in that order, on the CPU in float32.

    Nothing is drawn from torch's global generators. With `config.tied`, embedding and head share one Parameter if
        both are asked for; a head alone gets the embedding's initial weight.

    Args:
        config: the sizes of the model.
        indices: numbers of layers, from 0; all where not given.
        seed: initial weights are drawn from it, layer by layer.

    Raises:
        ValueError: an index out of range.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> config = ps.models.presets["nano"]
        >>> last, again = ps.models.build_layers(config, [3])[0], ps.models.build_layers(config, [2, 3])[1]
        >>> all(torch.equal(p, q) for p, q in zip(last.parameters(), again.parameters()))
        True
    """
    return config.listed.layers(indices, seed)


def gpt_stage(config: GPTConfig, indices: Iterable[int], seed: int = 0, wrap: Wrap | None = None) -> Stage:
    """The stage that holds the layers at `indices`, under their names in the whole model ("layers.3").

    Args:
        config: the sizes of the model.
        indices: numbers of layers, from 0.
        seed: initial weights are drawn from it, layer by layer.
        wrap: puts something around each block, such as activation checkpointing; nothing where not given.

    Examples:
        >>> import penstock as ps
        >>> stage = ps.models.gpt_stage(ps.models.presets["nano"], range(2))
        >>> sorted({name.split(".")[1] for name, _ in stage.named_parameters()})
        ['0', '1']
    """
    return config.listed.stage(indices, seed, wrap)


def tied_parameters(config: GPTConfig) -> list[list[str]]:
    """Groups of plain parameter names that are one parameter, wherever their layers lie.

    Args:
        config: says whether weights are tied.

    Examples:
        >>> import penstock as ps
        >>> from dataclasses import replace
        >>> ps.models.tied_parameters(replace(ps.models.presets["nano"], tied=True))
        [['layers.0.token.weight', 'layers.5.output.weight']]
    """
    return tied_ends(config)
