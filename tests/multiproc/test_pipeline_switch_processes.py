"""Ranks that switch schedule, dispatch and delegated links between steps have the plain loop's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.control import Configuration
from penstock.control.configuration import peaks
from penstock.cost import Links
from penstock.runtime import RuntimeFailure
from plain_loop import plain_step
from processes import run_ranks_to_end
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

NUM_RANKS, NUM_MICROBATCHES = 3, 5
SWITCHES: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [
    ("1f1b", "frozen", ()),
    ("zb-h1", "dynamic", ((1, 2),)),
    ("zb-h1", "frozen", ((0, 1), (1, 2))),
    ("1f1b", "dynamic", ((0, 1),)),
    ("zb-h1", "dynamic", ()),
    ("1f1b", "frozen", ((1, 2),)),
]


def configuration(name: str, dispatch: str, delegated: tuple[tuple[int, int], ...]) -> Configuration:
    schedule = ps.build(name, NUM_RANKS, NUM_MICROBATCHES)
    caps = tuple(peaks(schedule, ps.Costs.uniform(NUM_RANKS)))
    return Configuration(schedule, dispatch, delegated, caps)  # type: ignore[arg-type]


def model() -> list[nn.Module]:
    torch.manual_seed(5)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(NUM_RANKS)]
    stages[-1][0].weight = stages[0][0].weight  # type: ignore[index, union-attr]
    return stages


def train(rank: int, transport: str) -> list[bool]:
    stages = model()
    plain = copy.deepcopy(stages)
    pipe = ps.Pipeline(
        stages,
        ps.build("1f1b", NUM_RANKS, NUM_MICROBATCHES),
        loss_fn=nn.MSELoss(),
        timeout=PATIENCE,
        transport=ps.TransportOptions(
            transport, links=Links.parse("1:2=latency:4ms"), delegates=ps.runtime.DelegateOptions()
        ),
    )
    same = []
    for place, switch in enumerate(SWITCHES):
        pipe.reconfigure(configuration(*switch))
        for number in (2 * place + 1, 2 * place + 2):
            torch.manual_seed(number)
            x = torch.randn(11 + place, 8)  # shapes change on the way, too
            want = plain_step(plain, x, x.cos(), NUM_MICROBATCHES, nn.MSELoss(), step=number)
            same.append(torch.equal(want, pipe.step(x, x.cos(), update=False).loss))
        pipe.evaluate(x, x.cos())
    theirs = dict(nn.ModuleList(plain).named_parameters())
    for name, parameter in pipe.named_parameters():
        grad = theirs[name].grad
        same.append(parameter.grad is not None and grad is not None and torch.equal(parameter.grad, grad))
    pipe.close()
    return same


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["host", "direct"])
def test_switching_keeps_the_numbers(transport: str) -> None:
    outcomes = run_ranks_to_end(NUM_RANKS, train, transport)
    assert all(all(o.value) and len(o.value) > 2 * len(SWITCHES) for o in outcomes)


def refused(rank: int) -> list[str]:
    said: list[str] = []
    pipe = ps.Pipeline(model(), ps.build("1f1b", NUM_RANKS, NUM_MICROBATCHES), loss_fn=nn.MSELoss(), timeout=PATIENCE)
    different: Any = "dynamic" if rank == 1 else "frozen"
    for then in (configuration("1f1b", "frozen", ((0, 1),)), configuration("zb-h1", different, ())):
        with pytest.raises(RuntimeFailure) as raised:
            pipe.reconfigure(then)
        said.append(str(raised.value))
    x = torch.randn(10, 8)
    said.append(f"{pipe.schedule.name} {pipe.step(x, x, update=False).loss.isfinite().item()}")
    return said


def test_what_cannot_be_switched_to_leaves_all_as_it_was() -> None:
    outcomes = run_ranks_to_end(NUM_RANKS, refused)
    for first, second, after in (o.value for o in outcomes):
        assert "links [(0, 1)] are to be delegated" in first
        assert "delegates=ps.runtime.DelegateOptions()" in first
        assert second == "rank 1 was given another configuration than rank 0; every rank must switch to the same"
        assert after == "1f1b True"
