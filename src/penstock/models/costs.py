"""What the layers and stages of a decoder cost, from sizes alone; the input to `partition` and to plans by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.cost import CostsByLength, LengthLine
from penstock.models.gpt import GPTConfig

__all__ = [
    "decoder_costs_by_length",
    "gpt_costs",
    "gpt_costs_by_length",
]


def gpt_costs(config: GPTConfig) -> list[float]:
    """Forward FLOPs per token of each layer of a GPT, from its sizes alone: every rank can cut without building.

    A lookup multiplies nothing and counts its additions; the head counts its vocabulary.

    Args:
        config: the sizes.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.presets["nano"]
        >>> len(ps.models.gpt_costs(config)) == len(ps.models.build_layers(config))
        True
    """
    width = config.width
    block = 2 * 12 * width**2 + 2 * config.context * width  # causal: half of the T by T scores, twice
    return [2.0 * width, *[float(block)] * config.depth, 2.0 * width * config.vocab_size]


def gpt_costs_by_length(config: GPTConfig, parts: Sequence[Sequence[int]]) -> CostsByLength:
    """What the stages of a GPT cost by the lengths of sequences, from its sizes alone: ms at 10**9 FLOPs per ms.

    The backward to the inputs takes as many FLOPs as the forward, except that attention takes 2.5 times as many. The
        backward to the weights takes as many as the forward of the linear layers. A forward keeps 17 times each
        block's width for every token (Korthikanti et al. 2022, arXiv 2205.05198), and of the logits two numbers for
        each word; in float32.

    Args:
        config: the sizes.
        parts: the layers of each stage.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.presets["nano"]
        >>> costs = ps.models.gpt_costs_by_length(config, [range(3), range(3, 6)])
        >>> long, short = (costs.of([shape]).duration("F", 0, 0) for shape in ([512], [256, 256]))
        >>> long > short
        True
    """
    width = config.width
    layers = [2 * width, *[24 * width**2] * config.depth, 2 * width * config.vocab_size]
    return decoder_costs_by_length(layers, parts, width=width, attended=width, vocab_size=config.vocab_size)


def decoder_costs_by_length(
    layers: Sequence[float], parts: Sequence[Sequence[int]], *, width: int, attended: int, vocab_size: int
) -> CostsByLength:
    """What the stages of any decoder cost by the lengths of sequences; see `gpt_costs_by_length`.

    Args:
        layers: forward FLOPs per token of each layer's linears: of the embedding, the blocks and the head.
        parts: the layers of each stage.
        width: of the hidden states.
        attended: of a block's queries, all heads together.
        vocab_size: words that the head tells apart.

    Examples:
        >>> import penstock as ps
        >>> layers, parts = [0.0, 1e6, 1e6, 2e6], [range(2), range(2, 4)]
        >>> costs = ps.models.decoder_costs_by_length(layers, parts, width=64, attended=64, vocab_size=1000)
        >>> long, short = (costs.of([shape]).duration("F", 0, 0) for shape in ([512], [256, 256]))
        >>> long > short
        True
    """
    last = len(layers) - 1
    rows = []
    for part in parts:
        blocks = sum(0 < index < last for index in part)
        head = last in part
        linear = sum(layers[index] for index in part) * 1e-9
        kept = 4.0 * (blocks * 17 * width + head * 2 * vocab_size + (0 in part) * width)
        rows.append(_StageSizes(linear, blocks * 2 * attended * 1e-9, kept, 0.0 if head else 4.0 * width))
    return CostsByLength(
        f=[LengthLine(0.0, row.linear, row.square) for row in rows],
        i=[LengthLine(0.0, row.linear, 2.5 * row.square) for row in rows],
        w=[LengthLine(0.0, row.linear) for row in rows],
        activation=[LengthLine(per_token=row.kept) for row in rows],
        message_bytes=[LengthLine(per_token=row.sent) for row in rows],
    )


class _StageSizes(NamedTuple):
    """Of a stage's forward: ms for each token in its linears and for each squared length in attention, bytes that it
    keeps and that it sends on for each token.
    """

    linear: float
    square: float
    kept: float
    sent: float
