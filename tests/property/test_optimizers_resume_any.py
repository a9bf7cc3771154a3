"""Any of torch's optimizers, saved and loaded under any numbers of stages, goes on bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, StepLR

import penstock as ps
from tiers import examples

pytestmark = pytest.mark.property

WIDTH = 6
Make = Callable[[list[Parameter]], optim.Optimizer]


def by_shape(kind: Callable[..., optim.Optimizer], **options: float) -> Make:
    """Two groups: matrices, and the rest at half of the rate."""

    def make(params: list[Parameter]) -> optim.Optimizer:
        matrices, rest = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        return kind([{"params": matrices}, {"params": rest, "lr": 0.005}], lr=0.01, **options)

    return make


def muon_beside(params: list[Parameter]) -> optim.Optimizer:
    return ps.runtime.MuonAdamW(params, lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "Adadelta": by_shape(optim.Adadelta),
    "Adafactor": by_shape(optim.Adafactor),
    "Adagrad": by_shape(optim.Adagrad, lr_decay=0.1),
    "Adam": by_shape(optim.Adam, amsgrad=True),
    "AdamW": by_shape(optim.AdamW, weight_decay=0.1),
    "Adamax": by_shape(optim.Adamax),
    "ASGD": by_shape(optim.ASGD),
    "Muon": partial(optim.Muon, lr=0.01),
    "NAdam": by_shape(optim.NAdam),
    "RAdam": by_shape(optim.RAdam),
    "RMSprop": by_shape(optim.RMSprop, momentum=0.5),
    "Rprop": by_shape(optim.Rprop),
    "SGD": by_shape(optim.SGD, momentum=0.9),
    "SparseAdam": partial(optim.SparseAdam, lr=0.01),
    "MuonAdamW": muon_beside,
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], LRScheduler]] = {
    "cosine": partial(CosineAnnealingLR, T_max=9),
    "lambda": partial(LambdaLR, lr_lambda=lambda step: 1.0 / (1 + step)),
    "one cycle": partial(OneCycleLR, max_lr=0.05, total_steps=20),
    "step": partial(StepLR, step_size=2, gamma=0.5),
}
NO_MOMENTUM = ("Adagrad", "Adadelta", "Adafactor", "Rprop", "Muon", "SparseAdam", "ASGD")
"""A cycle also wants a momentum, which these have not, or not in every group."""


class Table(nn.Module):
    """Looks rows up, and has gradients for these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(x[:, 0].abs().long() % 7)


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "SparseAdam":
        return nn.Sequential(*(Table() for _ in range(4)))
    bias = kind != "Muon"
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias) for _ in range(4)), nn.Linear(WIDTH, WIDTH, bias))


class Run:
    """A pipeline with a learning-rate schedule."""

    def __init__(self, kind: str, num_stages: int, scheduler: str) -> None:
        order = ps.build("1f1b", num_stages, 4)
        self.pipe = ps.Pipeline(model(kind), order, loss_fn=nn.MSELoss(), optimizer=OPTIMIZERS[kind])
        assert self.pipe.optimizer is not None
        self.scheduler = SCHEDULERS[scheduler](self.pipe.optimizer)

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            self.pipe.step(x, x.roll(1, 1))
            self.scheduler.step()


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(list(OPTIMIZERS)),
    scheduler=st.sampled_from(list(SCHEDULERS)),
    saved=st.integers(1, 4),
    loaded=st.integers(1, 4),
    before=st.integers(0, 3),
    stale=st.integers(0, 2),
)
def test_any_optimizer_goes_on_bit_for_bit(
    kind: str, scheduler: str, saved: int, loaded: int, before: int, stale: int
) -> None:
    """`stale` steps are made by the run that then loads."""
    if scheduler == "one cycle" and kind in NO_MOMENTUM:
        scheduler = "cosine"
    run, after = Run(kind, saved, scheduler), Run(kind, loaded, scheduler)
    run.train(range(before))
    after.train(range(50, 50 + stale))
    with tempfile.TemporaryDirectory() as folder:
        run.pipe.save(folder, stateful={"scheduler": run.scheduler})
        after.pipe.load(folder, stateful={"scheduler": after.scheduler})
    run.train(range(before, before + 3))
    after.train(range(before, before + 3))
    mine, theirs = (dict(each.pipe.named_parameters()) for each in (run, after))
    assert all(torch.equal(p, theirs[name]) for name, p in mine.items())
