"""The plain single-process loop that every pipeline must agree with, to the last bit.

It is written from the definition alone: cut the batch, run the plain model microbatch by microbatch, weigh the
losses, add up the gradients with autograd. Only the seeds of random draws are penstock's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.tensors.rng import mix

Model = nn.Sequential | Sequence[nn.Module]


def cut(value: Any, num: int) -> list[Any]:
    """One entry a microbatch; a list is one already."""
    if isinstance(value, list):
        return value
    if isinstance(value, Tensor):
        return list(value.tensor_split(num))
    if isinstance(value, tuple):
        return list(zip(*(cut(v, num) for v in value), strict=True))
    if isinstance(value, dict):
        parts = {key: cut(v, num) for key, v in value.items()}
        return [{key: parts[key][m] for key in value} for m in range(num)]
    return [value] * num


def first_tensor(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def seed_devices(seed: int) -> None:
    """`torch.manual_seed` for the devices that are there; that takes milliseconds where there are none, as it notes
    from where it was called for each kind of device that may yet come."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def call(model: Model, value: Any, seed: int | None) -> Any:
    """The model's output. A sequential passes on one value; stages of a list pass tuples and dicts as arguments."""
    for index, layer in enumerate(model):
        if seed is not None:
            seed_devices(mix(seed, index))
        if isinstance(model, nn.Sequential):
            value = layer(value)
        elif isinstance(value, tuple):
            value = layer(*value)
        elif isinstance(value, dict):
            value = layer(**value)
        else:
            value = layer(value)
    return value


def plain_step(
    model: Model,
    inputs: Any,
    targets: Any,
    num_microbatches: int,
    loss_fn: Callable[..., Tensor],
    *,
    step: int = 1,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Adds a step's gradients to the model's and returns the loss."""
    total, scales = None, weights(inputs, targets, num_microbatches, loss_fn)
    with torch.random.fork_rng(devices=[]):
        batch = zip(cut(inputs, num_microbatches), cut(targets, num_microbatches), strict=True)
        for m, (x, target) in enumerate(batch):
            with torch.autocast(first_tensor(x).device.type, autocast) if autocast else nullcontext():
                output = call(model, x, mix(mix(seed, step), m))
                loss = loss_fn(output, target)
            # Not 0 times a mean over nothing, which is no number.
            loss = loss * scales[m] if scales[m] else (first_tensor(output).nan_to_num() * 0).sum().to(loss.dtype)
            if loss.requires_grad:
                loss.backward()
            total = loss.detach().clone() if total is None else total + loss.detach()
    assert total is not None
    return total


def plain_evaluate(
    model: Model, inputs: Any, targets: Any, num_microbatches: int, loss_fn: Callable[..., Tensor]
) -> Tensor:
    """The loss in evaluation mode."""
    parts = list(model)
    modes = [(m, m.training) for part in parts for m in part.modules()]
    for part in parts:
        part.eval()
    scales = weights(inputs, targets, num_microbatches, loss_fn)
    total = torch.zeros(())
    with torch.no_grad():
        for x, target, scale in zip(
            cut(inputs, num_microbatches), cut(targets, num_microbatches), scales, strict=True
        ):
            loss = loss_fn(call(model, x, None), target)
            total = total + (loss * scale if scale else torch.zeros_like(loss))
    for module, training in modes:
        module.training = training
    return total


def weights(inputs: Any, targets: Any, num: int, loss_fn: Callable[..., Tensor]) -> list[float]:
    """Each microbatch's share of the batch's loss."""
    if getattr(loss_fn, "adds_up", False) or setting(loss_fn, "reduction") == "sum":
        return [1.0] * num
    if callable(getattr(loss_fn, "weight", None)):
        counts = [float(loss_fn.weight(target)) for target in cut(targets, num)]
    elif of_torch(loss_fn):
        counts = [counted(loss_fn, target) for target in cut(targets, num)]
    else:
        counts = [float(len(first_tensor(x))) for x in cut(inputs, num)]
    return [count / sum(counts) if sum(counts) else 0.0 for count in counts]


def named_as(model: Model) -> nn.Module:
    """A module whose parameters have the names that a pipeline gives them: a list's stages are numbered, and the only
    stage of a model has its own names.
    """
    if isinstance(model, nn.Sequential):
        return model
    stages = list(model)
    return nn.ModuleList(stages) if len(stages) > 1 else stages[0]


def of_torch(loss_fn: Any) -> bool:
    """Whether torch wrote what the loss computes."""
    if isinstance(loss_fn, nn.Module):
        return type(loss_fn).forward.__module__ == "torch.nn.modules.loss"
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return getattr(function, "__module__", "") == "torch.nn.functional"


def setting(loss_fn: Any, name: str) -> Any:
    """A setting of torch's losses."""
    keywords = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    defaults = {"reduction": "mean", "ignore_index": -100, "weight": None}
    return keywords.get(name, getattr(loss_fn, name, defaults[name]))


def counted(loss_fn: Any, target: Tensor) -> float:
    """What a mean of torch's divides by."""
    name = getattr(getattr(loss_fn, "func", loss_fn), "__name__", type(loss_fn).__name__)
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) or name in ("cross_entropy", "nll_loss"):
        if target.is_floating_point():
            return float(target.select(1, 0).numel())
        weight, found = setting(loss_fn, "weight"), 0.0
        for label in target.flatten().tolist():
            if label != setting(loss_fn, "ignore_index"):
                found += 1.0 if weight is None else weight[label].item()
        return found
    if setting(loss_fn, "reduction") == "batchmean" or name.lower().startswith("multilabel"):
        return float(len(target))
    return float(target.numel())


def gradients(model: Model) -> dict[str, Tensor | None]:
    """Copies of the gradients by name."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in named_as(model).named_parameters()}


def differences(want: dict[str, Tensor | None], got: dict[str, Tensor | None]) -> list[str]:
    """In words, where two sets of gradients are not the same to the bit; empty where they are."""
    found = [f"{name} is in one only" for name in want.keys() ^ got.keys()]
    for name in want.keys() & got.keys():
        a, b = want[name], got[name]
        if a is None or b is None:
            if a is not b:
                found.append(f"{name} is {'None' if a is None else 'a tensor'}, want the other")
        elif not torch.equal(a, b):
            found.append(f"{name} differs by {(a - b).abs().max():g}")
    return sorted(found)
