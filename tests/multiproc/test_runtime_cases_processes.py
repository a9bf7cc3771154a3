"""Every case of the table with one process a rank; all in one launch for each number of ranks."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from plain_loop import differences, gradients
from processes import run_ranks
from runtime_cases import CASES, compare
from tiers import in_turn
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

RUNS = {
    2: [("zb-v", "frozen", True), ("1f1b", "dynamic", False), ("interleaved-1f1b", "dynamic", False)],
    4: [("1f1b", "frozen", False), ("zb-v", "dynamic", True)],
}


def run_cases(rank: int, ranks: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    found = {}
    for number, name in enumerate(CASES):
        for schedule, dispatch, defer in in_turn(RUNS[ranks], number):
            found[f"{name}, {schedule}, {dispatch}"] = compare(name, ps.build(schedule, ranks, 4), dispatch, defer)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_as_the_plain_loop(ranks: int) -> None:
    outcomes = run_ranks(ranks, run_cases, ranks)
    wrong: list[Any] = [f"rank {o.rank} ended with {o.code}:\n{o.text[-3000:]}" for o in outcomes if o.code != 0]
    for outcome in outcomes:
        for name, found in (outcome.value or {}).items():
            wrong += [f"rank {outcome.rank}, {name}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
    assert all(len(o.value) == len(CASES) * len(in_turn(RUNS[ranks], 0)) for o in outcomes)


class Hidden(NamedTuple):
    """What one stage gives another."""

    state: Tensor
    mask: dict[str, Tensor | None]


class Gives(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.linear(x), {"positive": x > 0, "none": None})


class Takes(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, given: Any) -> Tensor:
        assert type(given).__name__ == self.kind.__name__
        assert self.kind is not Hidden or type(given) is Hidden
        assert given.mask["none"] is None
        out: Tensor = self.linear(given.state) * given.mask["positive"]
        return out


def passes_named_tuples(rank: int) -> list[str]:
    found = []
    for kind in (Hidden, namedtuple("Local", ("state", "mask"))):
        torch.manual_seed(0)
        model, plain = (nn.Sequential(Gives(kind), Takes(kind)) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        x, loss_fn = torch.randn(8, 4), nn.MSELoss()
        with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=loss_fn, timeout=PATIENCE) as pipe:
            pipe.step(x, x, update=False)
        for part in x.chunk(4):
            (loss_fn(plain(part), part) / 4).backward()
        found += differences(
            {n: g for n, g in gradients(list(plain)).items() if n[0] == str(rank)},
            {n: g for n, g in gradients(list(model)).items() if n[0] == str(rank)},
        )
    return found


def test_a_named_tuple_between_stages_came_in_as_a_plain_one() -> None:
    """So the next stage had no fields to ask for. A class that the other process can't find is made again there."""
    outcomes = run_ranks(2, passes_named_tuples)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text for o in outcomes)
    assert all(o.value == [] for o in outcomes), outcomes
