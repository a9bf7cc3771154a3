"""What the logs of a run tell: every iteration, late links, what was saved, faults."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.control import (
    ControlError,
    Controller,
    IterationEnded,
    LinkDown,
    Switched,
    Transfers,
    measured_events,
    rehearse,
    run_once,
)
from penstock.cost import Links
from penstock.report import to_page
from penstock.report.from_logs import read_story
from report_cases import COSTS, LATE, job, log_of, story_of

pytestmark = pytest.mark.unit


def test_the_story_has_every_iteration_as_it_was_rehearsed() -> None:
    lines: list[str] = []
    run = rehearse(Controller(job(), log=lines.append), Links.parse(LATE), until=12_000)
    story = read_story(lines, name="run")
    assert [(each.number, each.decision) for each in story.iterations] == [
        (each.number, each.decision) for each in run.iterations
    ]
    assert [each.ms for each in story.iterations] == pytest.approx([each.ms for each in run.iterations], rel=1e-3)
    assert [each.number for each in story.decisions] == [each.number for each in run.decisions]
    assert [each.made for each in story.decisions] == [each.iteration for each in run.decisions]
    assert len(run.decisions) >= 1
    assert story.error == pytest.approx(0, abs=0.005)
    assert story.memory is not None
    assert story.memory.caps == job().start.caps
    assert all(peak <= cap for peak, cap in zip(story.memory.peaks, story.memory.caps, strict=True))


def test_late_links_are_found_with_their_time_and_delay() -> None:
    (spell,) = story_of().spells
    late = [each.number for each in story_of().iterations if max(each.delays.values()) >= 1]
    assert (spell.link, spell.first, spell.last, spell.num_late) == ((2, 3), late[0], late[-1], len(late))
    assert spell.ms == pytest.approx(60, rel=0.01)
    assert story_of().late == set(late)


def test_saved_is_what_iterations_took_before_the_change_less_what_they_took_with_it() -> None:
    story = story_of()
    late = run_once(job(), job().start, Links.parse("2:3=latency:60ms")).makespan
    healthy = run_once(job(), job().start, Links()).makespan
    assert story.undisturbed == healthy
    switched = [each for each in story.iterations if each.decision and each.number in story.late]
    steady = [each for each in switched if each.number < story.spells[0].last]
    assert [each.kept for each in steady] == pytest.approx([late] * len(steady), rel=1e-6)
    assert [each.baseline for each in steady] == pytest.approx([late] * len(steady), rel=1e-2)
    passing = [each for each in story.iterations if each.decision and each not in switched]
    gained, paid = sum(late - each.ms for each in switched), sum(each.ms - healthy for each in passing)
    assert story.saved == pytest.approx(gained - paid, rel=0.1), (
        "the median stands for an iteration that was late in part"
    )
    cost = sum(each.ms for each in story.iterations) - healthy * len(story.iterations)
    assert story.lost == pytest.approx(story.saved + cost, rel=0.05)
    assert story.decisions[0].saved == pytest.approx(story.saved, rel=0.05)


def test_slow_ops_are_simulated_as_they_were_measured() -> None:
    lines: list[str] = []
    controller = Controller(job(), log=lines.append)
    slow = replace(COSTS, w=(10.0, 10.0, 25.0, 10.0), b=(20.0, 20.0, 35.0, 20.0))
    timeline = ps.simulate(job().start.schedule, slow)
    for number in range(3):
        for event in measured_events(timeline, number, COSTS):
            controller.feed(event)
    story = read_story(lines, name="slow ops")
    assert [each.simulated for each in story.iterations] == pytest.approx([timeline.makespan] * 3, rel=1e-3)
    assert timeline.makespan > 1.3 * run_once(job(), job().start, Links()).makespan


def test_a_machine_that_is_slower_than_simulated_saves_what_it_measures() -> None:
    """Ranks that share cores take 400 ms longer than simulated, whatever runs: that is not saved twice."""
    slower = []
    for line in log_of():
        value = json.loads(line)
        if "iteration" in value.get("event", {}):
            value["event"]["iteration"]["ms"] += 400
        if "verdict" in value:
            value["verdict"] |= {name: value["verdict"][name] + 400 for name in ("before", "after")}
        slower.append(json.dumps(value))
    story = read_story(slower, name="busy machine")
    assert story.saved == pytest.approx(story_of().saved, rel=0.05)


def test_some_iterations_may_stand_for_all() -> None:
    few = read_story(log_of(), name="few", most=6)
    assert sum(each.simulated is not None for each in few.iterations) < len(few.iterations)
    assert few.saved == pytest.approx(story_of().saved, rel=0.25)
    assert few.total == story_of().total


def test_a_log_cut_off_anywhere_is_read_as_far_as_it_goes() -> None:
    lines = log_of()
    text = "\n".join(lines)
    cut = text[: len(text) * 2 // 3].splitlines()
    story = read_story(cut, name="cut")
    assert 0 < len(story.iterations) < len(story_of().iterations)
    assert to_page(story)


def test_records_add_measured_timelines() -> None:
    lines = log_of()
    story = story_of()
    first = story.decisions[0].first
    assert first is not None
    op = [0, "F", 0, 0, 0.0, 10.0]
    whole = run_once(job(), job().start, Links())
    timelines = [
        json.dumps({"iteration": first - 1, "number": 0, "why": "before 1", "ops": [op]}),
        json.dumps({"iteration": first + 2, "number": 1, "why": "after 1", "ops": [op, [1, "F", 1, 0, 10.0, 20.0]]}),
    ]
    ops = [
        [r, t.op.kind, t.op.stage, t.op.microbatch, t.start, t.end] for r, row in enumerate(whole.rows) for t in row
    ]
    timelines.append(json.dumps({"iteration": 2, "number": 0, "why": "start", "ops": ops}))
    told = read_story(lines, name="run", timelines=timelines)
    assert told.memory is not None
    assert told.memory.source == "by each schedule's own order"
    assert told.memory.peaks == pytest.approx(whole.peak_activations)
    assert [timeline.source for _, timeline in told.shown] == ["measured", "measured"]
    assert [len(timeline.ops) for _, timeline in told.shown] == [1, 2]


def test_a_dead_link_is_a_fault_and_keeping_is_not_counted() -> None:
    lines: list[str] = []
    controller = Controller(job(), log=lines.append)
    for number in range(6):
        controller.feed(Transfers.of((0, 1), [(1.0, 10.0 * at, 10.0 * at + 0.1) for at in range(8)]))
        controller.feed(IterationEnded(number, 390.0))
        if number == 2:
            (decision,) = controller.feed(LinkDown((0, 1)))
            controller.feed(Switched(decision.number))
    story = read_story(lines, name="dead")
    assert [(each.iteration, each.what) for each in story.faults] == [(3, "link 0–1 went down")]
    assert [each.kept for each in story.iterations[3:]] == [None] * 3
    assert story.saved == 0, "nothing was late before it, and iterations took as long"
    assert "link 0–1 went down" in to_page(story)


def test_what_delegates_counted_is_told_where_it_rose() -> None:
    rows: list[dict[str, Any]] = [
        {"iteration": each.number, "ms": each.ms, "number": each.decision, "links": {}}
        for each in story_of().iterations
    ]
    for row in rows[4:]:
        row["counters"] = {"messages": 900, "failovers": 1, "resent": 3}
    told = read_story(log_of(), name="run", iterations=map(json.dumps, rows))
    assert told.counters == (
        ("connections that went on over another interface", 1.0),
        ("chunks of messages sent again", 3.0),
    )
    assert [(each.iteration, each.what) for each in told.faults] == [
        (4, "connections that went on over another interface: 1, chunks of messages sent again: 3")
    ]
    assert "Faults" in to_page(told)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty log"),
        (["{}"], "no controller's log"),
        (["nonsense", "{}"], "line 1 of the log is not JSON"),
        (log_of()[:1], "no iteration that ended"),
        ([log_of()[0], '{"event": {"switched": {"number": 7}}}'], "decision 7, which it does not have"),
        ([log_of()[0], '{"decision": {"number": 1}}'], "a decision that this version did not write"),
        ([log_of()[0], "[1]"], "no JSON object"),
    ],
)
def test_a_log_that_makes_no_sense_is_an_error(lines: list[str], message: str) -> None:
    with pytest.raises(ControlError, match=message):
        read_story(lines, name="run")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("iterations", '{"iteration": 3, "ms": 1.0}'),
        ("timelines", '{"number": 99, "ops": []}'),
        ("timelines", '{"number": 0, "ops": [[0, "F"]]}'),
        ("timelines", '{"iteration": 1}'),
    ],
)
def test_records_that_do_not_fit_are_an_error(file: str, line: str) -> None:
    with pytest.raises(ControlError, match=rf"{file}\.jsonl, line 1, is no record of an iteration"):
        read_story(log_of(), name="run", **{file: [line]})  # type: ignore[arg-type]
