"""Schedules with several pipelines, one process a rank: gradients and values of a loop grouped alike, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import copies_runs
import penstock as ps
from penstock.runtime.mesh.peers import GroupPeers
from processes import run_ranks
from tiers import in_turn

pytestmark = pytest.mark.multiproc


def run_all(rank: int) -> dict[str, list[str]]:
    return {
        f"{name} {options} zero={zero}": copies_runs.wrong(name, options, zero)
        for number, (name, options) in enumerate(copies_runs.SCHEDULES)
        for zero in in_turn((True, False), number)
    }


@pytest.mark.slow
def test_a_grouped_loop() -> None:
    outcomes = run_ranks(4, run_all)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    found = [f"rank {o.rank}, {run}: {text}" for o in outcomes for run, texts in o.value.items() for text in texts]
    assert not found, "\n".join(found)
    assert all(len(o.value) == len(in_turn((True, False), 0)) * len(copies_runs.SCHEDULES) for o in outcomes)


def messages_of_sums(rank: int) -> list[int]:
    """How many messages this process sends to add up the copies' gradients, for models of few and many parameters."""
    return [_sent_in_a_step(num_layers) for num_layers in (2, 12)]


def _sent_in_a_step(num_layers: int) -> int:
    layers = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))) for _ in range(2)))
    pipe = ps.Pipeline(layers, ps.build("chimera", 2, 4), loss_fn=nn.MSELoss())
    sent, once = [], GroupPeers.send

    def counted(*args: Any) -> None:
        sent.append(args)
        once(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupPeers, "send", counted)
        pipe.step(torch.ones(8, 4), torch.zeros(8, 4), update=False)
    pipe.close()
    return len(sent)


def test_bug_each_parameter_of_a_copy_was_a_message_of_its_own() -> None:
    """Two pipelines sent two messages for each parameter of each stage, and waited for every one."""
    outcomes = run_ranks(2, messages_of_sums)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-2000:] for o in outcomes)
    # Of each stage a copy's gradients go to its owner, or the sums come back: what there is, and all of it.
    assert [o.value for o in outcomes] == [[4, 4], [4, 4]]
