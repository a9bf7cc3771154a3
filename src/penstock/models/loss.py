"""The language-model loss, with the weight a microbatch has in the mean over the batch.

A batch is the mean over its tokens, whatever the microbatches it is cut into; so a microbatch with many masked
tokens must count for less. The runtime asks the loss for that count.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["CrossEntropy"]


class CrossEntropy:
    """Mean negative log-likelihood, in nats, of the targets that are not `ignore_index`."""

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits[B, T, V] and targets[B, T] to a scalar; 0, with gradients of 0, if every target is masked."""
        total = functional.cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten(),
            ignore_index=self.ignore_index,
            reduction="sum",
        )
        # Divided here because torch's own mean over no targets is 0/0.
        return total / (targets != self.ignore_index).sum().clamp(min=1)

    def weight(self, targets: Tensor) -> int:
        """How many of targets[B, T] are not masked."""
        return int((targets != self.ignore_index).sum())

    def __repr__(self) -> str:
        return f"CrossEntropy(ignore_index={self.ignore_index})"
