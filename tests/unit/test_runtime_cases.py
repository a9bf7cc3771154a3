"""Every case of the table: loss, gradients and updates to the last bit."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from backends import Backend
from plain_loop import differences, gradients
from runtime_cases import CASES, compare
from tiers import in_turn
from waiting import PATIENCE

RUNS = [
    ("1f1b", 1, "frozen", False),
    ("1f1b", 4, "dynamic", False),
    ("zb", 3, "hinted", False),
    ("zb-h1", 3, "frozen", True),
    ("zb-v", 2, "frozen", True),
    ("zb-v", 2, "dynamic", False),
    ("interleaved-1f1b", 2, "frozen", False),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_as_the_plain_loop(name: str) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for schedule, ranks, dispatch, defer in in_turn(RUNS, list(CASES).index(name), 2):
            built = ps.build(schedule, ranks, 4)
            found += [f"{schedule} {ranks} {dispatch}: {text}" for text in compare(name, built, dispatch, defer)]
    assert not found, "\n".join(found)


BETWEEN = {
    2: [("zb-v", "frozen", True), ("1f1b", "dynamic", False), ("interleaved-1f1b", "dynamic", False)],
    4: [("1f1b", "frozen", False), ("zb-v", "dynamic", True)],
}


def run_cases(rank: int, ranks: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    return {
        f"{name}, {schedule}, {dispatch}": compare(name, ps.build(schedule, ranks, 4), dispatch, defer)
        for number, name in enumerate(CASES)
        for schedule, dispatch, defer in in_turn(BETWEEN[ranks], number)
    }


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_between_processes_as_the_plain_loop(ranks: int) -> None:
    assert not Backend(ranks).wrong(run_cases, ranks)


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


@pytest.mark.multiproc
def test_a_named_tuple_between_stages_came_in_as_a_plain_one() -> None:
    """So the next stage had no fields to ask for. A class that the other process can't find is made again there."""
    assert Backend(2).values(passes_named_tuples) == [[], []]
