"""Random stages that return views of their outputs, as the plain loop."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
from plain_loop import differences, gradients, plain_step
from recomputed import with_recompute
from tiers import examples

pytestmark = pytest.mark.property

W = 6
MSE = nn.MSELoss()

VIEWS = [
    lambda t, r: t.view(t.shape),
    lambda t, r: t.t().t(),
    lambda t, r: t[:, r.randrange(3) :],
    lambda t, r: t[:, : r.randrange(3, W + 1)],
    lambda t, r: t[:, :: r.randrange(1, 3)],
    lambda t, r: t.detach(),
    lambda t, r: t.unsqueeze(0).squeeze(0),
    lambda t, r: t.flip(1) if r.random() < 0.2 else t.narrow(1, 0, max(1, t.shape[1] // 2)),
    lambda t, r: t.unfold(1, 1, 1).squeeze(-1),
    lambda t, r: t.diagonal()[None].expand(t.shape[0], -1),
    lambda t, r: t.select(0, 0)[None].expand(t.shape[0], -1),
]


class Program(nn.Module):
    """A random stage: what it does follows from its seed alone."""

    def __init__(self, seed: int, last: bool) -> None:
        super().__init__()
        self.seed, self.last = seed, last
        self.layer = nn.Linear(W, W)
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, *values: Tensor) -> Any:
        r = random.Random(self.seed)
        pool = list(values)
        for _ in range(r.randrange(4)):
            t = r.choice(pool)
            pool.append([t * self.scale, t + 0.5, t.detach().cos(), t.detach() * 0.9][r.randrange(4)])
        total = sum(t.tanh().mean(1, keepdim=True) * (k + 1) for k, t in enumerate(pool))
        if self.last:
            return self.layer(torch.ones(values[0].shape[0], W)) * total
        h = self.layer(total.expand(-1, W).cos())
        if r.random() < 0.3:
            h = h + 1
        pool.append(h)
        out = [h]
        for _ in range(r.randrange(4)):
            view = r.choice(VIEWS)(r.choice(out if r.random() < 0.7 else pool), r)
            (out if r.random() < 0.8 else pool).append(view)
        if r.random() < 0.3:
            out.append(r.choice(pool))
        r.shuffle(out)
        return tuple(out)


def wrong(seed: int, name: str, stages: int, recomputed: bool) -> str:
    """Nothing, where the pipeline does as the plain loop."""
    torch.manual_seed(seed)
    model = [Program(seed * 10 + s, s == stages - 1) for s in range(stages)]
    x, y = [torch.randn(4, W) for _ in range(2)], torch.randn(8, W)
    plain = copy.deepcopy(model)
    loss = plain_step(plain, copy.deepcopy(x), y, 2, MSE)
    schedule = ps.build(name, stages, 2)
    pipe = ps.Pipeline(model, with_recompute(schedule) if recomputed else schedule, loss_fn=MSE)
    result = pipe.step(copy.deepcopy(x), y, update=False)
    if not torch.allclose(result.loss, loss):
        return f"loss {result.loss}, want {loss}"
    want, got = gradients(plain), gradients(model)
    # A copy of a view lies in memory in another way, so sums over it may be rounded otherwise.
    far = [name for name in want if not _close(want[name], got[name])]
    return "; ".join(text for text in differences(want, got) if text.split()[0] in far)


def _close(want: Tensor | None, got: Tensor | None) -> bool:
    if want is None or got is None:
        return want is got
    return torch.allclose(want, got, rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(2, 4), st.booleans())
def test_as_the_plain_loop(seed: int, name: str, stages: int, recomputed: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = wrong(seed, name, stages, recomputed)
    assert not found
