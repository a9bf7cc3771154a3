"""Outputs that share memory, with one process a rank; all cases in one launch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import penstock as ps
from alias_cases import ALIASES
from processes import run_ranks
from recomputed import with_recompute
from runtime_cases import compare_case, plain_case
from tiers import in_turn

pytestmark = pytest.mark.multiproc


def run_cases(rank: int) -> dict[str, list[str]]:
    found = {}
    runs = ((ps.build("1f1b", 2, 4), "dynamic"), (ps.build("zb-v", 2, 4), "frozen"))
    for number, (name, make) in enumerate(ALIASES.items()):
        for built, dispatch in in_turn(runs, number):
            torch.manual_seed(7)
            made = make(built.num_stages, 4)
            plain = plain_case(made, 4)
            for each in (built, with_recompute(built)):
                found[f"{each.name} {name}"] = compare_case(copy.deepcopy(made), each, dispatch, plain)
    return found


@pytest.mark.slow
def test_as_the_plain_loop() -> None:
    outcomes = run_ranks(2, run_cases)
    wrong: list[Any] = [f"rank {o.rank} ended with {o.code}:\n{o.text[-3000:]}" for o in outcomes if o.code != 0]
    for outcome in outcomes:
        for name, found in (outcome.value or {}).items():
            wrong += [f"rank {outcome.rank}, {name}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
