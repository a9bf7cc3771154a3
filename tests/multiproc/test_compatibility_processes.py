"""Cells of the covering array between processes; benchmarks/compatibility runs all of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import compatibility_cells as cells
import penstock as ps
from compatibility_cells import Cell, run_cell
from fuzz_runs import between_processes
from tiers import chosen, sample

pytestmark = pytest.mark.multiproc

MENDED = {
    "a follower waits for a decision where asynchronous ops alone are left": Cell(
        "chimera", mesh="pp 2 tp 2", dispatch="dynamic", asynchronous="note"
    ),
    "replicas make updates in orders of their own": Cell(
        "amdp", mesh="pp 2 dp 2", dispatch="dynamic", transport="late links", tied=True
    ),
    "a rank that waits for two transports is woken by neither": Cell(
        "mllm", mesh="pp 2 tp 2", dispatch="hinted", transport="gloo", adapt=True, asynchronous="offload"
    ),
    "updates of four ranks run frozen": Cell("amdp", mesh="pp 4", dispatch="hinted", transport="gloo", tied=True),
}
"""By the mistake, cells that went wrong."""


SHARDED = {
    "shards of weights that updates change": Cell("amdp", mesh="pp 2 tp 2", dispatch="dynamic", precision="clipped"),
    "shards of several pipelines' copies in one process": Cell("amdp", mesh="tp 2", sharding="none", tied=True),
    "shards of versions that are held": Cell("pipedream-2bw", mesh="pp 2 tp 2", tied=True, recompute=True),
    "shards and replicas with updates decide together": Cell("amdp", mesh="pp 2 dp 2 tp 2", dispatch="hinted"),
}
"""With updates as ops, by what there is of them."""


def _ended(cells_by_name: dict[str, Cell]) -> dict[str, str]:
    """What went wrong."""
    found: dict[str, str] = {}
    for num in sorted({cell.num_processes for cell in cells_by_name.values()}):
        mine = {name: cell for name, cell in cells_by_name.items() if cell.num_processes == num}
        outcomes = between_processes(num, list(mine.values()), run_cell)
        found |= {f"{n}: {c}": o.detail for (n, c), o in zip(mine.items(), outcomes, strict=True) if o.kind != "same"}
    return found


@pytest.mark.parametrize(
    ("num_processes", "num"),
    [
        (2, sample(12, 3)),
        pytest.param(4, sample(20, 2), marks=pytest.mark.slow),
        pytest.param(8, 8, marks=pytest.mark.nightly),
    ],
)
def test_cells_of_the_array_are_the_plain_loop(num_processes: int, num: int) -> None:
    """At night with those in one process (tests/unit/test_compatibility.py) 60 of them."""
    some = cells.some_cells(num_processes, num)
    outcomes = between_processes(num_processes, some, run_cell)
    assert not {str(c): o.detail for c, o in zip(some, outcomes, strict=True) if o.kind != "same"}


@pytest.mark.parametrize(
    ("num_processes", "num"),
    [
        pytest.param(2, sample(4, 1), marks=pytest.mark.slow),
        pytest.param(4, sample(24, 2), marks=pytest.mark.slow),
        pytest.param(8, 4, marks=pytest.mark.nightly),
    ],
)
def test_rules_that_predict_go_with_every_other_feature(num_processes: int, num: int) -> None:
    some = cells.some_cells(num_processes, num, "rules")
    outcomes = between_processes(num_processes, some, run_cell)
    assert not {str(c): o.detail for c, o in zip(some, outcomes, strict=True) if o.kind != "same"}


@pytest.mark.slow
def test_mistakes_that_were_there_once() -> None:
    assert not _ended(MENDED)


@pytest.mark.slow
def test_updates_of_shards() -> None:
    by_day = [name for name, cell in SHARDED.items() if cell.num_processes < 8]
    assert not _ended(chosen(SHARDED, by_day))


@dataclass(frozen=True)
class Gated(Cell):
    """An asynchronous op of the first rank comes between a forward and a backward of the other."""

    @property
    def schedule(self) -> ps.Schedule:
        gate = ps.NewOp("NOTE", 0, after={("F", 1): 1}, before={("B", 1): 1}, asynchronous=True)
        return ps.Program(ps.placements.one_to_one(2), cells.NUM, ps.Rules("backward-first"), ops=[gate]).build()


@pytest.mark.slow
def test_a_shard_that_waits_for_a_decision_starts_asynchronous_ops_meanwhile() -> None:
    """What the first shard decides may wait for what the other shards of another rank wait for here."""
    assert not _ended({"gated": Gated(mesh="pp 2 tp 2", dispatch="dynamic", asynchronous="note")})
