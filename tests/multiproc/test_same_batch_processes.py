"""A batch that one process of a mesh has otherwise than the others is refused in all of them, wherever it lies."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

import compatibility_cells as cells
from compatibility_cells import Cell
from fuzz_cases import Outcome
from fuzz_runs import between_processes
from penstock.runtime import RuntimeFailure
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

STRANGER = 1
"""The process that is given another batch."""


def refused(what: str, cell: Cell) -> Outcome:
    """What a process says where one of them has another batch."""
    pipe = cells.pipeline_of(cell, cells.model_of(cell), cells.place_of(cell), timeout=PATIENCE)
    x, y = cells.batch_of(cell, 1)
    x = x + (dist.get_rank() == STRANGER)
    try:
        pipe.predict(x) if what == "predict" else getattr(pipe, what)(x, y)
    except RuntimeFailure as error:
        if f"rank {STRANGER} was given another batch than rank 0" in str(error):
            return Outcome("same")
        return Outcome("different", f"{type(error).__name__}: {error}")
    finally:
        pipe.close()
    return Outcome("different", f"{what} took it")


@pytest.mark.parametrize("what", ["step", "evaluate", "predict"])
def test_shards_and_replicas_of_a_stage_were_given_other_batches(what: str) -> None:
    """Shards trained on a mixture of both without a word, and so did all processes predict."""
    given = [Cell("1f1b", mesh="tp 2"), Cell("1f1b", mesh="dp 2")]
    for cell, outcome in zip(given, between_processes(2, given, partial(refused, what)), strict=True):
        assert outcome.kind == "same", (cell, outcome)


@pytest.mark.parametrize("mesh", ["pp 2 dp 2", "pp 2 tp 2"])
def test_the_other_pipeline_waited_for_one_whose_processes_had_other_batches(mesh: str) -> None:
    """It ended with its timeout, as the processes that knew raised alone."""
    given = [Cell("1f1b", mesh=mesh)]
    (outcome,) = between_processes(4, given, partial(refused, "step"))
    assert outcome.kind == "same", outcome
