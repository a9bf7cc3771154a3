"""What the layers of a GPT or a BERT cost, by formulas: operations, bytes, parameters. Pure numbers, no device yet.

With s tokens a sample, b samples per microbatch, width h, a heads, vocabulary V and t devices that share each layer:

    block      F  sbh(24h + 4s) / t     I  sbh(24h + 8s) / t     W  sbh 24h / t
    head       F  2 sbhV / t            I  2 sbhV / t            W  2 sbhV / t
    embedding  F  2 sbh                 I  0                     W  2 sbh

The block's are those of Narayanan et al. 2021 (arXiv 2104.04473, appendix) and of the zero-bubble paper (Qi et al.
2023, arXiv 2401.10241, table 1), which count the whole square of attention scores.

A BERT (that of Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, with the norms in front) differs at its ends:

    embedding  words, positions and two token types; no norm of its own
    head       the last norm; for masked words a linear of h rows, a norm, the product with the shared weight and a
               bias of V; for the next sentence a pooler of h rows and a linear of two

Its blocks are a GPT's: attention both ways has as many scores to compute as one that computes the whole square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from penstock.cost.errors import CostError

HALF, FLOAT = 2, 4  # bytes
VOCAB_MULTIPLE = 128
"""A vocabulary is padded so that each device of a group has a multiple of this (Megatron's default)."""


class LayerCosts(NamedTuple):
    """Of one layer and one microbatch, on each of the devices that share the layer.

    Attributes:
        f, i, w: floating-point operations.
        all_reduces_f, all_reduces_i: of one message's bytes each, within the group.
        activation: bytes kept from F on. held: bytes of them, and of gradients, kept from I to W.
        parameters: numbers that the device holds.
    """

    f: float
    i: float
    w: float
    all_reduces_f: int
    all_reduces_i: int
    activation: float
    held: float
    parameters: float


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT-2 and of what it is fed.

    Attributes:
        num_blocks, width, num_heads, vocab_size, num_positions: of the model; embedding and head share one weight.
        sequence: tokens a sample. microbatch_size: samples. tensor_parallel: devices that share each layer.

    Raises:
        CostError: a size below 1, heads that do not divide the width, more tokens than positions.
    """

    num_blocks: int
    width: int
    num_heads: int = 32
    vocab_size: int = 50257
    num_positions: int = 2048
    sequence: int = 1024
    microbatch_size: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int) or value < 1:
                raise CostError(f"{each.name.replace('_', ' ')} is {value}: give a whole number of at least 1")
        for name, whole in (("num_heads", self.width), ("tensor_parallel", self.num_heads)):
            part = getattr(self, name)
            if whole % part:
                raise CostError(f"{name.replace('_', ' ')} is {part}: it must divide {whole}")
        if self.sequence > self.num_positions:
            raise CostError(
                f"a sequence of {self.sequence} tokens: the model has {self.num_positions} positions; give "
                "at most that"
            )

    @property
    def num_layers(self) -> int:
        """The blocks, the embedding and the head."""
        return self.num_blocks + 2

    @property
    def padded_vocab(self) -> int:
        multiple = VOCAB_MULTIPLE * self.tensor_parallel
        return math.ceil(self.vocab_size / multiple) * multiple

    @property
    def message_bytes(self) -> float:
        """What passes from stage to stage: one 16-bit number for each token and unit of width."""
        return float(HALF * self.microbatch_size * self.sequence * self.width)

    def layers(self) -> list[LayerCosts]:
        """The embedding, the blocks and the head."""
        return [self._embedding(), *[self._block()] * self.num_blocks, self._head()]

    def _block(self) -> LayerCosts:
        """Activation: sbh(10 + 24/t + 5as/(ht)) bytes (Korthikanti et al. 2022, arXiv 2205.05198, equation 2).

        Held: the inputs of the four linears and the gradients of their outputs, sbh(8 + 24/t); with one device the
        32 sbh of the zero-bubble paper's table 1. An all-reduce behind attention and one behind the MLP, forward
        and backward (Shoeybi et al. 2019, arXiv 1909.08053).
        """
        s, h, t = self.sequence, self.width, self.tensor_parallel
        sbh = s * self.microbatch_size * h
        return LayerCosts(
            f=sbh * (24 * h + 4 * s) / t,
            i=sbh * (24 * h + 8 * s) / t,
            w=sbh * 24 * h / t,
            all_reduces_f=2,
            all_reduces_i=2,
            activation=sbh * (10 + 24 / t + 5 * self.num_heads * s / (h * t)),
            held=sbh * (8 + 24 / t),
            parameters=_block_parameters(h, t),
        )

    def _embedding(self) -> LayerCosts:
        """Two additions a number, forward and for the weight's gradient; keeps a mask of dropout."""
        sbh, h = self.sequence * self.microbatch_size * self.width, self.width
        parameters = self.padded_vocab * h / self.tensor_parallel + self.num_positions * h
        return LayerCosts(2.0 * sbh, 0.0, 2.0 * sbh, 1, 0, float(sbh), float(HALF * sbh), parameters)

    def _head(self) -> LayerCosts:
        """The last norm and the product with the shared weight; keeps logits as 32-bit numbers, as the loss does."""
        h, v = self.width, self.padded_vocab / self.tensor_parallel
        tokens = self.sequence * self.microbatch_size
        product = 2.0 * tokens * h * v
        kept = tokens * (2 * HALF * h + FLOAT * v)
        return LayerCosts(product, product, product, 0, 1, kept, tokens * (HALF * h + HALF * v), v * h + 2 * h)


def _block_parameters(h: int, t: int = 1) -> int:
    """Two norms, and linears of 3h, h, 4h and h rows; the biases behind an all-reduce and the norms are not shared.

    On one device 12 h^2 + 13 h.
    """
    return 12 * h * h // t + 7 * h // t + 2 * h + 4 * h


TOKEN_TYPES = 2


@dataclass(frozen=True)
class BERTShape(GPTShape):
    """Sizes of a BERT and of what it is fed; attributes are those of `GPTShape`."""

    def _embedding(self) -> LayerCosts:
        words = super()._embedding()
        sbh = self.sequence * self.microbatch_size * self.width
        types = float(sbh)  # one addition a number more
        return words._replace(
            f=words.f + types, w=words.w + types, parameters=words.parameters + TOKEN_TYPES * self.width
        )

    def _head(self) -> LayerCosts:
        """Keeps the inputs of the linear, its GELU and the norm too. The next sentence is one token a sample."""
        product, h = super()._head(), self.width
        tokens, more = self.sequence * self.microbatch_size, 2.0 * self.sequence * self.microbatch_size * h * h
        sentence = 2.0 * self.microbatch_size * h * (h + 2)
        return LayerCosts(
            f=product.f + more + sentence,
            i=product.i + more + sentence,
            w=product.w + more + sentence,
            all_reduces_f=product.all_reduces_f,
            all_reduces_i=product.all_reduces_i,
            activation=product.activation + tokens * 3 * HALF * h,
            held=product.held + tokens * 2 * HALF * h,
            parameters=product.parameters
            + _transform(h)
            + self.padded_vocab / self.tensor_parallel
            + _next_sentence(h),
        )


def _transform(h: int) -> int:
    """A linear with its bias, and a norm."""
    return h * h + h + 2 * h


def _next_sentence(h: int) -> int:
    """The pooler, and two rows with their biases."""
    return h * h + h + 2 * h + 2
