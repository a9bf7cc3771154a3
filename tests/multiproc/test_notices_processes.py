"""What one process finds, the processes of all replicas and shards say at the end of the step."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import compatibility_cells as cells
from compatibility_cells import Cell
from fuzz_cases import Outcome
from fuzz_runs import between_processes
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

FOUND = "an interface is lost"


def noticed(cell: Cell) -> Outcome:
    """Whether a process has a notice, once, that the last process alone took down."""
    pipe = cells.pipeline_of(cell, cells.model_of(cell), cells.place_of(cell), timeout=PATIENCE)
    before = pipe.notices
    if dist.get_rank() == dist.get_world_size() - 1:
        pipe._local.notices.note([FOUND])
    for step in (1, 2):
        pipe.step(*cells.batch_of(cell, step))
    after = pipe.notices
    pipe.close()
    return Outcome("same" if after == [*before, FOUND] else "different", f"{before}, then {after}")


@pytest.mark.parametrize(("mesh", "num"), [("dp 2", 2), ("tp 2", 2), ("pp 2 dp 2", 4)])
def test_a_notice_of_one_replica_or_shard_was_known_to_its_own_pipeline_alone(mesh: str, num: int) -> None:
    """Rank 0, which prints them, never said it."""
    given = [Cell("1f1b", mesh=mesh)]
    (outcome,) = between_processes(num, given, noticed)
    assert outcome.kind == "same", outcome
