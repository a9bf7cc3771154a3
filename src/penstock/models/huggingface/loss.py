"""The loss of a Hugging Face causal language model, and batches as its users have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.models.huggingface.anatomy import DecoderError
from penstock.models.loss import CrossEntropy

__all__ = ["NextTokenLoss", "inputs_and_targets"]


class NextTokenLoss:
    """Mean negative log-likelihood, in nats, of each label given the tokens before it, as the models' own `loss`.

    Labels are not shifted yet: they are the tokens themselves, -100 where one does not count.
    """

    def __init__(self) -> None:
        self._mean = CrossEntropy()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits[B, T, V] and labels[B, T] to a scalar."""
        shifted = labels.new_full(labels.shape, self._mean.ignore_index)
        shifted[..., :-1] = labels[..., 1:]
        return self._mean(logits, shifted)

    def weight(self, labels: Tensor) -> int:
        """How many tokens of labels[B, T] are guessed."""
        return self._mean.weight(labels[..., 1:])

    def __repr__(self) -> str:
        return "NextTokenLoss()"


def inputs_and_targets(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """A batch of `input_ids`, `attention_mask`, ... and `labels` as what `pipe.step` takes.

    Raises DecoderError where there are no labels.
    """
    inputs = dict(batch)
    if "labels" not in inputs:
        raise DecoderError(f"the batch has {', '.join(inputs) or 'nothing'} and no labels; give labels=input_ids")
    labels = inputs.pop("labels")
    return inputs, labels
