"""Frozen runs over links that are only late are timed by one sweep: it finds what the event loop finds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.simulation import runner as module
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

pytestmark = pytest.mark.unit

SCHEDULES = (
    ("1f1b", 4, 9, {}), ("zb-h1", 5, 8, {}), ("zb-v", 4, 8, {}), ("interleaved-1f1b", 4, 8, {}),
    ("chimera", 4, 8, {}), ("hanayo", 4, 8, {}), ("bitpipe", 4, 8, {}), ("amdp", 4, 16, {"window": 4}),
    ("pipedream", 3, 7, {}),
)  # fmt: skip


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "options"), SCHEDULES)
def test_the_sweep_finds_what_the_event_loop_finds(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_ranks: int,
    num_microbatches: int,
    options: dict[str, Any],
    compile: bool,
) -> None:
    schedule = ps.build(name, num_ranks, num_microbatches, **options)
    rng = random.Random(name)
    for trial in range(4):
        durations = [
            [rng.choice((0.0, 3.0, rng.uniform(1, 9))) for _ in range(schedule.num_stages)] for _ in range(3)
        ]
        costs = ps.Costs(*durations)
        links = ps.Links({(0, 1): 7.5, (num_ranks - 1, 0): rng.uniform(0, 30)}, default=trial * 0.4)
        runner = Runner(costs, compile=compile)
        order = runner.order(schedule)
        with monkeypatch.context() as patch:
            patch.setattr(module, "PreparedRun", None)  # the sweep has no need of it
            swept = runner.run(order, links, transport=Decoupled())
        with monkeypatch.context() as patch:
            patch.setattr(module, "_swept", lambda *_, **__: None)
            looped = runner.run(order, links, transport=Decoupled())
        for each in ("start_time", "end_time", "free_time", "arrival_time"):
            assert np.array_equal(np.asarray(getattr(swept, each)), np.asarray(getattr(looped, each))), (each, trial)
        assert swept.peaks == pytest.approx(looped.peaks)
        assert swept.executed() == looped.executed()
        assert swept.makespan == looped.makespan


def test_a_deadlock_is_named_as_before() -> None:
    rows = [[ps.Op("B", 0, 0), ps.Op("F", 0, 0)], [ps.Op("F", 1, 0), ps.Op("B", 1, 0)]]
    wrong = ps.Schedule.of("wrong", ps.placements.one_to_one(2), rows, 1)
    with pytest.raises(ps.ScheduleError, match="rule: deadlock"):
        ps.simulate(wrong, ps.Costs.uniform(2))


@pytest.mark.parametrize("dispatch", ["frozen", "hinted:1"])
def test_an_op_before_what_it_needs_on_its_own_rank_is_a_deadlock_and_has_no_time(dispatch: str) -> None:
    known = ps.build("1f1b", 2, 2)
    first, last = (list(row) for row in known.order)
    wrong = replace(known, order=(tuple(first), (last[1], last[0], *last[2:])))  # B0 F0 F1 B1
    with pytest.raises(ps.ScheduleError, match="rule: deadlock"):
        ps.simulate(wrong, ps.Costs.uniform(2), dispatch=dispatch)
