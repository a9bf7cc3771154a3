"""Replicas and shards that are told to run different schedules from the next step on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

import compatibility_cells as cells
import penstock as ps
from compatibility_cells import Cell
from fuzz_cases import Outcome
from fuzz_runs import between_processes
from penstock.runtime import RuntimeFailure
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc


def reconfigured_apart(cell: Cell) -> Outcome:
    pipe = cells.pipeline_of(cell, cells.model_of(cell), cells.place_of(cell), timeout=PATIENCE)
    x, y = cells.batch_of(cell, 1)
    configuration = pipe.configuration
    if dist.get_rank() == 1:
        configuration = replace(configuration, schedule=ps.build("gpipe", 4, cells.NUM))
    try:
        pipe.reconfigure(configuration)
        pipe.step(x, y)
    except RuntimeFailure as error:
        same = "rank 1 was given another configuration than rank 0" in str(error)
        return Outcome("same" if same else "different", str(error))
    finally:
        pipe.close()
    return Outcome("different", f"took {configuration.schedule.name}")


def test_replicas_and_shards_were_reconfigured_apart() -> None:
    """They took it, as only the ranks of one pipeline compared theirs, and a step did not come to its end."""
    given = [Cell("1f1b", mesh="dp 2"), Cell("1f1b", mesh="tp 2")]
    for cell, outcome in zip(given, between_processes(2, given, reconfigured_apart), strict=True):
        assert outcome.kind == "same", (cell, outcome)
