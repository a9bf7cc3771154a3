"""A running pipeline switches schedule and dispatch between steps; its numbers stay those of the plain loop."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.control import Configuration
from penstock.control.configuration import peaks
from penstock.dispatch import Dispatch
from penstock.runtime import RuntimeFailure
from penstock.runtime.split_backward import prepared
from plain_loop import differences, plain_step

pytestmark = pytest.mark.unit

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def tied_model(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(5)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(num_stages)]
    stages[-1][0].weight = stages[0][0].weight  # type: ignore[index, union-attr]
    return stages


def configuration(
    name: str, num_ranks: int, num_microbatches: int, dispatch: str, spare: float = 0.0
) -> Configuration:
    schedule = ps.build(name, num_ranks, num_microbatches)
    caps = tuple(cap + spare for cap in peaks(schedule, ps.Costs.uniform(schedule.num_stages)))
    return Configuration(schedule, dispatch, (), caps)  # type: ignore[arg-type]


SWITCHES = [
    ("1f1b", "frozen", 0.0),
    ("zb-h1", "frozen", 0.0),
    ("zb-h1", "dynamic", 2.0),
    ("gpipe", "dynamic", 0.0),
    ("zb", "dynamic", 0.0),
    ("zb", "hinted", 0.0),
    ("1f1b", "dynamic", 1.0),
]


@pytest.mark.parametrize("defer", [True, False])
def test_every_step_after_a_switch_is_the_plain_loops(monkeypatch: pytest.MonkeyPatch, defer: bool) -> None:
    """Split backward begins and stops being needed on the way, and two steps add up before each update."""
    if defer:
        monkeypatch.setattr(prepared, "MERGE_WORK", 0)
    stages = tied_model(3)
    plain = copy.deepcopy(stages)
    names = dict(nn.ModuleList(plain).named_parameters())
    theirs = SGD(list(names.values()))
    first = configuration("1f1b", 3, 5, "frozen")
    pipe = ps.Pipeline(stages, first.schedule, loss_fn=nn.MSELoss(), optimizer=SGD)
    number = 0
    for name, dispatch, spare in SWITCHES:
        pipe.reconfigure(configuration(name, 3, 5, dispatch, spare))
        assert (pipe.schedule.name, pipe.dispatch) == (ps.build(name, 3, 5).name, dispatch)
        for _ in range(2):
            number += 1
            torch.manual_seed(number)
            x = torch.randn(11, 8)
            want = plain_step(plain, x, x.cos(), 5, nn.MSELoss(), step=number)
            got = pipe.step(x, x.cos(), update=False).loss
            assert torch.equal(want, got), f"step {number}, {name} {dispatch}"
            mine = {n: p.grad for n, p in pipe.named_parameters()}
            assert differences({n: names[n].grad for n in mine}, mine) == [], f"step {number}, {name} {dispatch}"
            assert pipe.timeline().dispatch == dispatch
        assert torch.equal(pipe.evaluate(x, x.cos()).loss, pipe.evaluate(x, x.cos()).loss)
        theirs.step()
        theirs.zero_grad()
        pipe.update()
    split = [pipe._local.model.stages[s] for s in range(3)]
    pipe.close()
    assert all("_penstock_split" not in module.__dict__ for stage in split for module in stage.modules())


@pytest.mark.parametrize(
    ("then", "rule"),
    [
        (configuration("1f1b", 3, 6, "frozen"), "another number of microbatches than 1f1b"),
        (configuration("zb-v", 3, 5, "frozen"), "another placement than 1f1b"),
    ],
)
def test_what_a_running_pipeline_keeps(then: Configuration, rule: str) -> None:
    pipe = ps.Pipeline(tied_model(3), ps.build("1f1b", 3, 5), loss_fn=nn.MSELoss())
    with pytest.raises(RuntimeFailure, match=rule):
        pipe.reconfigure(then)
    assert pipe.schedule.name == "1f1b"


def test_a_broken_schedule_is_proved_before_it_runs() -> None:
    whole = configuration("1f1b", 3, 5, "frozen")
    order = (whole.schedule.order[0][:-1], *whole.schedule.order[1:])
    broken = Configuration(replace(whole.schedule, order=order), Dispatch.FROZEN, (), whole.caps)
    pipe = ps.Pipeline(tied_model(3), whole.schedule, loss_fn=nn.MSELoss())
    with pytest.raises(ps.ScheduleError, match="rank 0"):
        pipe.reconfigure(broken)


def test_auto_dispatch_is_the_fastest_and_frozen_only_where_that_alone_is() -> None:
    for name in ("1f1b", "zb", "gpipe"):
        schedule = ps.build(name, 3, 5)
        takes = {each: ps.simulate(schedule, dispatch=each).makespan for each in Dispatch}
        pipe = ps.Pipeline(tied_model(3), schedule, loss_fn=nn.MSELoss(), dispatch="auto")
        least = min(takes.values())
        assert takes[pipe.dispatch] == least
        assert pipe.dispatch.is_dynamic or min(takes[Dispatch.HINTED], takes[Dispatch.DYNAMIC]) > least
