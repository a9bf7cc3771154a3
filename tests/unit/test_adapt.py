"""The pure parts of adapting: what ranks agree on, reports, clocks, costs; and the controller as a filter."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.control import (
    Configuration,
    ControlError,
    Controller,
    Event,
    IterationEnded,
    Job,
    LinkDown,
    measured_events,
    replay,
)
from penstock.control.__main__ import follow
from penstock.control.configuration import peaks
from penstock.control.events import Transfers, event_from_json
from penstock.control.log import event_line, header
from penstock.cost.measured import MEASURED_ITERATIONS, WARMUP_ITERATIONS, MeasuredCosts
from penstock.runtime import RuntimeFailure
from penstock.runtime.adapt.agent import REFUSED, STOPPED, Vote, VoteResult, agree, short_digest
from penstock.runtime.adapt.coordinator import CONTROL, STARTING_STEPS, RunLog
from penstock.runtime.adapt.report import MeasuredStep, RankReport, ReportCollector, lines_of, report_of
from penstock.runtime.transport.base import TransferRecord
from penstock.schedule import Op

pytestmark = pytest.mark.unit

RUNS = Vote(2, 77)
HOLDS = Vote(2, 77, 3, 99)


# Agreeing


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        ([RUNS, RUNS, RUNS], VoteResult()),
        ([HOLDS, HOLDS, HOLDS], VoteResult(switch=3)),
        ([HOLDS, RUNS, HOLDS], VoteResult()),
        ([RUNS, HOLDS, HOLDS], VoteResult()),  # rank 0 has withdrawn it
        ([HOLDS, Vote(2, 77, 1, 55), HOLDS], VoteResult()),  # an old one
        ([HOLDS, HOLDS, Vote(2, 77, 3, REFUSED)], VoteResult(refused=2)),
        ([Vote(2, 77, 3, REFUSED), HOLDS, HOLDS], VoteResult(refused=0)),
        ([HOLDS, Vote(2, 77, 3, 98), HOLDS], VoteResult(refused=1)),  # another text under the same number
        ([HOLDS, Vote(2, 77, STOPPED), HOLDS], VoteResult(stopped=1)),
        ([Vote(2, 77, 2, 77)] * 2, VoteResult()),
    ],
)
def test_all_ranks_or_none(votes: Sequence[Vote], outcome: VoteResult) -> None:
    assert agree(votes) == outcome


def test_ranks_that_ran_different_plans_are_an_error() -> None:
    for other in (Vote(3, 77), Vote(2, 78)):
        with pytest.raises(RuntimeFailure, match="rank 1 ran plan"):
            agree([RUNS, other])


def test_a_switch_needs_every_single_rank() -> None:
    """Of all that four ranks may hold, only one case switches."""
    held = [RUNS, HOLDS, Vote(2, 77, 3, REFUSED), Vote(2, 77, 4, 11), Vote(2, 77, STOPPED)]
    found = [votes for votes in itertools.product(held, repeat=4) if agree(votes).switch is not None]
    assert found == [(HOLDS,) * 4, (Vote(2, 77, 4, 11),) * 4]


def test_a_double_carries_a_digest() -> None:
    schedule = ps.build("1f1b", 2, 2)
    digest = Configuration(schedule, "frozen", (), tuple(peaks(schedule, ps.Costs.uniform(2)))).digest  # type: ignore[arg-type]
    assert int(float(short_digest(digest))) == short_digest(digest) == int(digest[:12], 16)
    assert short_digest("0" * 64) != REFUSED


# Reports


NO_SHIFT = (0, 0)


def measured(rank: int, crossings: Sequence[TransferRecord] = (), events: Sequence[Event] = ()) -> MeasuredStep:
    ops = [(Op("F", rank, 0), 1_000_000, 11_000_000), (Op("B", rank, 0), 31_000_000, 51_000_000)]
    return MeasuredStep(rank, 1_000_000, 51_000_000 + rank * 1_000_000, ops, crossings, events)


def report(iteration: int, rank: int) -> RankReport:
    return report_of(iteration, measured(rank), NO_SHIFT)


def transfers_in(lines: Sequence[str]) -> list[Transfers]:
    events = [event_from_json(json.loads(line)["event"]) for line in lines]
    return [event for event in events if isinstance(event, Transfers)]


def test_a_report_comes_back_as_it_was() -> None:
    sent = report_of(7, measured(1, [TransferRecord(0, 1, 100, 5, 6, 9)], [LinkDown((0, 1))]), NO_SHIFT)
    assert RankReport(**json.loads(json.dumps(asdict(sent)))) == sent
    assert [row[:3] for row in sent.ops] == [["F", 1, 0], ["B", 1, 0]]


def test_what_was_held_and_counted_travels() -> None:
    told = measured(1)._replace(peak=2.5, counters={"failovers": 1, "resent": 0})
    sent = RankReport(**json.loads(json.dumps(asdict(report_of(7, told, NO_SHIFT)))))
    assert (sent.peak, sent.counters) == (2.5, {"failovers": 1, "resent": 0})


def test_iterations_come_out_whole_and_in_order() -> None:
    gathering = ReportCollector(2)
    order = [(0, 1), (1, 1), (0, 0), (2, 0), (3, 1), (3, 0), (1, 0), (2, 1), (4, 0), (4, 1)]
    found = [complete for each in order if (complete := gathering.add(report(*each))) is not None]
    # Of iteration 1 and 2 a report came after those of iteration 3: they are left out.
    assert [[(r.iteration, r.rank) for r in complete] for complete in found] == [
        [(0, 0), (0, 1)],
        [(3, 0), (3, 1)],
        [(4, 0), (4, 1)],
    ]


def test_what_a_controller_is_told_does_not_depend_on_what_came_in_first() -> None:
    crossings = [
        TransferRecord(0, 1, 10, 0, 0, 30_000_000),
        TransferRecord(0, 1, 10, 5_000_000, 20_000_000, 35_000_000),
    ]
    first = report_of(4, measured(0, events=[LinkDown((0, 1))]), NO_SHIFT)
    lines = lines_of([first, report_of(4, measured(1, crossings), NO_SHIFT)])
    assert lines_of([first, report_of(4, measured(1, crossings[::-1]), NO_SHIFT)]) == lines
    kinds = [next(iter(json.loads(line)["event"])) for line in lines]
    assert kinds == ["down", "ops", "transfers", "ops", "iteration"]
    assert [each.ms for each in transfers_in(lines)] == [(30.0, 15.0)], "from when both sides were ready"
    assert lines[-1] == event_line(IterationEnded(4, 51.0))
    slow = lines_of([report_of(4, measured(rank), NO_SHIFT, stretch=2.0) for rank in (0, 1)])
    assert slow[-1] == event_line(IterationEnded(4, 25.5))


@pytest.mark.parametrize("posted_ahead", [True, False])
def test_clocks_of_two_hosts(posted_ahead: bool) -> None:
    """Rank 1's clock is a second ahead of rank 0's; the message took 30 ms, and ops lie by rank 0's clock."""
    second = 1_000_000_000
    sent, arrived = 2_000_000, 32_000_000 + second
    posted = 1_000_000 + second if posted_ahead else sent
    found = report_of(0, measured(1, [TransferRecord(0, 1, 10, sent, posted, arrived)]), (0, second))
    assert [each.ms for each in transfers_in(found.events)] == [(30.0,)]
    assert found.links == {"0:1": 30.0}
    assert found.ops[0][3:] == [1.0 - 1000, 11.0 - 1000]


def test_costs_are_read_off_the_first_iterations() -> None:
    measuring = MeasuredCosts()
    rows = [
        (kind, stage, end - start)
        for rank in (0, 1)
        for kind, stage, _, start, end in report_of(0, measured(rank), NO_SHIFT, stretch=2.0).ops
    ]
    found = [measuring.feed(rows) for _ in range(WARMUP_ITERATIONS + MEASURED_ITERATIONS)]
    assert found[:-1] == [None] * (WARMUP_ITERATIONS + MEASURED_ITERATIONS - 1)
    assert found[-1] == ps.Costs(f=[5.0, 5.0], i=[5.0, 5.0], w=[5.0, 5.0], b=[10.0, 10.0])


def test_a_pass_of_several_steps_counts_as_so_many_and_is_fed_to_the_controller() -> None:
    """`--schedule amdp --adapt` decided nothing: five passes of eight steps went by before anybody looked at links.
    A link that was late by then was usual.
    """
    windows = ps.build("amdp", 4, 32, window=4).windows
    assert windows is not None
    measuring = MeasuredCosts(windows.num_updates)
    assert measuring.feed([("F", 0, 10.0), ("B", 0, 20.0)]) is None, "the first pass is for warming up"
    assert measuring.feed([("F", 0, 10.0), ("B", 0, 20.0)]) is not None


@pytest.mark.parametrize("seed", range(4))
def test_regression_the_first_steps_of_a_run_were_taken_for_usual_and_a_link_for_late(seed: int) -> None:
    """Memory is allotted and connections are made in the first steps: their messages come late and ops take longer.
    The controller changed the plan after three of them, and called the steps after that faster for it.
    """
    draw = random.Random(seed)
    events: list[Event] = []
    for number in range(40):
        slow = draw.uniform(0.98, 1.02) * (1.6 if number < 7 else 1.0)
        late = 0.5 if number >= 7 else 50.0
        links = ps.Links({(0, 1): 0.5, (1, 2): 0.5, (2, 3): late * draw.uniform(0.95, 1.05)})
        costs = ps.Costs.uniform(4, f=10 * slow, i=10 * slow, w=10 * slow)
        events += measured_events(ps.simulate(ZB, costs, links=links, transport="blocking"), number, COSTS)
    changed: dict[int, list[str]] = {}
    for num_starting in (0, STARTING_STEPS):
        controller = Controller(replace(JOB, num_starting=num_starting))
        for event in events:
            for decision in controller.feed(event):
                changed.setdefault(num_starting, []).append(decision.reason)
    assert 0 in changed, "this run shows nothing"
    assert STARTING_STEPS not in changed
    assert not [change for _, change in controller.changes if change.change.rose]


# The controller as a filter


COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
ZB = ps.build("zb", 4, 8)
JOB = Job(COSTS, Configuration(ZB, "frozen", (), tuple(peaks(ZB, COSTS))))  # type: ignore[arg-type]


def test_the_filter_decides_what_the_controller_decides_and_writes_its_log() -> None:
    events: list[Event] = []
    for number in range(14):
        late = 60.0 if number >= 8 else 0.0
        links = ps.Links({(2, 3): late, (3, 2): late})
        timeline = ps.simulate(ZB, COSTS, links=links, transport="blocking")
        events += measured_events(timeline, number, COSTS)
    want: list[str] = []
    controller = Controller(JOB, log=want.append)
    for event in events:
        controller.feed(event)
    lines = [header(JOB), *map(event_line, events)]
    got: list[str] = []
    follow(io.StringIO("\n".join(lines) + "\n"), got.append)
    assert got == want
    assert len(replay(got)) == 1


def test_a_record_comes_back_with_whether_the_controller_is_calm() -> None:
    got: list[str] = []
    follow([header(JOB), '{"record": {"iteration": 3}}'], got.append)
    assert json.loads(got[-1]) == {"record": {"iteration": 3}, "calm": True, "probe": False}


def test_what_the_filter_does_not_take() -> None:
    with pytest.raises(ControlError, match="neither an event nor a record"):
        follow([header(JOB), '{"else": 1}'], lambda line: None)
    with pytest.raises(ControlError, match="no controller's log"):
        follow(['{"event": {}}'], lambda line: None)


def test_options_that_make_no_sense() -> None:
    zb = ps.build("zb", 2, 2)
    with pytest.raises(ps.ScheduleError, match="cap is 1"):
        ps.runtime.EmulatedPipeline(zb, ps.Costs.uniform(2), adapt=ps.AdaptOptions(memory_limit=1.0))
    with pytest.raises(ps.ScheduleError, match="dispatch 'any'"):
        ps.runtime.EmulatedPipeline(zb, ps.Costs.uniform(2), adapt=ps.AdaptOptions(dispatches=("any",)))
    with pytest.raises(RuntimeFailure, match="give another folder"):
        ps.runtime.EmulatedPipeline(zb, ps.Costs.uniform(2), adapt=ps.AdaptOptions(folder="/proc/nowhere"))


def test_records_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    for run in range(3):
        records = RunLog(tmp_path, lambda _: None)
        records.write(CONTROL, f"run {run}")
        records.close()
        records.write(CONTROL, "too late")
    RunLog(tmp_path / "empty", lambda _: None).close()
    RunLog(tmp_path / "empty", lambda _: None).close()
    names = sorted(path.name for path in tmp_path.glob("control*"))
    assert names == ["control-1.jsonl", "control-2.jsonl", "control.jsonl"]
    assert [(tmp_path / name).read_text() for name in names] == ["run 0\n", "run 1\n", "run 2\n"]
    assert len(list((tmp_path / "empty").iterdir())) == 3, "files without a line are no run"
