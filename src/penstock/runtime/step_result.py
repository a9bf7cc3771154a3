"""What one training step gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What a step gives, the same on every rank.

    Attributes:
        loss: the batch's loss (without a graph, in the loss's own type): the weighted mean over its microbatches.
        losses: each microbatch's share of it; they add up to `loss`.
        grad_norm: the norm before clipping, where clipping is on and the step updated; else None.
    """

    loss: Tensor
    losses: Tensor
    grad_norm: Tensor | None = None
