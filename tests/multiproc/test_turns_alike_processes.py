"""Processes with all ranks of a pipeline each, which take turns: what comes late must not change whose turn it is, or
collectives of one process would meet other ones of another.

The cells are those of `compatibility_cells`. Their NOTE ops end late, at other moments in every process. So do
messages over late links here, as forwards take longer.
"""

from __future__ import annotations

import os
import random
import time
from unittest import mock

import pytest
from torch import Tensor, nn

import compatibility_cells as cells
import penstock as ps
from compatibility_cells import Cell
from fuzz_cases import Outcome
from fuzz_runs import between_processes
from tiers import NIGHTLY

pytestmark = pytest.mark.multiproc

ASYNCHRONOUS = [
    Cell("amdp", mesh="dp 2", asynchronous="note"),
    Cell("amdp", mesh="dp 2", asynchronous="note", sharding="zero1", dispatch="dynamic"),
    Cell("pipedream-2bw", mesh="dp 2", asynchronous="note"),
    Cell("1f1b", mesh="tp 2", asynchronous="note"),
    Cell("zb-v", mesh="tp 2", asynchronous="note", dispatch="dynamic"),
    Cell("mllm", mesh="dp 2", asynchronous="note"),
]
LATE = [
    Cell("amdp", mesh="dp 2", transport="late links"),
    Cell("amdp", mesh="dp 2", transport="late links", asynchronous="note", sharding="zero1"),
    Cell("1f1b", mesh="tp 2", transport="late links"),
    Cell("chimera", mesh="tp 2", transport="late links", dispatch="dynamic"),
    Cell("pipedream-2bw", mesh="dp 2", transport="late links", dispatch="dynamic"),
]


def unsteadily(cell: Cell) -> Outcome:
    """A cell whose forwards take up to 5 ms more, others in each process: so messages come at other moments."""
    forward, drawn = cells.Block.forward, random.Random(os.getpid())

    def slower(block: nn.Module, *inputs: Tensor) -> Tensor:
        time.sleep(drawn.random() * 0.005)
        return forward(block, *inputs)  # type: ignore[arg-type]

    links = ps.Links({(0, 1): 5.0, (1, 2): 3.0, (2, 3): 7.0})
    with mock.patch.object(cells.Block, "forward", slower), mock.patch.object(cells, "LATE_LINKS", links):
        return cells.run_cell(cell)


@pytest.mark.slow
def test_turns_of_replicas_and_shards_followed_the_ends_of_asynchronous_ops() -> None:
    """Updates of replicas summed other gradients, by up to 0.09, and sums of shards met sums of other ranks."""
    some = ASYNCHRONOUS if NIGHTLY else ASYNCHRONOUS[1:5]
    for cell, outcome in zip(some, between_processes(2, some, cells.run_cell), strict=True):
        assert outcome.kind == "same", (cell, outcome)


@pytest.mark.slow
def test_turns_of_replicas_and_shards_followed_late_messages() -> None:
    some = LATE if NIGHTLY else LATE[1:4]
    for cell, outcome in zip(some, between_processes(2, some, unsteadily), strict=True):
        assert outcome.kind == "same", (cell, outcome)
