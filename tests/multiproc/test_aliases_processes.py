"""Outputs that share memory, with one process a rank; all cases in one launch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

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
            for each in in_turn((built, with_recompute(built)), number // 2):
                found[f"{each.name} {name}"] = compare_case(copy.deepcopy(made), each, dispatch, plain)
    return found


def given_again(rank: int, batches: str) -> dict[str, str]:
    """What is said of a second step, or evaluation, with the tensors of the first, by what the first layer is."""
    replicas = batches == "replica"
    mesh = init_device_mesh("cpu", (1, 2) if batches == "replicas" else (2, 1), mesh_dim_names=("pp", "dp"))
    first: dict[str, nn.Module] = {"in place": nn.ReLU(inplace=True), "copy": nn.ReLU(), "drawn": InPlaceDropout()}
    found = {}
    for name, layer in first.items():
        for evaluates in (False, True):
            model = nn.Sequential(layer, *(nn.Linear(8, 8) for _ in range(3)))
            pipe = ps.Pipeline(
                model,
                ps.build("1f1b", mesh.size(0), 4),
                loss_fn=nn.MSELoss(),
                timeout=20,
                mesh=mesh,
                parallel=ps.ParallelOptions(batches="replica" if replicas else "whole"),
            )
            call = pipe.evaluate if evaluates else pipe.step
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
            y = x.clone()
            call(x, y)
            try:
                call(x, y)
                found[f"{name}, {evaluates}"] = "nothing"
            except RuntimeFailure as error:
                found[f"{name}, {evaluates}"] = str(error)
    if rank:
        x = x + 1
    try:  # no layer changes these
        call(x, y)
    except RuntimeFailure as error:
        found["other"] = str(error)
    return found


class InPlaceDropout(nn.Module):
    """Changes its input in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training, inplace=True)


@pytest.mark.parametrize("batches", ["whole", "replicas", "replica"])
def test_a_batch_that_the_first_stage_had_changed_was_called_another_one(batches: str) -> None:
    """The reason given was that ranks were given different ones."""
    for outcome in run_ranks(2, given_again, batches):
        assert outcome.code == 0, outcome.text
        found = outcome.value
        for case in ("in place, False", "in place, True", "drawn, False"):
            assert "If the first stage changes its inputs in place" in found[case], found
            assert "x.clone()" in found[case]
        assert {found[case] for case in ("copy, False", "copy, True", "drawn, True")} == {"nothing"}
        assert "given" in found["other"]


@pytest.mark.slow
def test_as_the_plain_loop() -> None:
    outcomes = run_ranks(2, run_cases)
    wrong: list[Any] = [f"rank {o.rank} ended with {o.code}:\n{o.text[-3000:]}" for o in outcomes if o.code != 0]
    for outcome in outcomes:
        for name, found in (outcome.value or {}).items():
            wrong += [f"rank {outcome.rank}, {name}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
