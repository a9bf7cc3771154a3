"""Outputs that share memory, all ranks in this process: as the plain loop to the last bit, or an error as there."""

from __future__ import annotations

import copy

import pytest
import torch

import penstock as ps
from alias_cases import ALIASES
from recomputed import with_recompute
from runtime_cases import compare_case, plain_case

pytestmark = pytest.mark.unit

RUNS = [("1f1b", 4, "dynamic"), ("zb-h1", 3, "frozen"), ("zb-v", 2, "frozen"), ("gpipe", 2, "frozen")]


def wrong(name: str) -> list[str]:
    found = []
    for schedule, ranks, dispatch in RUNS:
        built = ps.build(schedule, ranks, 4)
        torch.manual_seed(7)
        made = ALIASES[name](built.num_stages, 4)
        plain = plain_case(made, 4)
        for each in (built, with_recompute(built)):
            found += [
                f"{each.name} {ranks}: {text}" for text in compare_case(copy.deepcopy(made), each, dispatch, plain)
            ]
    return found


WRONG = pytest.mark.xfail(strict=True, reason="outputs that share memory come in as if they did not")
RIGHT = ["slices_side_by_side", "a_view_of_the_input"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in RIGHT else WRONG) for name in ALIASES])
def test_as_the_plain_loop(name: str) -> None:
    found = wrong(name)
    assert not found, "\n".join(found)
