"""The loss of a Hugging Face causal language model, and batches as its users have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.models.huggingface.anatomy import DecoderError
from penstock.models.loss import CrossEntropy

__all__ = ["NextTokenLoss", "WithRouterLoss", "inputs_and_targets"]


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


class WithRouterLoss:
    """A loss over tokens, and besides it what a mixture of experts adds so that its routers use them all alike.

    The output is a dict then: `logits`, and `router_loss`, times its coefficient.
    """

    def __init__(self, loss: NextTokenLoss | CrossEntropy) -> None:
        self._loss = loss

    def __call__(self, output: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """The output of the last stage and labels[B, T] to a scalar."""
        return self._loss(output["logits"], labels) + output["router_loss"]

    def weight(self, labels: Tensor) -> int:
        """How many tokens of labels[B, T] are guessed."""
        return self._loss.weight(labels)

    def __repr__(self) -> str:
        return f"WithRouterLoss({self._loss!r})"


def inputs_and_targets(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """A batch of `input_ids`, `attention_mask`, ... and `labels` as what `pipe.step` takes.

    Raises DecoderError where there are no labels.
    """
    inputs = dict(batch)
    if "labels" not in inputs:
        raise DecoderError(f"the batch has {', '.join(inputs) or 'nothing'} and no labels; give labels=input_ids")
    labels = inputs.pop("labels")
    return inputs, labels
