"""Every case of the table, all ranks in this process: loss, gradients and updates to the last bit."""

from __future__ import annotations

import warnings

import pytest
import torch

import penstock as ps
from runtime_cases import CASES, compare
from tiers import in_turn

pytestmark = pytest.mark.unit

RUNS = [
    ("1f1b", 1, "frozen", False),
    ("1f1b", 4, "dynamic", False),
    ("zb", 3, "hinted", False),
    ("zb-h1", 3, "frozen", True),
    ("zb-v", 2, "frozen", True),
    ("zb-v", 2, "dynamic", False),
    ("interleaved-1f1b", 2, "frozen", False),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_as_the_plain_loop(name: str) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for schedule, ranks, dispatch, defer in in_turn(RUNS, list(CASES).index(name), 3):
            built = ps.build(schedule, ranks, 4)
            found += [f"{schedule} {ranks} {dispatch}: {text}" for text in compare(name, built, dispatch, defer)]
    assert not found, "\n".join(found)
