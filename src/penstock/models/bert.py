"""A BERT as a flat list of layers, so that any cut of the list is a pipeline stage.

Layer 0 embeds, layers 1 to `depth` are blocks in which every token sees every other, the last layer is the final
norm with two heads: for the tokens that were masked and, from the first token, whether the second part of the text
follows the first (Devlin et al. 2019, arXiv 1810.04805). The norms stand before attention and MLP, as in Megatron-LM,
not behind them. Weights are seeded as in the GPT: any cut over any number of ranks holds the same numbers.

What goes from layer to layer is a dict: `hidden` [B, T, D], and `real` [B, T] where some tokens are padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.models.block import TransformerBlock, dropout_layer
from penstock.models.listed import ListedConfig, Wrap, tied_ends
from penstock.models.loss import token_losses
from penstock.runtime import Stage

__all__ = [
    "BERTConfig",
    "BERTLoss",
    "bert_costs",
    "bert_layers",
    "bert_presets",
    "bert_stage",
    "bert_tied_parameters",
]


@dataclass(frozen=True, slots=True)
class BERTConfig(ListedConfig):
    """Sizes of a BERT.

    Attributes:
        vocab_size: number of tokens, the special ones included.
        context: most tokens per sample.
        depth: number of blocks.
        width: numbers per token between blocks.
        num_heads: attention heads per block; they divide the width.
        num_segments: kinds of parts that a text has.
        next_sentence: whether there is the head for the first token, with its pooling layer.
        tied: whether embedding and output are one weight.
        dropout: share of numbers that dropout sets to zero while training.

    Raises:
        ValueError: a size below 1, heads that do not divide the width.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.BERTConfig(vocab_size=259, context=32, depth=2, width=32, num_heads=2)
        >>> config.tied, len(ps.models.bert_costs(config))
        (True, 4)
    """

    kind = "BERT"
    tied: bool = True
    num_segments: int = 2
    next_sentence: bool = True

    def make(self, index: int) -> nn.Module:
        """The layer of a number, its weights not filled."""
        if index == 0:
            return BERTEmbedding(self)
        return BERTHeads(self) if index == self.num_layers - 1 else BERTBlock(self)


bert_presets: dict[str, BERTConfig] = {
    "nano": BERTConfig(vocab_size=259, context=64, depth=4, width=64, num_heads=4),
    "tiny": BERTConfig(vocab_size=259, context=128, depth=8, width=96, num_heads=3),
    "amdp": BERTConfig(vocab_size=29056, context=512, depth=32, width=1600, num_heads=32),
}
"""Named sizes; nano and tiny are for bytes and three special tokens (`data.MaskedText`).

AMDP's (table 2) says 1,036,179,458 parameters. They come out exactly with BERT's cased vocabulary, 28996 tokens,
padded to a multiple of 128, both heads, and 512 positions, though the table's samples have 1024 tokens: for those
take `dataclasses.replace(bert_presets["amdp"], context=1024)`, which has 819,200 parameters more.
"""

Value = dict[str, Tensor]


class BERTEmbedding(nn.Module):
    """Tokens[B, T], or a dict of `tokens`, `segments` and `real`, to what the blocks take."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.segment = nn.Embedding(config.num_segments, config.width)
        self.dropout = dropout_layer(config.dropout)

    def forward(self, given: Tensor | Value) -> Value:
        value = {"tokens": given} if isinstance(given, Tensor) else given
        if "tokens" not in value or set(value) - {"tokens", "segments", "real"}:
            got = ", ".join(sorted(value)) or "nothing"
            raise ValueError(f"a BERT was given {got}; it takes tokens and, if wanted, segments and real")
        tokens = value["tokens"]
        num_tokens, context = tokens.shape[-1], self.position.num_embeddings
        if num_tokens > context:
            raise ValueError(f"{num_tokens} tokens given to a BERT of context {context}; crop the input")
        place = torch.arange(num_tokens, device=tokens.device)  # T
        segments = value.get("segments", torch.zeros_like(tokens))
        hidden = self.dropout(self.token(tokens) + self.position(place) + self.segment(segments))  # B, T, D
        return {"hidden": hidden} if "real" not in value else {"hidden": hidden, "real": value["real"].bool()}


class BERTBlock(TransformerBlock):
    """A block in which every token sees every real token."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__(config.width, config.num_heads, config.dropout, causal=False)

    def forward(self, value: Value) -> Value:  # type: ignore[override]
        real = value.get("real")
        mask = None if real is None else real[:, None, None, :]  # B, 1, 1, T
        return {**value, "hidden": super().forward(value["hidden"], mask)}


class BERTHeads(nn.Module):
    """The final norm and the heads: {"tokens": logits[B, T, V], "next": logits[B, 2]}."""

    output_layers = ("output", "follows")

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocab_size)
        self.pool = nn.Linear(config.width, config.width) if config.next_sentence else None
        self.follows = nn.Linear(config.width, 2) if config.next_sentence else None

    def forward(self, value: Value) -> Value:
        hidden = self.norm(value["hidden"])
        transformed = functional.gelu(self.transform(hidden), approximate="tanh")
        out = {"tokens": self.output(self.transform_norm(transformed))}
        if self.pool is not None and self.follows is not None:
            out["next"] = self.follows(torch.tanh(self.pool(hidden[:, 0])))
        return out


class BERTLoss:
    """Cross-entropy of a sample's masked tokens, their mean, plus that of `next`; a mean over samples, in nats.

    Targets are a dict of `tokens` [B, T], -100 where nothing was masked, and `next` [B] for a model with that head. A
    sample counts the same whatever its number of masked tokens, so a batch is right in any microbatches.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> targets = {"tokens": torch.tensor([[2, -100]]), "next": torch.tensor([1])}
        >>> logits = {"tokens": torch.zeros(1, 2, 4), "next": torch.zeros(1, 2)}
        >>> round(ps.models.BERTLoss()(logits, targets).item(), 3)
        2.079
    """

    def __call__(self, output: Value, targets: Value) -> Tensor:
        if missing := [name for name in output if name not in targets]:
            got = ", ".join(sorted(targets)) or "nothing"
            raise ValueError(f"the model has an output {missing[0]!r}, and the targets are {got}; give one for each")
        labels = targets["tokens"]  # B, T
        each = token_losses(output["tokens"], labels)  # B, T; 0 where ignored
        # A sample with no masked token adds nothing, where a mean over none would be 0/0.
        loss = (each.sum(-1) / (labels != -100).sum(-1).clamp(min=1)).mean()
        if "next" in output:
            loss = loss + functional.cross_entropy(output["next"].float(), targets["next"])
        return loss

    def __repr__(self) -> str:
        return "BERTLoss()"


def bert_layers(config: BERTConfig, indices: Iterable[int] | None = None, seed: int = 0) -> list[nn.Module]:
    """The layers at `indices`, in that order, on the CPU in float32.

    Nothing is drawn from torch's global generators. With `config.tied`, embedding and output share one Parameter if
        both are asked for; heads alone get the embedding's initial weight.

    Args:
        config: the sizes of the model.
        indices: numbers of layers, from 0; all where not given.
        seed: initial weights are drawn from it, layer by layer.

    Raises:
        ValueError: an index out of range.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.bert_presets["nano"]
        >>> len(ps.models.bert_layers(config)) == len(ps.models.bert_costs(config))
        True
    """
    return config.listed.layers(indices, seed)


def bert_stage(config: BERTConfig, indices: Iterable[int], seed: int = 0, wrap: Wrap | None = None) -> Stage:
    """The stage that holds a BERT's layers at `indices`, under their names in the whole model.

    Args:
        config: the sizes of the model.
        indices: numbers of layers, from 0.
        seed: initial weights are drawn from it, layer by layer.
        wrap: puts something around each block, such as activation checkpointing; nothing where not given.

    Examples:
        >>> import penstock as ps
        >>> stage = ps.models.bert_stage(ps.models.bert_presets["nano"], range(2))
        >>> next(name for name, _ in stage.named_parameters())
        'layers.0.token.weight'
    """
    return config.listed.stage(indices, seed, wrap)


def bert_tied_parameters(config: BERTConfig) -> list[list[str]]:
    """Groups of plain parameter names that are one parameter, wherever their layers lie.

    Args:
        config: says whether weights are tied.

    Examples:
        >>> import penstock as ps
        >>> ps.models.bert_tied_parameters(ps.models.bert_presets["nano"])
        [['layers.0.token.weight', 'layers.5.output.weight']]
    """
    return tied_ends(config)


def bert_costs(config: BERTConfig) -> list[float]:
    """Forward FLOPs per token of each layer, from sizes alone; the heads count their vocabulary.

    Args:
        config: the sizes.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.bert_presets["nano"]
        >>> len(ps.models.bert_costs(config)) > config.depth
        True
    """
    width = config.width
    block = 2 * 12 * width**2 + 4 * config.context * width  # the whole T by T scores, twice
    return [3.0 * width, *[float(block)] * config.depth, 2.0 * width * (config.vocab_size + width)]
