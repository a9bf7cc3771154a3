"""Plans and warm-ups that Megatron cannot run are refused before it does anything, and without it.

That Megatron runs the others is in tests/multiproc/test_megatron.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.integrations.megatron import PlannedCommunicator, follow, planned_1f1b

pytestmark = pytest.mark.unit

CONFIG = SimpleNamespace(virtual_pipeline_model_parallel_size=None)


def group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


@pytest.mark.parametrize("plan", [ps.build("zb-h1", 4, 8), ps.build("interleaved-1f1b", 4, 8, backward="split")])
def test_plans_with_split_backwards_are_refused(plan: ps.Schedule) -> None:
    with pytest.raises(ps.ScheduleError, match=r"the plan has \dI0, but Megatron runs whole backwards alone"):
        follow(plan)


@pytest.mark.parametrize("name", ["zb-v", "hanayo", "chimera"])
def test_plans_with_another_placement_are_refused(name: str) -> None:
    with pytest.raises(ps.ScheduleError, match=r"lacks Megatron's placement, stage s on rank s mod P"):
        follow(ps.build(name, 4, 8))


def test_plans_with_recomputing_are_refused() -> None:
    with pytest.raises(ps.ScheduleError, match="the plan has 0R0, but Megatron runs whole backwards alone"):
        follow(ps.parse("rank 0 | F0 R0 B0\nrank 1 | F0 B0"))


def test_plans_whose_forwards_are_not_in_ascending_order_are_refused() -> None:
    plan = ps.passes.reorder_microbatches(ps.build("gpipe", 2, 3), forward="reversed")
    with pytest.raises(ps.ScheduleError, match="forwards are not in ascending order"):
        follow(plan)


def test_plans_whose_messages_hang_or_are_confused_are_refused() -> None:
    placed = ps.passes.add_communication(ps.build("1f1b", 2, 2), channels="gloo")
    follow(placed)
    receives = [op for op in placed.order[1] if op.kind == "RECV_F"]
    swapped = dict(zip(receives, reversed(receives), strict=True))
    confused = replace(placed, order=(placed.order[0], tuple(swapped.get(op, op) for op in placed.order[1])))
    with pytest.raises(ps.ScheduleError, match="messages are matched by their order"):
        follow(confused)
    with pytest.raises(ps.ScheduleError, match="ranks wait for one another"):
        follow(ps.parse("rank 0 | F0 B0 F1 B1\nrank 1 | F0 F1 B0 B1"))


@pytest.mark.parametrize(
    ("warmup", "size", "said"),
    [
        ([3, 5, 2, 1], 4, "never rise"),
        ([2, 1, 0], 3, "at least 1"),
        ([3, 2, 1], 4, "warmup has 3 counts, the pipeline 4 ranks"),
        ([], 4, "warmup has 0 counts"),
    ],
)
def test_warmups_that_would_hang_are_refused(warmup: list[int], size: int, said: str) -> None:
    with pytest.raises(ps.ScheduleError, match=said):
        PlannedCommunicator(group(size), CONFIG, warmup=warmup)


def test_warmups_of_chunks_are_refused() -> None:
    with pytest.raises(ps.ScheduleError, match=r"2 ranks with 2 stages each; .* use follow\(plan\) for chunks"):
        PlannedCommunicator(group(2), SimpleNamespace(virtual_pipeline_model_parallel_size=2), warmup=[2, 1])


def test_planned_1f1b_is_1f1b_where_counts_are_megatrons() -> None:
    assert planned_1f1b([4, 3, 2, 1], 8) == ps.build("1f1b", 4, 8)
    assert ps.schedule.peak_in_flight(planned_1f1b([9, 5, 3, 1], 8)) == (8, 5, 3, 1)
    with pytest.raises(ps.ScheduleError, match="warmup has 0 counts"):
        planned_1f1b([], 8)
    assert planned_1f1b([8, 8, 8, 8], 8).order == ps.build("gpipe", 4, 8).order
