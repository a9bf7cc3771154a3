"""What the layers of a BERT cost where they are not a GPT's: token types, and what stands behind the last block.

    embedding  words, positions and two token types; no norm of its own
    head       the last norm; for masked words a linear of h rows, a norm, the product with the shared weight and a
               bias of V; for the next sentence a pooler of h rows and a linear of two

Blocks are a GPT's: attention both ways has as many scores to compute as one that computes the whole square. That is
the BERT of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), with the norms in front.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost.presets.gpt import HALF, GPTShape, LayerCosts

TOKEN_TYPES = 2


@dataclass(frozen=True)
class BERTShape(GPTShape):
    """Sizes of a BERT and of what it is fed; attributes are those of `GPTShape`."""

    @property
    def num_parameters(self) -> int:
        h, v = self.width, self.vocab_size
        return super().num_parameters + TOKEN_TYPES * h + _transform(h) + v + _next_sentence(h)

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
