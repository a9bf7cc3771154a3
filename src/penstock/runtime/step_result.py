"""What one training step gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.schedule.short_repr import short_repr


@dataclass(frozen=True)
class StepResult:
    """What a step gives, the same on every rank.

    Attributes:
        loss: the batch's loss (without a graph, in the loss's own type): the weighted mean over its microbatches.
            Where updates are ops of the schedule, the mean over their windows.
        losses: each microbatch's share of it, or of its window's; they add up to `loss`, or to the window's.
        window_losses: of each update's window; a schedule whose updates are no ops has one.
        grad_norm: the norm before clipping, where clipping is on and the step updated; else None.
    """

    loss: Tensor
    losses: Tensor
    window_losses: Tensor
    grad_norm: Tensor | None = None

    __repr__ = short_repr
