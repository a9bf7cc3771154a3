"""Faults while two hosts train by delegates: training goes on, nothing is lost or doubled, numbers stay the same.

A sample; `python benchmarks/lab/faults.py` does the same as often as wanted, with measurements.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.lab.faults import DATA, run, training_in_a_lab
from labs import left_of, needs_lab
from waiting import PATIENCE

pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("lab"), needs_lab]


@pytest.mark.slow
@pytest.mark.parametrize("faults", [["interface"], pytest.param(["loss"], marks=pytest.mark.nightly)])
def test_training_goes_on(faults: list[str], record_property: pytest.RecordProperty) -> None:
    rows = run(faults, seed=3, num_steps=3)
    record_property("rows", rows)
    for row in rows:
        assert row["equal"], f"{row['fault']}: parameters are not those of the run without a fault"
        assert row["same_losses"], row["fault"]
        assert row["num_messages"] == row["num_messages_due"] == 2 * 4 * 3, row["fault"]
        assert row["before_the_end"], f"{row['fault']} came too late to show anything"
    by_name = {row["fault"]: row for row in rows}
    failovers = {name: sum(each["failovers"] for each in row["counters"].values()) for name, row in by_name.items()}
    assert failovers["none"] == 0
    if "interface" in faults:
        assert failovers["interface"] >= 1


@pytest.mark.nightly
def test_where_no_way_is_left_each_rank_says_so_and_ends() -> None:
    with training_in_a_lab(num_runs=1, num_steps=50, timeout=15.0) as (lab, training, _):
        name = lab.name
        training.job.go(0).touch()
        training.hear(0, "step 0")
        for nic in (0, DATA):
            lab.interface_down(1, nic)
        start = time.monotonic()
        codes = [process.wait(PATIENCE) for process in training.ranks]
        assert codes == [1, 1], time.monotonic() - start
        with pytest.raises(RuntimeError):
            training.hear(0, "equal")
        said = {host: [line for line in lines if "penstock:" in line] for host, lines in training.errors.items()}
        assert [len(lines) for lines in said.values()] == [1, 1], said
        for rank, (line,) in said.items():
            assert f"rank {rank} failed: DeadlineExceeded" in line
            assert "15 s" in line
    assert left_of(name) == []
