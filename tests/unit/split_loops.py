"""The plain loop and the split one over the same microbatches, for the split backward's tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from penstock.runtime.split_backward import Tape, prepare
from plain_loop import seed_devices

Grads = dict[str, Tensor | None]


def batches(*shape: int, num: int = 3) -> list[Tensor]:
    return [torch.randn(*shape) for _ in range(num)]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def plain_loop(stage: nn.Module, inputs: Sequence[Tensor]) -> Grads:
    grads: Grads = {}
    for m, x in enumerate(inputs):
        x = leaf(x)
        seed_devices(m)
        stage(x).square().sum().backward()
        grads[f"input {m}"] = x.grad
    return grads | {name: p.grad for name, p in stage.named_parameters()}


def split_loop(stage: nn.Module, inputs: Sequence[Tensor], held: Callable[[int], None] = lambda _: None) -> Grads:
    """F0 F1 I0 F2 I1 W0 ...; `held` is told the bytes that each I leaves for W."""
    prepare(stage)
    leaves = [leaf(x) for x in inputs]
    tapes: list[Tape] = []
    losses: list[Tensor] = []
    for turn in range(len(inputs) + 2):
        if turn < len(inputs):
            tapes.append(Tape())
            seed_devices(turn)
            with tapes[turn].recording():
                losses.append(stage(leaves[turn]).square().sum())
        if 0 < turn <= len(inputs):
            tapes[turn - 1].backward_input([losses[turn - 1]], [None])
            held(tapes[turn - 1].deferred_bytes)
        if turn > 1:
            tapes[turn - 2].backward_weight()
    grads: Grads = {f"input {m}": x.grad for m, x in enumerate(leaves)}
    return grads | {name: p.grad for name, p in stage.named_parameters()}


def assert_same(stage: nn.Module, inputs: Sequence[Tensor], steps: int = 2) -> int:
    """Both loops, gradients added up over `steps`, give the same bits; the bytes that were held for W."""
    stage.zero_grad()
    twin = copy.deepcopy(stage)  # leaves .grad behind
    total: list[int] = []
    for _ in range(steps):
        want, got = plain_loop(stage, inputs), split_loop(twin, inputs, total.append)
        assert want.keys() == got.keys()
        for name, grad in want.items():
            other = got[name]
            assert (grad is None) == (other is None), name
            if grad is not None and other is not None:
                assert torch.equal(grad, other), name
    return sum(total)
