"""The benchmark of head-of-line blocking, in small: its rows and what the simulator says of the paper's case."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from benchmarks.head_of_line import run as head_of_line
from benchmarks.head_of_line.run import GPT_7B, PAPER, cases

pytestmark = pytest.mark.unit


def test_the_papers_case_blocks_on_direct_and_less_on_delegates() -> None:
    schedule = ps.build("zb", 4, GPT_7B.num_microbatches)
    found = {}
    for case in cases([GPT_7B]):
        if case.schedule == "zb":
            transport = "decoupled" if case.depth is None else ps.Blocking(case.depth)
            links = ps.Links.parse(case.links)
            makespan = ps.simulate(schedule, GPT_7B.costs, links=links, transport=transport).makespan
            found[case.links, case.transport, case.depth] = makespan
    normal = found["", "direct", 2]
    blocked = found["0:1=occupancy:30ms", "direct", 2] / normal
    assert blocked == pytest.approx(PAPER["zb", "0:1=occupancy:30ms", "direct"], rel=0.05)
    assert found["0:1=latency:30ms", "delegate", None] / normal < 1.5
    delegated = found["2:3=latency:30ms", "delegate", None] / normal
    assert delegated == pytest.approx(PAPER["zb", "2:3=latency:30ms", "delegate"], rel=0.05)


@pytest.mark.slow
def test_a_row_for_every_case() -> None:
    small = replace(GPT_7B, name="small", num_microbatches=4)
    rows = list(head_of_line.run([small], steps=1, stretch=0.1))
    assert len(rows) == len(list(cases([small]))) == 34
    for row in rows:
        assert row["paper"] is None, "these numbers are of another pipeline"
        assert row["measured_ms"][0] > 0
        if not row["links"]:
            assert row["simulated"] == row["measured"] == 1.0
        elif "occupancy" in row["links"]:
            assert row["simulated"] > 1
    assert len(head_of_line.table(rows).splitlines()) == 2 + len(rows)
