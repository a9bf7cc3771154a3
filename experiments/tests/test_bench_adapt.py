"""The benchmark of `--adapt`: its cells, how runs are judged, and its summary, on records made by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adapt import cells, judge, ranks, run
from penstock.control import Controller, rehearse
from penstock.cost import Links
from penstock.cost.conditions import LinkQueue
from penstock.runtime.transport.link_conditions import Conditions

pytestmark = pytest.mark.unit

CELL = cells.CELLS["emulated-quiet-60ms-from12-end"]
FAULT = ((2, 3), 20, 100)


def rows(ms: Sequence[float], numbers: Sequence[int], digests: Sequence[str] = ("start", "other")) -> list[str]:
    """Lines of iterations.jsonl."""
    return [
        json.dumps({"iteration": at, "ms": each, "number": number, "digest": digests[number], "links": {}})
        for at, (each, number) in enumerate(zip(ms, numbers, strict=True))
    ]


def decision(made: int, reason: str = "link 2:3: 0 -> 60 ms", **others: Any) -> str:
    value = {"number": 1, "iteration": made, "action": "delegate", "reason": reason, "digest": "other"}
    configuration = {"delegated": [], "nodes": [0, 1, 2, 3]}
    return json.dumps({"decision": {**value, "configuration": configuration, **others}})


HEALTHY, LATE, ANSWERED = [100.0] * 20, [200.0] * 80, [150.0] * 80
ORACLE, WITHOUT = [*HEALTHY, *ANSWERED], [*HEALTHY, *LATE]
WITH = [*HEALTHY, *LATE[:8], *ANSWERED[8:]]
SEED = judge.Seed(ORACLE, WITHOUT, WITH, FAULT, [decision(22)], rows(WITH, [0] * 28 + [1] * 72), saved=3_600.0)


def test_an_answered_fault() -> None:
    row = judge.judge_seed(SEED)
    assert row["recoverable"] == 80 * 50
    assert row["recovered"] == row["claimed"] == 72 * 50
    assert (row["onset"], row["made"], row["ran_from"]) == (20, 22, 28)
    assert (row["answered"], row["decisions"], row["false"], row["false_ms"]) == (True, 1, 0, 0)
    assert judge.share(row) == 0.9
    assert judge.page_error(row) == 0
    cell = judge.judge_cell(0, True, None, [row] * 3)
    assert (cell["answered"], cell["steps_to_decision"], cell["missed"]) == (3, [2, 2, 2], [])


def test_the_middle_of_the_page_s_range_counts_and_silence_is_counted() -> None:
    row = judge.judge_seed(replace(SEED, saved=None, about=7_200.0))
    assert (row["claimed"], row["is_range"], judge.page_error(row)) == (7_200.0, True, 1.0)
    silent = judge.judge_seed(replace(SEED, saved=None))
    assert silent["claimed"] is None
    cell = judge.judge_cell(0, True, None, [silent, judge.judge_seed(SEED)])
    assert (cell["page_silent"], cell["page_right"]) == (1, 1)
    assert cell["missed"] == ["the page cannot tell what was saved in half of the runs or more"]


def test_a_change_that_costs_more_than_the_fault_misses_its_aims() -> None:
    worse = [*HEALTHY, *LATE[:8], *[220.0] * 72]
    seed = replace(SEED, adapting=worse, iterations=rows(worse, [0] * 28 + [1] * 72))
    row = judge.judge_seed(seed)
    assert row["recovered"] == -72 * 20
    assert judge.has_wrong_sign(row), "the page says saved"
    missed = judge.judge_cell(0, True, None, [row])["missed"]
    assert len(missed) == 4
    assert judge.judge_cell(2, True, None, [row])["missed"] == missed[1:], (
        "no share is promised beside two busy cores"
    )


@pytest.mark.parametrize(
    ("fault", "made", "reason", "false"),
    [
        (None, 50, "link 2:3: 0 -> 60 ms", 1),
        (FAULT, 19, "link 2:3: 0 -> 60 ms", 1),
        (FAULT, 20, "link 3:2: 0 -> 60 ms", 0),
        (FAULT, 20, "link 0:1: 0 -> 60 ms", 1),
        (FAULT, 20, "links 0:1 and 2:3 are late", 0),
        (FAULT, 20, "a better plan was offered", 0),
        (((2, 3), 20, 22), 23, "link 2:3: 0 -> 60 ms", 1),
    ],
)
def test_a_decision_is_false_without_the_fault_and_for_another_link(
    fault: Any, made: int, reason: str, false: int
) -> None:
    row = judge.judge_seed(replace(SEED, fault=fault, control=[decision(made, reason)]))
    assert row["false"] == false
    assert row["false_steps"] == 72 * false


def test_what_a_false_decision_costs_is_held_against_the_steps_before_it() -> None:
    ms = [100.0] * 50 + [130.0] * 10 + [100.0] * 40
    back = decision(59, "steps are slower", number=2, action="take back", digest="start")
    lines = rows(ms, [0] * 50 + [1] * 10 + [2] * 40, ("start", "other", "start"))
    plain = [100.0] * 100
    row = judge.judge_seed(judge.Seed(plain, plain, ms, None, [decision(48), back], lines, None))
    assert (row["false"], row["false_steps"], row["false_ms"], row["taken_back"]) == (1, 10, 300.0, 1)
    assert judge.judge_cell(0, False, None, [row])["missed"] == ["more than 1% of a run lost without a fault"]


def test_a_change_that_is_taken_back_or_made_for_nothing_known_is_no_answer() -> None:
    back = rows(WITH, [0] * 28 + [1] * 5 + [2] * 67, ("start", "other", "start"))
    row = judge.judge_seed(replace(SEED, iterations=back))
    assert (row["answered"], row["made"], row["false"]) == (False, 22, 0)
    row = judge.judge_seed(replace(SEED, control=[decision(22, "simulated 23 ms an iteration instead of 29")]))
    assert (row["answered"], row["made"], row["false"]) == (False, None, 0)


def test_a_change_without_words_is_for_the_link_that_it_delegates_or_for_which_nodes_move() -> None:
    for configuration in ({"delegated": [[2, 3]]}, {"delegated": [], "nodes": [0, 2, 1, 3]}):
        control = [decision(22, "simulated 300 ms an iteration instead of 360", configuration=configuration)]
        assert judge.judge_seed(replace(SEED, control=control))["answered"]
        assert judge.is_answered(control, SEED.iterations, (2, 3))


def test_to_stop_delegating_after_the_fault_is_not_false() -> None:
    control = [decision(22), decision(60, "link 0:1: 60 -> 0 ms", number=2, action="stop delegating", digest="third")]
    row = judge.judge_seed(replace(SEED, fault=((2, 3), 20, 50), control=control))
    assert (row["false"], row["decisions"], row["taken_back"]) == (0, 1, 1)


def test_going_back_to_the_start_is_not_false() -> None:
    back = decision(90, "link 2:3: 60 -> 0 ms", number=2, action="stop delegating", digest="start")
    lines = rows(WITH, [0] * 28 + [1] * 64 + [2] * 8, ("start", "other", "start"))
    fault = ((2, 3), 20, 85)
    assert judge.judge_seed(replace(SEED, fault=fault, control=[decision(22), back], iterations=lines))["false"] == 0


def test_a_burst_must_not_be_answered() -> None:
    row = judge.judge_seed(SEED)
    assert "a burst was answered" in judge.judge_cell(0, True, 3, [row])["missed"]
    assert judge.judge_cell(0, True, 20, [row])["missed"] == []


def test_a_share_of_next_to_nothing_does_not_count() -> None:
    assert judge.share({"recoverable": 20.0, "recovered": -300.0, "run_ms": 1_000.0}) is None


def test_every_cell_has_its_own_name_and_conditions_that_can_be_read() -> None:
    assert len(cells.CELLS) >= 12
    assert {cell.load for cell in cells.CELLS.values()} == {0, 1, 2}
    for cell in cells.CELLS.values():
        for seed in range(3):
            fault = cells.fault_of(cell, seed)
            links = Links.parse(cells.conditions_of(cell, fault))
            assert set(links.conditions) == set(cells.links_of(cell))
            for link, condition in links.conditions.items():
                changes = [condition.delay_of(1e4, at * 1e3, LinkQueue()).arrived - at * 1e3 for at in AT]
                assert max(changes[0], changes[2]) < 0.1
                assert (changes[1] > 0.1) is (fault is not None and fault.link == link)


AT = (1.0, cells.BEGIN, cells.END)
"""Seconds of the conditions' time: before the fault, in it, and after it."""


def test_a_fault_begins_and_ends_by_steps_and_seeds_differ() -> None:
    burst = cells.CELLS["emulated-quiet-120ms-from12-3steps"]
    first = burst.num_steps // 5 + 1
    assert cells.fault_of(burst, 1) == cells.Fault((1, 2), first, first + 3)
    assert len({cells.fault_of(CELL, seed) for seed in range(20)}) == 15
    assert cells.fault_of(CELL, 0).end == CELL.num_steps
    assert cells.fault_of(cells.CELLS["emulated-quiet-30ms-from0-end"], 4).first == 0
    assert cells.fault_of(cells.CELLS["real-quiet-60ms-from12-end"], 0).first > cells.WARMUP["real"]
    assert cells.fault_of(cells.CELLS["emulated-quiet-none"], 1) is None


def test_steps_before_the_first_that_counts_do_not_count() -> None:
    row = judge.judge_seed(replace(SEED, warmup=20, adapting=[9_000.0] * 20 + WITH[20:]))
    assert (row["run_ms"], row["recovered"]) == (16_000.0, 3_600.0)


def test_the_oracle_answers_before_the_first_step_of_the_fault_and_goes_back_after_the_last() -> None:
    job = cells.emulated_job(CELL)
    answer = replace(job.start, dispatch="dynamic")
    conditions, told = Conditions(Links.parse("0:1=latency:steps:0s/0ms,1e5s/60ms,2e5s/0ms")), []

    def step() -> float:
        told.append(round((time.perf_counter_ns() - conditions.origin) / 1e9, -5))
        return 100.0

    given = ranks.Given(CELL, 0, job.start, answer, cells.Fault((0, 1), 2, 4))
    driver = ranks.Driver(step, told.append, lambda: conditions)
    assert len(driver.run(given, "oracle", 6)) == 6
    assert told == [0, 0, answer, 1e5, 1e5, job.start, 2e5, 2e5]
    told.clear()
    driver.set_clock(0)
    driver.run(given, "without", 6)
    assert told == [0, 0, 1e5, 1e5, 2e5, 2e5]


@pytest.mark.parametrize("fault", ["latency:60ms", "bandwidth:5Mbit/s"])
def test_the_oracle_s_answer_is_at_least_as_fast_as_what_a_rehearsed_run_ends_with(fault: str) -> None:
    job = cells.emulated_job(CELL)
    links = Links({(2, 3): fault})
    best = cells.simulated_ms(job, cells.best_answer(job, (2, 3), fault), links)
    assert best < cells.simulated_ms(job, job.start, links)
    assert best <= rehearse(Controller(job), links, until=20_000).iterations[-1].ms + 1e-6


def test_a_tutorial_s_run_is_answered_if_the_change_for_the_link_stays() -> None:
    lines = rows(WITH, [0] * 28 + [1] * 72)
    assert judge.is_answered([decision(22)], lines, (2, 3))
    assert not judge.is_answered([decision(22, "link 0:1: 0 -> 60 ms")], lines, (2, 3))
    back = rows(WITH, [0] * 28 + [1] * 32 + [2] * 40, ("start", "other", "start"))
    assert not judge.is_answered([decision(22)], back, (2, 3))


def test_a_seed_is_read_from_what_its_runs_left(tmp_path: Path) -> None:
    for mode in cells.MODES:
        (tmp_path / mode).mkdir()
        said = {"steps": WITHOUT, "fault": cells.Fault((2, 3), 20, 100), "answer": "dynamic"}
        (tmp_path / mode / cells.STEPS).write_text(json.dumps(said))
    lines: list[str] = []
    job = cells.emulated_job(CELL)
    ran = rehearse(Controller(job, log=lines.append), Links({(2, 3): 60.0}), until=20_000)
    (tmp_path / "with" / cells.CONTROL).write_text("\n".join(lines))
    took, numbers = [each.ms for each in ran.iterations], [each.decision for each in ran.iterations]
    digests = [job.start.digest, *(each.configuration.digest for each in ran.decisions)]
    (tmp_path / "with" / run.ITERATIONS).write_text("\n".join(rows(took, numbers, digests)))
    seed = run.read_seed(tmp_path, 30)
    assert (seed.oracle, seed.fault, seed.warmup) == (WITHOUT, FAULT, 30)
    assert (len(seed.iterations), len(seed.control)) == (len(took), len(lines))
    assert judge.judge_seed(seed)["recoverable"] == 0


def test_a_summary_is_whole_and_holds_if_every_cell_does(tmp_path: Path) -> None:
    quiet = {"recoverable": 0.0, "recovered": 0.0, "claimed": 0.0, "made": None, "ran_from": None}
    made = {"reruns": [], "commit": "0123456", "load": 1.0, "seconds": 30.0, "answered": True}
    for name, cell in cells.CELLS.items():
        row = judge.judge_seed(SEED)
        if not cell.is_to_the_end:
            row |= {**quiet, "decisions": 0}
        for seed in range(20):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"seed-{seed:02d}.json").write_text(json.dumps(row | made))
    for load in (0, 1):
        folder = tmp_path / run.tutorial_name(load)
        folder.mkdir()
        for number in range(20):
            (folder / f"seed-{number:02d}.json").write_text(json.dumps(made))
    value = run.summary(tmp_path)
    assert (value["holds"], value["is_whole"]) == (True, True)
    assert len(run.to_lines(value).splitlines()) <= 100
    assert json.loads(run.to_lines(value)) == json.loads(json.dumps(value))
    assert len(run.table(value)) == 2 + len(cells.CELLS)
    for number in range(3):
        (tmp_path / run.tutorial_name(0) / f"seed-{number:02d}.json").write_text(
            json.dumps(made | {"answered": False})
        )
    assert not run.summary(tmp_path)["holds"], "17 of 20"
