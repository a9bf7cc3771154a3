"""The loss of a batch from those of its microbatches: what each weighs, and a check of that in the first step.

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

`LossCheck` compares, in the first step, the loss of two microbatches together with what their own losses come to.

    outputs and targets of microbatches 0 and 1, joined    one call of the loss           2.065
    their own losses, weighed as the step weighs them      0.5 * 2.104 + 0.5 * 2.016      2.060

If the two differ, the step trains another loss than that of its batch. The loss is a mean over something that nobody
counts, such as targets that are not padding; or it is a sum, or no mean at all. After these two, a microbatch is
compared only if its loss is not finite: nothing may count in it.

The check changes nothing. It calls a copy of a loss that is a module or another object, with outputs that want no
gradient, and puts the generators back. It is left out where it can't know: outputs that can't be joined along the
samples, a loss that draws random numbers, or one that gives another value when it is called again.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime.errors import BrokenContract, RuntimeFailure
from penstock.runtime.stage.module_state import untouched
from penstock.runtime.tensors.pytree import Skeleton, flatten, shown, unflatten
from penstock.runtime.tensors.rng import restored

if TYPE_CHECKING:
    from penstock.runtime.stage.microbatches import Microbatches

LossFn = Callable[..., Tensor] | None
"""(output, targets) -> the loss; None where there is none."""


def module_of(loss_fn: LossFn) -> nn.Module | None:
    """The module that computes a loss: the loss itself, or that whose method or partial it is. None if none does."""
    loss: Any = getattr(loss_fn, "__self__", getattr(loss_fn, "func", loss_fn))
    return loss if isinstance(loss, nn.Module) else None


def counts_targets(loss_fn: LossFn) -> bool:
    """Whether a loss says by a method of its own how many of the targets its mean is over."""
    return callable(getattr(loss_fn, "weight", None)) and not adds_up(loss_fn)


def counts_of(inputs: Sequence[Any], targets: Sequence[Any], loss_fn: LossFn) -> list[float]:
    """How many targets or samples the loss of each microbatch is a mean over."""
    return weights_of(targets, loss_fn) or sizes_of(inputs)


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
    return known is not None and known[1]("reduction") == "sum"


def weights_of(targets: Sequence[Any], loss_fn: LossFn) -> list[float] | None:
    """What the loss counts in each microbatch's targets; None where it does not say."""
    weight = getattr(loss_fn, "weight", None)
    if callable(weight):
        return [_number(weight(target)) for target in targets]
    known = _torch_loss(loss_fn)
    if known is None or not all(isinstance(target, Tensor) for target in targets):
        return None
    counts = [_count(*known, target) for target in targets]
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


Setting = Callable[[str], Any]
"""Gives a setting of one of torch's losses by its name."""


def _count(function: Any, setting: Setting, targets: Tensor) -> Tensor | int:
    """What the mean of one of torch's losses is over, in a microbatch's targets, or as many times that in each."""
    if function not in _OF_CLASSES or targets.is_floating_point():  # these are probabilities of classes
        is_over_samples = setting("reduction") == "batchmean" and targets.dim()
        return targets.shape[0] if is_over_samples else targets.numel()
    ignored, weight = targets == setting("ignore_index"), setting("weight")
    if weight is None:
        return (~ignored).sum()
    known = targets.long().clamp(0, len(weight) - 1)  # the loss itself refuses classes that are unknown
    return weight.detach().to(targets.device, torch.float64)[known].masked_fill(ignored, 0.0).sum()


_OF_CLASSES = (nn.CrossEntropyLoss.forward, functional.cross_entropy, nn.NLLLoss.forward, functional.nll_loss)
_DEFAULTS = {"reduction": "mean", "weight": None, "ignore_index": -100}
"""Of the functions."""


def _torch_loss(loss_fn: LossFn) -> tuple[Any, Setting] | None:
    """The function of one of torch's losses, or its module's forward, and its settings; None for any other loss."""
    function: Any = loss_fn
    setting: Setting = _DEFAULTS.__getitem__
    if isinstance(loss_fn, nn.Module):
        function = vars(loss_fn).get("forward", type(loss_fn).forward)
        setting = partial(getattr, loss_fn)
    elif isinstance(loss_fn, partial) and not loss_fn.args:
        function = loss_fn.func
        setting = {**_DEFAULTS, **loss_fn.keywords}.__getitem__
    is_known = getattr(function, "__module__", "") in ("torch.nn.functional", "torch.nn.modules.loss")
    return (function, setting) if is_known else None


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


@dataclass
class LossInputs:
    """The outputs and targets of a microbatch, and their loss once it is known.

    Attributes:
        leaves: the tensors of outputs and then of targets, detached. forms: the forms of both.
        given: the targets' tensors as the batch has them, before they are moved to a device.
        num_samples: as the batch was cut; None where nobody knows.
    """

    m: int
    leaves: list[Tensor]
    forms: tuple[Skeleton, Skeleton]
    given: list[Tensor]
    num_samples: float | None
    versions: list[int]
    loss: float = math.nan

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was changed in place since, by the loss or by a later forward."""
        return [leaf._version for leaf in self.leaves] == self.versions

    def values(self, leaves: Sequence[Tensor]) -> tuple[Any, Any]:
        """Outputs and targets of the same forms, of other tensors."""
        num = len(leaves) - len(self.given)
        return unflatten([*leaves[:num]], self.forms[0]), unflatten([*leaves[num:]], self.forms[1])


class LossCheck:
    """Checks the loss of a stage in its first training step.

    Attributes:
        is_over: whether the loss needs no check, or none any more, after the first step.
    """

    def __init__(self, loss_fn: LossFn, device: torch.device, is_over: bool) -> None:
        self._loss_fn, self._device = loss_fn, device
        self._before: LossInputs | None = None
        self._is_compared = False
        self.is_over = is_over or getattr(loss_fn, "by_microbatch", False) is True

    def drop(self) -> None:
        """Lets go of the outputs that a step has left."""
        self._before, self._is_compared = None, False

    def inputs(self, m: int, output: Any, target: Any, batch: Microbatches) -> LossInputs | None:
        """What the loss is about to be given. None if it can't be joined with another microbatch's."""
        try:
            outputs, form = flatten(output)
        except RuntimeFailure:
            return None
        targets, form_of_targets = flatten(target)
        leaves = outputs + targets
        if any(type(leaf) not in (Tensor, nn.Parameter) or leaf.is_meta or leaf.is_inference() for leaf in leaves):
            return None
        sizes, given = getattr(batch.targets, "sizes", None), flatten(batch.targets[m])[0]
        versions, detached = [leaf._version for leaf in leaves], [leaf.detach() for leaf in leaves]
        return LossInputs(m, detached, (form, form_of_targets), given, sizes and sizes[m], versions)

    def compare(self, now: LossInputs, loss: Tensor, batch: Microbatches) -> None:
        """Compares the loss with that of a microbatch before, if it is the first pair or one of both is not finite.

        Raises:
            BrokenContract: the loss of both together is not what their losses come to.
        """
        now.loss = float(loss.detach())
        before = self._before
        if before is None or math.isfinite(now.loss):
            self._before = now
        if before is None or before.m == now.m or not any(before.m in w and now.m in w for w in batch.windows):
            return
        if self._is_compared and math.isfinite(before.loss + now.loss):
            return
        scales = [batch.scales[m] for m in (before.m, now.m)]
        total = 1.0 if adds_up(self._loss_fn) else sum(scales)
        if not total or not (before.is_unchanged and now.is_unchanged):
            return
        weights = [scale / total for scale in scales]
        self._is_compared = True
        try:
            joined = _joined(before, now)
            together, losses = self._call(now, joined, torch.bfloat16), [before.loss, now.loss]
            if not _differ(together, _sum(losses, weights), losses):
                return
            # Perhaps by rounding, or as the loss depends on what earlier calls left, or on how many there were.
            exact, *each, again = self._exactly(now, [joined, before.leaves, now.leaves, now.leaves])
        except Exception:  # nothing to join, no loss of so many samples or of these types, or too little memory
            return
        if not _differ(exact, _sum(each, weights), each) or _differ(again, each[1], each):
            return
        if adds_up(self._loss_fn):
            how, kind, other = "added up", "mean", sum(losses) / 2
        else:
            how, kind, other = f"weighed {weights[0]:.3g} to {weights[1]:.3g}", "sum", sum(losses)
        hint = "" if _differ(together, other, losses) else f" It looks like a {kind}."
        output, target = now.values(now.leaves)
        raise BrokenContract(
            f"loss_fn gives {together:.6g} for microbatches {before.m} and {now.m} together. Their own losses, "
            f"{losses[0]:.6g} and {losses[1]:.6g}, come to {_sum(losses, weights):.6g}, {how}. So a step would train "
            f"another loss than that of its batch.{hint} Say what the loss is: give it a method weight(targets) that "
            'counts what its mean is over; or set loss_fn.adds_up = True if it sums (reduction="sum" of torch\'s '
            "losses); or loss_fn.by_microbatch = True if it is meant for each microbatch by itself. It was given "
            f"output {shown(output)} and targets {shown(target)}",
            7,
        )

    def _exactly(self, like: LossInputs, each: Sequence[Sequence[Tensor]]) -> list[float]:
        """The losses of outputs and targets in float64; in float32 if it has numbers of that type itself."""
        try:
            return [self._call(like, leaves, torch.float64) for leaves in each]
        except Exception:
            return [self._call(like, leaves, torch.float32) for leaves in each]

    def _call(self, like: LossInputs, leaves: Sequence[Tensor], dtype: torch.dtype) -> float:
        """The loss of outputs and targets in this type at least; not a number if it draws random numbers."""
        loss_fn: Any = self._loss_fn
        loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else copy.copy(loss_fn)
        types = [
            torch.promote_types(leaf.dtype, dtype) if leaf.is_floating_point() else leaf.dtype for leaf in leaves
        ]
        own = [leaf.to(wide, copy=True) for leaf, wide in zip(leaves, types, strict=True)]
        if isinstance(loss_fn, nn.Module) and types != [leaf.dtype for leaf in leaves]:
            loss_fn.to(dtype)
        output, target = like.values(own)
        is_compiling = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
        # A method is of the module itself, not of a copy.
        with restored(self._device) as has_drawn, eager, untouched(module_of(self._loss_fn)):
            loss = float(loss_fn(output, target).detach())
            return math.nan if has_drawn() else loss


def _joined(one: LossInputs, other: LossInputs) -> list[Tensor]:
    """Outputs and targets of both, sample after sample.

    Raises:
        ValueError: a tensor has no dimension of samples in front.
    """
    num_outputs = len(one.leaves) - len(one.given)
    are_whole = [False] * num_outputs + [a is b for a, b in zip(one.given, other.given, strict=True)]
    leaves = list(zip(one.leaves, other.leaves, are_whole, strict=True))
    (num, num_of_other), *others = {(_rows(a), _rows(b)) for a, b, is_whole in leaves[num_outputs:] if not is_whole}
    if others or one.forms != other.forms or one.num_samples not in (None, num):
        raise ValueError("samples are in another dimension, or nobody knows which")
    for a, b, is_whole in leaves:
        times = _rows(a) // num  # several for tokens in a row: [B * T, ...]
        fits = times and a.shape[1:] == b.shape[1:] and (_rows(a), _rows(b)) == (times * num, times * num_of_other)
        if not is_whole and (not fits or (times > 1 and num in a.shape[1:])):  # [T, B, ...]
            raise ValueError("an output has no sample for each target")
    return [a if is_whole else torch.cat([a, b]) for a, b, is_whole in leaves]


def _rows(leaf: Tensor) -> int:
    return leaf.shape[0] if leaf.dim() else 0


def _sum(losses: Sequence[float], weights: Sequence[float]) -> float:
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)


def _differ(one: float, other: float, losses: Sequence[float]) -> bool:
    """Whether one loss is not the other, but for rounding, a share of the losses' size, which terms of the order of 1
    have too. False if the first is no number: then nobody can know.
    """
    known = [abs(loss) for loss in (one, other, *losses) if math.isfinite(loss)]
    return math.isfinite(one) and not abs(one - other) <= 1e-5 * max([0.1, *known])
