"""The plain loop of a model with a forward of its own, seeded where a pipeline of its stages seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.tensors.rng import mix
from plain_loop import cut, seed_devices, weights


def called(model: nn.Module, value: Any) -> Any:
    if isinstance(value, tuple):
        return model(*value)
    return model(**value) if isinstance(value, dict) else model(value)


@contextmanager
def seeded(model: nn.Module, layers: Sequence[str], seed: int) -> Iterator[None]:
    """Each layer's draws come from the seed and the number of its call."""
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1
        seed_devices(mix(seed, count))

    modules = dict.fromkeys(model.get_submodule(path) for path in layers)
    handles = [module.register_forward_pre_hook(hook) for module in modules]
    seed_devices(mix(seed, 0))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def plain_step(
    model: nn.Module,
    layers: Sequence[str],
    inputs: Any,
    targets: Any,
    num: int,
    loss_fn: Callable[..., Tensor],
    step: int = 1,
) -> Tensor:
    """Adds a step's gradients to the model's and returns the loss."""
    total, scales = None, weights(inputs, targets, num, loss_fn)
    with torch.random.fork_rng(devices=[]):
        for m, (x, target) in enumerate(zip(cut(inputs, num), cut(targets, num), strict=True)):
            with seeded(model, layers, mix(mix(0, step), m)):
                output = called(model, x)
            loss = loss_fn(output, target) * scales[m]
            loss.backward()
            total = loss.detach().clone() if total is None else total + loss.detach()
    assert total is not None
    return total


def plain_evaluate(model: nn.Module, inputs: Any, targets: Any, num: int, loss_fn: Callable[..., Tensor]) -> Tensor:
    total, scales = torch.zeros(()), weights(inputs, targets, num, loss_fn)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        for x, target, scale in zip(cut(inputs, num), cut(targets, num), scales, strict=True):
            total = total + loss_fn(called(model, x), target) * scale
    for module, training in modes:
        module.training = training
    return total


def state(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of parameters, gradients and buffers, by name."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    found.update((name, buffer.clone()) for name, buffer in model.named_buffers())
    return found
