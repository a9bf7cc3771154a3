"""What is made of the steps that ranks measured."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tune import verify
from penstock.tune.device import Clock, others
from penstock.tune.job import WorkerAnswer
from penstock.tune.verify import measured_of

pytestmark = pytest.mark.unit


def answer(steps: list[list[float]], busy: list[float | None], spans: list[float] | None = None) -> WorkerAnswer:
    """Ranks' steps of 0.1 s of wall time and 0.08 s of their own work, and what others worked meanwhile."""

    def clock(cores: float | None) -> dict[str, float | None]:
        machine = None if cores is None else 0.08 * len(steps) + 0.1 * cores
        return {"wall": 0.1, "own": 0.08, "machine": machine}

    rows: list[dict[str, Any]] = [{"steps": row, "clocks": [clock(cores) for cores in busy]} for row in steps]
    return WorkerAnswer(
        [
            {**row, "makespans": spans or steps[0], "pipeline_rank": rank // 2, "peak_bytes": 100 * rank}
            for rank, row in enumerate(rows)
        ],
        None,
    )


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "num_cores", lambda: 2)


def test_a_step_lasts_until_its_slowest_rank_is_done() -> None:
    told = measured_of([answer([[10.0, 20.0, 30.0], [12.0, 15.0, 31.0]], [0.0, 0.0, 0.0], [5.0, 6.0, 7.0])])
    assert (told.step, told.makespan, told.steps) == (20.0, 6.0, (12.0, 20.0, 31.0))
    assert told.quiet


def test_memory_is_the_highest_of_each_rank_over_its_replicas() -> None:
    """Four processes: ranks 0 and 1 of a pipeline, two replicas of each."""
    assert verify.measured_of([answer([[1.0]] * 4, [0.0])]).peak_bytes == (100.0, 300.0)


def test_steps_that_others_disturbed_are_left_out() -> None:
    told = measured_of([answer([[10.0, 90.0, 11.0, 80.0, 12.0]] * 2, [0.0, 1.2, 0.2, 0.9, 0.1])])
    assert told.step == 11.0
    assert told.undisturbed == 3
    assert told.others == pytest.approx(0.1)
    assert len(told.steps) == 5


def test_others_may_have_the_cores_that_no_rank_needs() -> None:
    told = measured_of([answer([[10.0, 11.0, 12.0]], [1.1, 1.0, 0.9])])
    assert told.quiet
    assert not measured_of([answer([[10.0, 11.0, 12.0]], [1.9, 1.9, 0.9])]).quiet


def test_where_all_were_disturbed_all_count() -> None:
    told = measured_of([answer([[10.0, 20.0], [10.0, 20.0]], [1.0, 1.0]), answer([[30.0]] * 2, [0.0])])
    assert (told.step, told.undisturbed, told.quiet) == (20.0, 1, False)


def test_where_the_machine_does_not_tell_all_count() -> None:
    told = measured_of([answer([[10.0, 20.0, 30.0]], [None, None, None])])
    assert (told.step, told.quiet, told.others) == (20.0, True, None)


def test_what_others_work_is_what_the_ranks_do_not() -> None:
    assert others([{"wall": 2.0, "own": 1.0, "machine": 4.0}, {"wall": 2.0, "own": 1.5, "machine": 0.0}]) == 0.75
    assert others([{"wall": 2.0, "own": 3.0, "machine": 1.0}]) == 0.0
    assert others([{"wall": 2.0, "own": 3.0, "machine": None}]) is None
    before = Clock(1.0, 1.0, float("nan"))
    assert Clock(2.0, 1.5, float("nan")).since(before) == {"wall": 1.0, "own": 0.5, "machine": None}
