"""The reference loop: one step of a model without a schedule, one microbatch after another.

    for each microbatch:   forward -> loss, weighed as `ps.Pipeline` weighs it -> backward

A pipeline seeds torch's generators before each layer, so that random draws (dropout) do not depend on the schedule.
The loop seeds them at the same places. So its loss and its gradients equal the pipeline's to the bit, with dropout
too. `Pipeline.verify` runs this loop for the user's own model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.execute.step_end import sum_in_order
from penstock.runtime.partitioning.cutting import Split, build_stage, stages_of
from penstock.runtime.partitioning.traced_stage import WholeModel
from penstock.runtime.stage.batch_rules import BatchRules, require_keys, rules_of
from penstock.runtime.stage.loss import weightless
from penstock.runtime.stage.microbatches import Microbatches, cut_batch
from penstock.runtime.stage.ops import casting
from penstock.runtime.stage.stage import StageSource
from penstock.runtime.tensors.pytree import device_of, flatten, unflatten
from penstock.runtime.tensors.rng import mix, restored
from penstock.runtime.tensors.storage import copy_of, storage_of

Forward = Callable[[Any, int], Any]
"""(inputs of a microbatch, its seed) -> the model's output."""


def plain_step(
    model: nn.Module | Sequence[StageSource],
    inputs: Any,
    targets: Any = None,
    *,
    loss_fn: Callable[..., Tensor],
    num_microbatches: int,
    seed: int = 0,
    step: int = 1,
    autocast: torch.dtype | None = None,
    batch: BatchRules | None = None,
) -> Tensor:
    """Runs a step of a plain training loop, as the reference for `ps.Pipeline`.

    The gradients are added to the model's `.grad`. No optimizer runs. With the same arguments, a synchronous schedule
    with one pipeline gives the same loss and gradients, to the bit, dropout included.

    Args:
        model: a module, the result of `ps.split`, or a list of modules that are called one after another.
        inputs: the whole batch, as for `pipe.step`.
        targets: the targets, as for `pipe.step`.
        loss_fn: the loss, as for `ps.Pipeline`.
        num_microbatches: the number of microbatches that the batch is cut into.
        seed: the pipeline's `seed`.
        step: the number of the pipeline's step to compare with, counted from 1. Each step draws other numbers.
        autocast: the pipeline's `PrecisionOptions.autocast`.
        batch: how inputs and targets are cut, as for `ps.Pipeline`.

    Returns:
        The loss of the batch, as `StepResult.loss`.

    Raises:
        RuntimeFailure: a batch that can't be cut into so many microbatches.

    Examples:
        >>> import copy, torch, penstock as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        >>> plain, x, y, loss_fn = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 1), torch.nn.MSELoss()
        >>> with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=loss_fn) as pipe:
        ...     loss = pipe.step(x, y, update=False).loss
        >>> torch.equal(loss, ps.plain_step(plain, x, y, loss_fn=loss_fn, num_microbatches=4))
        True
        >>> all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
        True
    """
    require_keys(batch, inputs, targets)
    rules = rules_of(model, batch, inputs)
    cut = cut_batch(inputs, targets, num_microbatches, loss_fn, rules=rules)
    device = device_of(inputs[0] if isinstance(inputs, list) else inputs)
    with restored(device):
        forward = own_forward(model)
        losses = run_plain(forward, cut, loss_fn, mix(seed, step), autocast, device)
    return sum_in_order(torch.stack(losses).cpu())


def run_plain(
    forward: Forward,
    batch: Microbatches,
    loss_fn: Callable[..., Tensor],
    seed: int,
    autocast: torch.dtype | None,
    device: torch.device,
) -> list[Tensor]:
    """Runs forwards and backwards, microbatch after microbatch. Returns each microbatch's share of the loss."""
    losses, first = [], batch.replica * len(batch)
    for m, (value, target) in enumerate(zip(batch.inputs[0], batch.targets, strict=True)):
        value, target = _on_device(value, device), _on_device(target, device)
        with casting(device, autocast):
            output = forward(value, mix(seed, first + m))
            loss, scale = loss_fn(output, target), batch.scales[m]
            loss = loss * scale if scale else weightless(loss, output)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach().reshape(()))
    return losses


def _on_device(value: Any, device: torch.device) -> Any:
    leaves, skeleton = flatten(value)
    return unflatten([leaf.to(device) for leaf in leaves], skeleton)


def own_forward(model: nn.Module | Sequence[StageSource]) -> Forward:
    """The model's own forward, each layer of which draws from the seed that a pipeline would give it."""
    if isinstance(model, Split):
        return WholeModel(model.model, tracing=model.tracing)
    if isinstance(model, nn.Module):
        return chained(stages_of(model, 1))
    return chained([build_stage(source, index, len(model)) for index, source in enumerate(model)])


def chained(stages: Sequence[Any], *, separates: bool = False) -> Forward:
    """The forward of stages that are called one after another.

    Args:
        separates: whether a stage gets the outputs of the one before as it does in a pipeline: in other tuples, lists
            and dicts, and where they share memory, as separate tensors.
    """

    def forward(value: Any, seed: int) -> Any:
        for number, stage in enumerate(stages):
            value = stage(separated(value) if separates and number else value, seed)
        return value

    return forward


def separated(value: Any) -> Any:
    """Returns the outputs in new containers. A tensor that shares memory with an earlier tensor becomes a copy."""
    leaves, skeleton = flatten(value)
    taken: set[int] = set()
    for place, leaf in enumerate(leaves):
        address = storage_of(leaf)
        leaves[place] = _SeparateCopy.apply(leaf) if address and address in taken else leaf
        taken.add(address)
    return unflatten(leaves, skeleton)


class _SeparateCopy(torch.autograd.Function):
    """Copies a tensor to other memory with the same strides, so that kernels round alike."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return copy_of(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
