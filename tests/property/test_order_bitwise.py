"""Whatever orders of microbatches are declared, all numbers are those of a plain loop in these orders, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from ordered_loop import SOME_WORTH, wrong
from strategies import reordered
from tiers import examples

pytestmark = pytest.mark.property

BASES: list[tuple[str, int, int, dict]] = [
    ("gpipe", 3, 4, {}),
    ("1f1b", 3, 5, {}),
    ("interleaved-1f1b", 2, 4, {}),
    ("looped-bfs", 2, 4, {}),
    ("zb", 3, 6, {"warmup": [5, 3, 1]}),
    ("zb-v", 2, 5, {}),
    ("chimera", 2, 4, {"backward": "split"}),
    ("dualpipe", 2, 4, {}),
]


@st.composite
def schedules(draw: st.DrawFn) -> ps.Schedule:
    name, ranks, microbatches, options = draw(st.sampled_from(BASES))
    return draw(reordered(ps.build(name, ranks, microbatches, **options)))


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    schedule=schedules(),
    dispatch=st.sampled_from(["frozen", "dynamic"]),
    merge=st.sampled_from([0, SOME_WORTH, 1 << 20]),
    extra=st.integers(0, 3),
    tied=st.booleans(),
)
def test_any_declared_order(schedule: ps.Schedule, dispatch: str, merge: int, extra: int, tied: bool) -> None:
    torch.set_num_threads(1)
    alone = schedule.placement.num_pipelines == 1
    assert wrong(schedule, dispatch, merge, extra, tied and alone) == []
