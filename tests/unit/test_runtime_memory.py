"""Activations live no longer than their microbatch is in flight."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module

pytestmark = pytest.mark.unit


class Watched(nn.Module):
    """Counts how many of its intermediate results are alive at once; `sin` keeps one until its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        inner = self.before(x)
        self.kept.add(inner)
        self.peak = max(self.peak, len(self.kept))
        return self.after(inner.sin())


def peaks(schedule: ps.Schedule, dispatch: str) -> tuple[list[int], int]:
    stages = [Watched() for _ in range(schedule.num_stages)]
    pipe = ps.Pipeline(stages, schedule, loss_fn=nn.MSELoss(), dispatch=dispatch)
    x = torch.randn(schedule.num_microbatches, 4)
    gc.disable()  # nothing may hang on a cycle
    try:
        pipe.step(x, x)
        return [stage.peak for stage in stages], sum(len(stage.kept) for stage in stages)
    finally:
        gc.enable()


def in_flight(schedule: ps.Schedule) -> list[int]:
    """Most forwards of each stage that have not had their B or I."""
    found = []
    for stage in range(schedule.num_stages):
        held = peak = 0
        for op in schedule.order[schedule.rank_of(stage, 0)]:
            if op.stage == stage:
                held += {"F": 1, "W": 0}.get(op.kind, -1)
                peak = max(peak, held)
        found.append(peak)
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize("defer", [False, True])
def test_graphs_are_freed_with_their_backward(name: str, defer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if defer:
        monkeypatch.setattr(slot_module, "MERGE_WORK", 0)
    for num in (8, 32):
        schedule = ps.build(name, 4, num)
        found, left = peaks(schedule, "frozen")
        assert found == in_flight(schedule)
        assert left == 0
    assert peaks(ps.build(name, 4, 8), "dynamic")[1] == 0


def test_a_step_keeps_neither_batch_nor_messages() -> None:
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss())
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe.step(x, y)
    kept = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [ref() for ref in kept] == [None, None]
