"""Loss and every gradient are the plain loop's to the last bit, whatever the schedule, shapes and dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from runtime_cases import Case, compare_case, mlp
from tiers import examples

pytestmark = pytest.mark.property


@st.composite
def schedules(draw: st.DrawFn) -> ps.Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "zb"]))
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    microbatches = draw(st.integers(1, 9))
    options: dict[str, Any] = {}
    if name == "zb-h2":
        microbatches = max(microbatches, 2 * ranks - 1)
    if name == "zb":
        slack = draw(st.integers(1, 3))
        options["warmup"] = [slack * (ranks - i - 1) + 1 for i in range(ranks)]
    if name == "interleaved-1f1b":
        microbatches = ranks * draw(st.integers(1, 3))
        options["num_stages"] = ranks * draw(st.sampled_from([2, 3, 4]))
    return ps.build(name, ranks, microbatches, **options)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    schedule=schedules(),
    dispatch=st.sampled_from(["frozen", "hinted", "dynamic"]),
    defer=st.booleans(),
    width=st.sampled_from([1, 3, 8]),
    tokens=st.sampled_from([0, 1, 5]),
    extra=st.integers(0, 7),
    layers=st.integers(0, 3),
)
def test_any_schedule(
    schedule: ps.Schedule, dispatch: str, defer: bool, width: int, tokens: int, extra: int, layers: int
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(mlp(width) for _ in range(schedule.num_stages + layers)))
    shape = (schedule.num_microbatches + extra, *([tokens] if tokens else []), width)
    steps = [(torch.randn(shape), torch.randn(shape)) for _ in range(2)]
    before = slot_module.MERGE_WORK
    slot_module.MERGE_WORK = 0 if defer else before
    try:
        assert compare_case(Case(model, steps), schedule, dispatch) == []
    finally:
        slot_module.MERGE_WORK = before
