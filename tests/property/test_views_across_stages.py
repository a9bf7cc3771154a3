"""Tensors that share memory, changed in place and used by any stage: as the plain loop to the last bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
from tiers import examples

pytestmark = pytest.mark.property

D, NUM = 6, 4
VIEWS = {
    "slice": lambda x: x[..., :2],
    "halves": lambda x: x[..., 3:],
    "transposed": lambda x: x.transpose(1, 2),
    "row": lambda x: x[:, 1],
    "all": lambda x: x.view_as(x),
}


class Begin(nn.Module):
    """Makes a tensor and views of it; the tensor is itself a view (of a linear layer's sums) or is not."""

    def __init__(self, views: tuple[str, ...], is_view: bool) -> None:
        super().__init__()
        self.linear, self.views, self.is_view = nn.Linear(D, D), views, is_view

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        y = y[:, :, :] if self.is_view else y * 1.5
        return (x, y, *(VIEWS[name](y) for name in self.views))


class Act(nn.Module):
    """Changes some values in place and adds others to the first; passes on what is used again."""

    def __init__(self, actions: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.actions, self.linear = actions, nn.Linear(1, D)

    def forward(self, values: Any) -> Any:
        total, *others = values
        for what, place in self.actions:
            value = others[place % len(others)]
            if what == "change":
                value.mul_(1.25).add_(0.125)
            elif what in ("use", "last"):
                total = total + self.linear(value.tanh().flatten(1).sum(1)[:, None, None]) + value.mean()
            if what == "last" and len(others) > 1:
                others.pop(place % len(others))
            if what == "view" and value.dim() > 1:
                others.append(value[:, :1])
        return (total, *others)


class End(nn.Module):
    def forward(self, values: Any) -> Tensor:
        total, *others = values
        return total + sum(other.cos().mean() for other in others)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


actions = st.lists(
    st.tuples(st.sampled_from(["change", "use", "last", "last", "view"]), st.integers(0, 4)), max_size=4
).map(tuple)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.lists(actions, min_size=2, max_size=5),
    st.sampled_from(["1f1b", "zb-h1"]),
)
@example(("slice",), False, [(("change", 0),), (("last", 0),)], "1f1b")
def test_as_in_the_plain_loop(views: tuple[str, ...], is_view: bool, stages: list[Any], schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Begin(views, is_view), *(Act(each) for each in stages), End())
    plain = copy.deepcopy(model)
    x, target = torch.randn(NUM * 2, 3, D), torch.randn(NUM * 2, 3, D)
    want: list[Tensor] = []
    for part, aim in zip(x.chunk(NUM), target.chunk(NUM), strict=True):
        try:
            loss = loss_fn(plain(part), aim) / NUM
            loss.backward()
        except RuntimeError:  # what the backward needs was changed: the plain loop has no gradients
            return
        want.append(loss.detach())
    built = ps.build(schedule, num_ranks=len(model), num_microbatches=NUM)
    with_pipe = ps.Pipeline(model, built, loss_fn=loss_fn)
    try:
        found = with_pipe.step(x, target, update=False).loss
        grads = {name: p.grad for name, p in with_pipe.named_parameters()}
    finally:
        with_pipe.close()
    assert torch.equal(found, sum(want[1:], want[0]))
    for name, parameter in plain.named_parameters():
        got = grads[name]
        assert (got is None) == (parameter.grad is None), name
        assert got is None or torch.equal(got, parameter.grad), name
