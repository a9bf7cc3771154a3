"""Weighs each microbatch in the loss.

The loss of a batch is the weighted mean of its microbatches' losses. So a last microbatch with fewer samples, or
fewer tokens, has less weight:

    loss = sum_m  weight_m / sum(weights) * loss_m

Where updates are ops of the schedule, the weights of each update's window sum to 1. A microbatch weighs as much as
its mean is over. The first line that fits the loss says how much that is:

    loss_fn.adds_up = True, or reduction="sum"    nothing: the values are shares of the batch's loss, and are added up
    a method loss_fn.weight(targets)              what the method counts, such as tokens
    torch's own losses                            elements, samples, or the class weights of targets that count
    any other                                     samples

Torch's own losses are its modules, and functions of `torch.nn.functional`, bare or with keywords by
`functools.partial`. A subclass with a forward of its own may be a mean over anything, so it is not one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.pytree import flatten, shown

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
    if getattr(loss_fn, "adds_up", False) is True or getattr(loss_fn, "reduction", None) == "sum":
        return True
    known = _torch_loss(loss_fn)
    return known is not None and known.setting("reduction") == "sum"


def weights_of(targets: Sequence[Any], loss_fn: LossFn) -> list[float] | None:
    """What the loss counts in each microbatch's targets; None where it does not say."""
    weight = getattr(loss_fn, "weight", None)
    if callable(weight):
        return [_number(weight(target)) for target in targets]
    known = _torch_loss(loss_fn)
    if known is None or not all(isinstance(target, Tensor) for target in targets):
        return None
    counts = [known.count(target) for target in targets]
    tensors = [count for count in counts if isinstance(count, Tensor)]  # of targets on a device: asked for at once
    return list(map(float, torch.stack(tensors).tolist() if tensors else counts))


def _number(weight: Any) -> float:
    """A weight that a loss gave. Raises RuntimeFailure for anything but a number that is not negative."""
    try:
        number = float(weight)
    except (RuntimeError, TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise RuntimeFailure(
            f"loss_fn.weight(targets) returned {shown(weight)}; return one number: how many targets the loss is a "
            "mean over"
        )
    return number


@dataclass(frozen=True)
class _TorchLoss:
    """One of torch's losses.

    Attributes:
        function: the function of `torch.nn.functional`, or the module's forward.
        setting: gives a setting by its name.
    """

    function: Any
    setting: Callable[[str], Any]

    def count(self, targets: Tensor) -> Tensor | int:
        """What its mean is over, in a microbatch's targets, or as many times that in each microbatch."""
        if self.function not in _OF_CLASSES or targets.is_floating_point():  # these are probabilities of classes
            is_over_samples = self.setting("reduction") == "batchmean" and targets.dim()
            return targets.shape[0] if is_over_samples else targets.numel()
        ignored, weight = targets == self.setting("ignore_index"), self.setting("weight")
        if weight is None:
            return (~ignored).sum()
        known = targets.long().clamp(0, len(weight) - 1)  # the loss itself refuses classes that are unknown
        return weight.detach().to(targets.device, torch.float64)[known].masked_fill(ignored, 0.0).sum()


_OF_CLASSES = (nn.CrossEntropyLoss.forward, functional.cross_entropy, nn.NLLLoss.forward, functional.nll_loss)
_DEFAULTS = {"reduction": "mean", "weight": None, "ignore_index": -100}
"""Of the functions."""


def _torch_loss(loss_fn: LossFn) -> _TorchLoss | None:
    """Which of torch's losses it is; None for any other."""
    function: Any = loss_fn
    setting: Callable[[str], Any] = _DEFAULTS.__getitem__
    if isinstance(loss_fn, nn.Module):
        function = vars(loss_fn).get("forward", type(loss_fn).forward)
        setting = partial(getattr, loss_fn)
    elif isinstance(loss_fn, partial) and not loss_fn.args:
        function = loss_fn.func
        setting = {**_DEFAULTS, **loss_fn.keywords}.__getitem__
    is_known = getattr(function, "__module__", "") in ("torch.nn.functional", "torch.nn.modules.loss")
    return _TorchLoss(function, setting) if is_known else None


def sizes_of(cut: Sequence[Any]) -> list[float]:
    """Samples of each microbatch: those that a `Cut` knows, or the extent of its first tensor."""
    known: list[float] | None = getattr(cut, "sizes", None)
    return known if known is not None else [float(_size(value)) for value in cut]


def _size(value: Any) -> int:
    """Samples in a microbatch: the extent of its first tensor."""
    leaves, _ = flatten(value)
    return leaves[0].shape[0] if leaves and leaves[0].dim() else 1


class _NoLoss(torch.autograd.Function):
    """A loss of 0, with a gradient of 0 for each output."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def weightless(loss: Tensor, output: Any) -> Tensor:
    """The share of a microbatch that weighs nothing: 0, and so its gradients, also where its mean is 0/0."""
    try:
        leaves, _ = flatten(output)
    except RuntimeFailure:  # of a class that can't pass between stages, and needn't
        return loss * 0.0
    wanted = [leaf for leaf in leaves if leaf.requires_grad] if loss.requires_grad else []
    share: Tensor = _NoLoss.apply(loss.detach(), *wanted)
    return share
