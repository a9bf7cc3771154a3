"""Weighs each microbatch in the loss.

The loss of a batch is the weighted mean of its microbatches' losses. So a last microbatch with fewer samples, or
fewer tokens, has less weight:

    loss = sum_m  weight_m / sum(weights) * loss_m

Where updates are ops of the schedule, the weights of each update's window sum to 1.

If a loss has a method `weight(targets)`, that says what the loss averages over, such as tokens. Otherwise a
microbatch weighs as much as it has samples. A loss with `adds_up = True` has already divided by the size of the whole
batch, so its values are added up as they are. The same holds for torch's losses with `reduction="sum"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.pytree import flatten

LossFn = Callable[..., Tensor] | None
"""(output, targets) -> the loss; None where there is none."""


def weigh(inputs: Sequence[Any], targets: Sequence[Any], loss_fn: LossFn, windows: Sequence[range]) -> list[float]:
    """Each microbatch's share in the loss of its window.

    Raises:
        RuntimeFailure: one of several windows weighs nothing, so that its update has no gradient.
    """
    if adds_up(loss_fn):
        return [1.0] * len(inputs)
    counted = weights_of(targets, loss_fn)
    weights = sizes_of(inputs) if counted is None else counted
    return shares_of([weights], windows)[0]


def shares_of(weights: Sequence[Sequence[float]], windows: Sequence[range]) -> list[list[float]]:
    """By replica each microbatch's share in the loss of its window, which that of all replicas weighs together.

    Raises:
        RuntimeFailure: one of several windows weighs nothing, so that its update has no gradient.
    """
    shares: list[list[float]] = [[] for _ in weights]
    for update, window in enumerate(windows):
        total = sum(part[m] for part in weights for m in window)
        if not total and len(windows) > 1:
            whose = " of all replicas" if len(weights) > 1 else ""
            raise RuntimeFailure(
                f"microbatches {window.start} to {window.stop - 1}{whose}, the window of update {update}, weigh "
                "nothing: the loss has no target there, and the update no gradient; leave the data out, or lengthen "
                "the window"
            )
        for part, own in zip(weights, shares, strict=True):
            own += [part[m] / total if total else 0.0 for m in window]
    return shares


def adds_up(loss_fn: LossFn) -> bool:
    """Whether a loss gives shares of the batch's, which are not weighed: one that says so, or a sum of torch's."""
    return getattr(loss_fn, "adds_up", False) is True or getattr(loss_fn, "reduction", None) == "sum"


def weights_of(targets: Sequence[Any], loss_fn: LossFn) -> list[float] | None:
    """What the loss counts in each microbatch's targets; None where it does not say."""
    weight = getattr(loss_fn, "weight", None)
    return [float(weight(target)) for target in targets] if callable(weight) else None


def sizes_of(cut: Sequence[Any]) -> list[float]:
    """Samples of each microbatch: those that a `Cut` knows, or the extent of its first tensor."""
    known: list[float] | None = getattr(cut, "sizes", None)
    return known if known is not None else [float(_size(value)) for value in cut]


def _size(value: Any) -> int:
    """Samples in a microbatch: the extent of its first tensor."""
    leaves, _ = flatten(value)
    return leaves[0].shape[0] if leaves and leaves[0].dim() else 1
