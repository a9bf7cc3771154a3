"""Whatever rules inputs and targets have, loss and gradients are those of a plain loop over a batch cut by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
from plain_loop import plain_step
from tiers import examples

pytestmark = pytest.mark.property

D = 4


def along(dimension: int) -> Callable[[Any, list[range]], list[Any]]:
    return lambda value, samples: [value.narrow(dimension, rows.start, len(rows)) for rows in samples]


def whole(value: Any, samples: list[range]) -> list[Any]:
    return [value] * len(samples)


def two_each(value: Tensor, samples: list[range]) -> list[Tensor]:
    return [value[2 * rows.start : 2 * rows.stop] for rows in samples]


def two_each_rule(value: Tensor, num: int) -> list[Tensor]:
    """Two entries a sample, as pictures may be."""
    return [part.flatten(0, 1) for part in value.unflatten(0, (-1, 2)).tensor_split(num)]


def offsets(value: Tensor, samples: list[range]) -> list[Tensor]:
    return [value[rows.start : rows.stop + 1] - value[rows.start] for rows in samples]


def offsets_rule(value: Tensor, num: int) -> list[Tensor]:
    return [nn.functional.pad(part.cumsum(0), (1, 0)) for part in value.diff().tensor_split(num)]


@dataclass(frozen=True)
class Kind:
    """An input: how it is made for a batch, its rule, how a user cuts it, and what a model makes of it."""

    make: Callable[[int], Any]
    rule: Any
    cut: Callable[[Any, list[range]], list[Any]]
    use: Callable[[Any], Any]
    """To [samples, D], or to what is added to all samples."""


KINDS = {
    "samples first": Kind(lambda b: torch.randn(b, D), None, along(0), lambda v: v),
    "samples first, said": Kind(lambda b: torch.randn(b, 3, D), 0, along(0), lambda v: v.sum(1)),
    "mrope": Kind(lambda b: torch.randn(3, b, D), 1, along(1), lambda v: v.sum(0)),
    "time first": Kind(lambda b: torch.randn(2, 3, b), 2, along(2), lambda v: v.sum((0, 1))[:, None]),
    "counted from behind": Kind(lambda b: torch.randn(3, b, D), -2, along(1), lambda v: v.mean(0)),
    "a row": Kind(lambda b: torch.randn(1, D), ps.WHOLE, whole, lambda v: v),
    "a table as long as the batch": Kind(lambda b: torch.randn(b, D), ps.WHOLE, whole, lambda v: v.sum(0)),
    "no dimension": Kind(lambda b: torch.randn(()), None, whole, lambda v: v),
    "a number": Kind(lambda b: 0.5, None, whole, lambda v: v),
    "two a sample": Kind(lambda b: torch.randn(2 * b, D), two_each_rule, two_each, lambda v: v[::2] * v[1::2]),
    "offsets": Kind(
        lambda b: torch.randint(1, 5, (b + 1,)).cumsum(0), offsets_rule, offsets, lambda v: v.diff()[:, None]
    ),
}
NAMES = [*KINDS]


class First(nn.Module):
    """Adds up what it is given, wherever that lies."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(D)) for _ in kinds)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        leaves = leaves_of((args, kwargs))
        found: Any = 0.0
        for name, weight, value in zip(self.kinds, self.weights, leaves, strict=True):
            found = found + KINDS[name].use(value) * weight
        return found


class Last(nn.Module):
    """Gives the samples in a dimension."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.layer, self.dimension = nn.Linear(D, D), dimension

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).movedim(0, self.dimension)


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    return [each for below in value for each in leaves_of(below)] if isinstance(value, tuple) else [value]


def placed(form: str, values: list[Any]) -> Any:
    """Values in a tuple, a dict, or deeper."""
    keyed = {f"k{number}": value for number, value in enumerate(values)}
    half = len(values) // 2
    if form == "tuple":
        return tuple(values)
    if form == "dict":
        return keyed
    if form == "dict in dict":
        return {"above": keyed}
    return {"pair": tuple(values[:half]), "rest": {f"k{number}": value for number, value in enumerate(values[half:])}}


def rules_like(value: Any) -> Any:
    """The same form, of rules, with positions as keys of tuples."""
    if isinstance(value, tuple):
        return {place: rules_like(each) for place, each in enumerate(value)}
    return {key: rules_like(each) for key, each in value.items()} if isinstance(value, dict) else value


@settings(max_examples=examples(80), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(NAMES), max_size=4),
    first=st.integers(0, 4),
    form=st.sampled_from(["tuple", "dict", "dict in dict", "tuple and dict in dict"]),
    batch=st.integers(1, 9),
    num=st.integers(1, 4),
    dimension=st.integers(0, 1),
    schedule=st.sampled_from(["1f1b", "zb-h1", "gpipe"]),
    seed=st.integers(0, 99),
)
def test_any_rules(
    kinds: list[str], first: int, form: str, batch: int, num: int, dimension: int, schedule: str, seed: int
) -> None:
    torch.manual_seed(seed)
    kinds.insert(min(first, len(kinds)), NAMES[first % 5])  # something with a sample in each entry
    values = [KINDS[name].make(batch) for name in kinds]
    inputs = placed(form, values)
    targets = {"of": torch.randn(batch, D).movedim(0, dimension), "scale": torch.randn(D if dimension == 0 else 1)}
    rules = ps.BatchRules(
        inputs=rules_like(placed(form, [KINDS[name].rule for name in kinds])),
        targets={"of": dimension, "scale": ps.WHOLE},
    )

    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return ((output - target["of"]) * target["scale"]).square().mean()

    num_run = min(num, batch)
    samples = [range(int(part[0]), int(part[-1]) + 1) for part in torch.arange(batch).tensor_split(num_run)]
    cut = [KINDS[name].cut(value, samples) for name, value in zip(kinds, values, strict=True)]
    parts = [placed(form, list(together)) for together in zip(*cut, strict=True)]
    cut_targets = [{**targets, "of": part} for part in along(dimension)(targets["of"], samples)]
    model = [First(kinds), Last(dimension)]
    plain = copy.deepcopy(model)

    class Weighed:
        """By the number of samples, as the plain loop does not know which dimension they are in."""

        def weight(self, target: Any) -> float:
            return float(target["of"].shape[dimension])

        def __call__(self, output: Tensor, target: Any) -> Tensor:
            return loss_fn(output, target)

    want = plain_step(plain, parts, cut_targets, num_run, Weighed())
    with ps.Pipeline(model, ps.build(schedule, 2, num), loss_fn=loss_fn, batch=rules) as pipe:
        result = pipe.step(inputs, targets, update=False)
    assert torch.equal(result.loss, want)
    for one, other in zip(model, plain, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
