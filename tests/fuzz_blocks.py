"""Building blocks of random models: each takes and returns `[B, T, D]`, and does something that is easy to get wrong.

    BLOCKS["attention"](D) -> nn.Module

`FORKS` begin a span in which several values travel: `Fork`, any number of `OnFirst(block)`, `Join`.
A fork's values may share memory (`SHARING`); these are not changed in place further on (sentence 6 of the contract).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.models.block import TransformerBlock


def real(x: Tensor) -> Tensor:
    """In the type that a case computes in: float32, or float64 where it is judged again."""
    return x.to(torch.get_default_dtype())


def complex_type() -> torch.dtype:
    return torch.get_default_dtype().to_complex()


BLOCKS: dict[str, Callable[[int], nn.Module]] = {}
"""By name, functions of the width D."""

HEADS = 2


def block(name: str) -> Callable[[Callable[[int], nn.Module]], Callable[[int], nn.Module]]:
    def keep(make: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
        BLOCKS[name] = make
        return make

    return keep


def begins_above_zero(x: Tensor) -> bool:
    """A choice by what `x` holds. The sum would be no choice: after a norm it is what rounding leaves of zero, and
    whoever adds in another order would choose otherwise.
    """
    return float(x.detach().flatten()[0]) > 0


class Swapped(nn.Module):
    """Runs a module of channels first, as `[B, D, T]`."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Around(nn.Module):
    """Adds what a function of a module and its input gives to the input."""

    def __init__(self, inner: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self._function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return x + self._function(self.inner, x)


BLOCKS["linear"] = lambda d: nn.Linear(d, d)
BLOCKS["linear without bias"] = lambda d: nn.Linear(d, d, bias=False)
BLOCKS["mlp"] = lambda d: nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
BLOCKS["residual"] = lambda d: Around(nn.Sequential(nn.Linear(d, d), nn.Tanh()), lambda inner, x: inner(x))
BLOCKS["layer norm"] = lambda d: nn.LayerNorm(d)
BLOCKS["rms norm"] = lambda d: nn.RMSNorm(d)
BLOCKS["batch norm"] = lambda d: Swapped(nn.BatchNorm1d(d))
BLOCKS["conv + batch norm"] = lambda d: Swapped(nn.Conv1d(d, d, 3, padding=1), nn.BatchNorm1d(d), nn.ReLU())
BLOCKS["circular conv"] = lambda d: Swapped(nn.Conv1d(d, d, 3, padding=1, padding_mode="circular", groups=2))
BLOCKS["transposed conv"] = lambda d: Swapped(nn.ConvTranspose1d(d, d, 3, padding=1))
BLOCKS["group norm"] = lambda d: Swapped(nn.GroupNorm(2, d))
BLOCKS["instance norm"] = lambda d: Swapped(nn.InstanceNorm1d(d, affine=True, track_running_stats=True))
BLOCKS["dropout"] = lambda d: nn.Dropout(0.2)
BLOCKS["prelu"] = lambda d: nn.PReLU()
BLOCKS["nested sequential"] = lambda d: nn.Sequential(nn.Sequential(nn.Linear(d, d)), nn.Sequential(nn.SiLU()))
BLOCKS["relu in place"] = lambda d: nn.Sequential(nn.Linear(d, d), nn.ReLU(inplace=True))
BLOCKS["nothing"] = lambda d: nn.Identity()
BLOCKS["bilinear"] = lambda d: Around(nn.Bilinear(d, d, d), lambda inner, x: inner(x, x))
BLOCKS["transformer layer"] = lambda d: nn.TransformerEncoderLayer(d, HEADS, 2 * d, batch_first=True)
BLOCKS["gpt block"] = lambda d: TransformerBlock(d, HEADS)
BLOCKS["attention"] = lambda d: Around(
    nn.MultiheadAttention(d, HEADS, batch_first=True), lambda inner, x: inner(x, x, x)[0]
)
BLOCKS["gru"] = lambda d: Around(nn.GRU(d, d, batch_first=True), lambda inner, x: inner(x)[0])
BLOCKS["lstm"] = lambda d: Around(nn.LSTM(d, d, batch_first=True), lambda inner, x: inner(x)[0])
BLOCKS["rnn"] = lambda d: Around(nn.RNN(d, d, batch_first=True), lambda inner, x: inner(x)[0])
BLOCKS["weight norm"] = lambda d: nn.utils.parametrizations.weight_norm(nn.Linear(d, d))
BLOCKS["spectral norm"] = lambda d: nn.utils.parametrizations.spectral_norm(nn.Linear(d, d))
BLOCKS["checkpoint"] = lambda d: Around(
    nn.Sequential(nn.Linear(d, d), nn.Dropout(0.2), nn.Tanh()),
    lambda inner, x: checkpoint(inner, x, use_reentrant=False),
)
BLOCKS["reentrant checkpoint"] = lambda d: Around(
    nn.Sequential(nn.Linear(d, d), nn.Tanh()), lambda inner, x: checkpoint(inner, x, use_reentrant=True)
)
BLOCKS["second use by hand"] = lambda d: Around(
    nn.Linear(d, d),
    lambda inner, x: inner(x) + x @ inner.weight,  # type: ignore[operator]
)
BLOCKS["called twice"] = lambda d: Around(nn.Linear(d, d), lambda inner, x: inner(torch.tanh(inner(x))))
BLOCKS["functional call"] = lambda d: Around(
    nn.Linear(d, d),
    lambda inner, x: torch.func.functional_call(inner, {n: p * 0.5 for n, p in inner.named_parameters()}, (x,)),
)
BLOCKS["vmap"] = lambda d: Around(nn.Linear(d, d), lambda inner, x: torch.func.vmap(inner)(x))
BLOCKS["no grad"] = lambda d: Around(nn.Linear(d, d), lambda inner, x: inner(x).detach())
BLOCKS["float64 inside"] = lambda d: Around(
    nn.Linear(d, d, dtype=torch.float64), lambda inner, x: real(inner(x.double()))
)


@block("complex linear")
def complex_linear(d: int) -> nn.Module:
    return Around(nn.Linear(d, d, dtype=complex_type()), lambda inner, x: inner(torch.complex(x, x * 0.3)).real)


@block("complex conv")
def complex_conv(d: int) -> nn.Module:
    inner = nn.Conv1d(d, d, 1, dtype=complex_type())
    return Around(inner, lambda inner, x: inner(torch.complex(x, -x).transpose(1, 2)).transpose(1, 2).imag)


@block("complex product")
class ComplexProduct(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, dtype=complex_type()))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(complex_type()) * self.weight).abs()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g * weight**3, (g * x * 3 * weight**2).sum_to_size(weight.shape)


@block("custom function")
class CustomFunction(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(x, self.weight)


@block("in place on a clone")
class InPlaceOnClone(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 0] = 0.5
        return y.mul_(1.5)


@block("mixture")
class Mixture(nn.Module):
    """Sends each sample to one of three experts, so that some get no gradient."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, 3)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x.mean(1)).softmax(-1)
        chosen = weights.argmax(-1)
        parts = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            own = chosen == e
            if own.any():
                parts = parts.index_add(
                    0, own.nonzero()[:, 0], (expert(x[own]) * weights[own, e, None, None]).to(x.dtype)
                )
        return x + parts


@block("a second use in some microbatches")
class SometimesTwice(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if begins_above_zero(x):
            y = y + 0.1 * F.linear(x, self.linear.weight.t())
        return y


@block("used in some microbatches")
class SometimesUsed(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if begins_above_zero(x) else x * 1.0


@block("lora")
class Adapted(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.base = nn.Linear(d, d).requires_grad_(False)
        self.down, self.up = nn.Linear(d, 2, bias=False), nn.Linear(2, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


@block("frozen")
class Frozen(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@block("double backward")
class DoubleBackward(nn.Module):
    """A gradient of a part of the model is part of its output, as in a gradient penalty."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.forward(x).detach()
        inner = x.detach().requires_grad_()
        slope = torch.autograd.grad(real(torch.tanh(self.linear(inner))).square().sum(), inner, create_graph=True)[0]
        return x + 0.1 * slope


@block("embedding")
class Quantised(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.table = nn.Embedding(5, d, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((real(x.detach()).abs().mean(-1) * 4).long().clamp(max=4))


@block("running mean")
class RunningMean(nn.Module):
    """A buffer that every training forward changes, and that the output does not hang on in training."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(real(x.detach()).mean((0, 1)), alpha=0.1)
                self.count.add_(1)
            return x * self.scale
        return x * self.scale - self.mean


@block("hooked parameter")
def hooked_parameter(d: int) -> nn.Module:
    made = nn.Linear(d, d)
    made.weight.register_hook(_halved)
    return made


def _halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


@block("module hooks")
def module_hooks(d: int) -> nn.Module:
    made = nn.Linear(d, d)
    made.register_forward_hook(lambda module, args, output: output * 1.25)
    made.register_full_backward_hook(lambda module, into, out: tuple(None if g is None else g * 0.75 for g in into))
    return made


@block("a gradient kept elsewhere")
class MainGrad(nn.Module):
    """Adds each gradient to a sum of its own as soon as autograd has it, as Megatron's `main_grad` does."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)
        self.recorded = torch.zeros(d, d)
        self._watch()

    def _watch(self) -> None:
        self._node = self.linear.weight.expand_as(self.linear.weight).grad_fn.next_functions[0][0]
        self._node.register_hook(self._take)

    def __deepcopy__(self, memo: dict[int, Any]) -> MainGrad:
        made = MainGrad(len(self.recorded))
        made.load_state_dict(self.state_dict())
        memo[id(self)] = made
        return made

    def _take(self, *_: Any) -> None:
        if self.linear.weight.grad is not None:
            self.recorded = self.recorded.to(self.linear.weight.device) + self.linear.weight.grad
            self.linear.weight.grad = None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@block("compiled")
class Compiled(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)
        self._run = torch.compile(self._plain, backend="eager", dynamic=False)

    def _plain(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        made = Compiled(self.linear.in_features)
        made.load_state_dict(self.state_dict())
        memo[id(self)] = made
        return made


@block("extra state")
class ExtraState(nn.Module):
    """Something a checkpoint must hold that is neither parameter nor buffer."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(d, d), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.linear(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Tied(nn.Module):
    """A linear layer whose weight other layers of the model have too."""

    def __init__(self, weight: nn.Parameter, transposed: bool) -> None:
        super().__init__()
        self.weight, self._transposed = weight, transposed

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight.t() if self._transposed else self.weight)


# Spans in which several values travel.

FORKS: dict[str, Callable[[Tensor], Any]] = {
    "a clone": lambda x: (x, x.clone()),
    "the same twice": lambda x: (x, x),
    "a view": lambda x: (x, x[:, :1]),
    "two halves": lambda x: (x[..., ::2].repeat_interleave(2, -1), x[..., 1::2]),
    "a transposed view": lambda x: (x, x.transpose(1, 2)),
    "detached": lambda x: (x, x.detach()),
    "a dict": lambda x: {"x": x, "skip": x * 0.5},
    "a dict with a view": lambda x: {"x": x, "skip": x[..., :2]},
    "whole numbers": lambda x: (x, (x.detach() * 3).long()),
    "a mask": lambda x: (x, x.detach() > 0),
}

SHARING = frozenset({"a view", "a transposed view", "detached", "a dict with a view"})
"""Forks whose values share memory. They arrive as separate tensors, so a change in place of one is not seen."""


class Fork(nn.Module):
    def __init__(self, d: int, kind: str) -> None:
        super().__init__()
        self.linear, self._kind = nn.Linear(d, d), kind

    def forward(self, x: Tensor) -> Any:
        return FORKS[self._kind](self.linear(x))


class OnFirst(nn.Module):
    """Runs a block on the first of several values and passes the others on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {**value, "x": self.inner(value["x"])}
        return (self.inner(value[0]), *value[1:])


class InPlace(nn.Module):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5).add_(0.25)


class Join(nn.Module):
    def forward(self, value: Any) -> Tensor:
        x, skip = value.values() if isinstance(value, dict) else value
        if not skip.is_floating_point():
            return x * (1 + 0.1 * real(skip))
        mean = real(skip).flatten(1).mean(1)[:, None, None]
        return x + mean * 0.5 + (skip * skip).sum(dim=tuple(range(1, skip.dim())))[:, None, None] * 0.01
