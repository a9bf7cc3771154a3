"""Outputs that share memory, with one process a rank; all cases in one launch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from alias_cases import ALIASES
from penstock.runtime import RuntimeFailure
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


def inputs_in_targets(rank: int) -> str:
    model = nn.Sequential(nn.ReLU(inplace=True), *(nn.Linear(8, 8) for _ in range(3)))
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), timeout=20)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    try:
        pipe.step(x, x)
    except RuntimeFailure as error:
        return str(error)
    return "the last rank compared with inputs that nobody had changed there"


def test_inputs_that_lie_in_targets_too_were_changed_on_the_first_rank_alone() -> None:
    first, second = run_ranks(2, inputs_in_targets)
    assert "stage 0 changed one of its inputs in place" in first.value
    assert "that of targets" in first.value
    assert "rank 1 lost its connection to rank 0" in second.value


@pytest.mark.slow
def test_as_the_plain_loop() -> None:
    outcomes = run_ranks(2, run_cases)
    wrong: list[Any] = [f"rank {o.rank} ended with {o.code}:\n{o.text[-3000:]}" for o in outcomes if o.code != 0]
    for outcome in outcomes:
        for name, found in (outcome.value or {}).items():
            wrong += [f"rank {outcome.rank}, {name}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
