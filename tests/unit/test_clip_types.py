"""Clipping gradients of several types: as torch does it, to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from plain_loop import differences, gradients, plain_step
from runtime_cases import batches
from tiers import others_nightly

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float32]


class Typed(nn.Module):
    """Computes in another type; a parameter without gradient, and one without elements, lie in between."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0))
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=dtype) * 0.5)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype) @ self.weight
        y = y.real if y.is_complex() else y
        return (y.float() * self.scale).tanh() + 0.1 * x + self.empty.sum()


@pytest.mark.parametrize("max_norm", [1e-4, 0.5, 1e9])
@pytest.mark.parametrize("seed", others_nightly(range(4), [0]))
@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 1), ("1f1b", 3), ("zb-h1", 6)])
def test_clipping_of_gradients_of_several_types(name: str, ranks: int, seed: int, max_norm: float) -> None:
    """Norms were combined in the model's order, and torch combines them type by type."""
    torch.manual_seed(seed)
    model = nn.Sequential(*map(Typed, TYPES * 6))
    plain = copy.deepcopy(model)
    x, y = batches(4, 8)[0]
    plain_step(plain, x, y, 4, MSE)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    pipe = ps.Pipeline(
        model,
        ps.build(name, ranks, 4),
        loss_fn=MSE,
        optimizer=Kept,
        precision=ps.PrecisionOptions(clip_norm=max_norm),
    )
    got = pipe.step(x, y).grad_norm
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert not differences(
        gradients(plain), dict(zip(dict(plain.named_parameters()), pipe.optimizer.seen, strict=True))
    )


class Kept(torch.optim.SGD):
    """Notes the gradients that it steps by."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: list[Tensor | None] = []

    def step(self, closure: None = None) -> None:
        self.seen = [None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]]


def test_clipping_where_nothing_has_a_gradient() -> None:
    stages = [nn.Sequential(nn.Linear(8, 8)).requires_grad_(False), nn.Tanh()]
    pipe = ps.Pipeline(stages, ps.build("1f1b", 2, 4), loss_fn=MSE, precision=ps.PrecisionOptions(clip_norm=1.0))
    x, y = batches(4, 8)[0]
    norm = pipe.step(x.requires_grad_(), y).grad_norm  # the loss has a gradient, in the inputs alone
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(stages[0].parameters(), 1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_makes_the_norm_none(bad: float) -> None:
    """A norm that is no number was left out, and the others were clipped as if nothing were wrong."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each[0].bias.register_hook(lambda g: g * bad)
    x, y = batches(4, 8)[0]
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE, precision=ps.PrecisionOptions(clip_norm=1.0))
    plain_step(plain, x, y, 4, MSE)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    got = pipe.step(x, y).grad_norm
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert bool(got.isnan()) == bool(want.isnan())
