"""Slices of a sequence as a grid of stages: their order, their time, and gradients equal to a loop over slices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
import slice_runs as runs
from penstock.formats.native import from_json, to_json
from tiers import examples


@settings(max_examples=examples(20))
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_slices_run_forward_in_order_and_backward_in_reverse(p: int, num: int, n: int, split: bool) -> None:
    program = runs.sliced(p, num, n, split)
    schedule = program.build()
    for part, row in enumerate(schedule.order):
        stages = list(range(part * num, (part + 1) * num))
        for m in range(n):
            assert [op.stage for op in row if op.kind == "F" and op.microbatch == m] == stages
            assert [op.stage for op in row if op.kind in "BI" and op.microbatch == m] == stages[::-1]
    assert ps.parse(str(schedule)) == schedule
    assert from_json(to_json(schedule)) == schedule
    timeline = ps.simulate(schedule, program.costs)
    assert ps.simulate(timeline.executed(), program.costs).makespan == pytest.approx(timeline.makespan)


def test_the_grid_is_drawn(golden: Callable[[str, str], None]) -> None:
    golden("seq1f1b.txt", str(runs.sliced(2, 2, 4).build()) + "\n")


def test_slices_shrink_the_bubble_and_not_the_room() -> None:
    whole = ps.simulate(ps.build("1f1b", 4, 8))
    for num in (2, 4):
        program = runs.sliced(4, num, 8)
        timeline = ps.simulate(program.build(), program.costs)
        assert timeline.makespan == pytest.approx(24 + 9 / num)  # the bubble of 9 ms, cut
        assert max(timeline.peak_activations) <= max(whole.peak_activations) + 1


def looped(forward: Callable[[list[runs.Part], Tensor], Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    """Gradients of a loop over microbatches."""
    parts = runs.parts_of(2)
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(forward(parts, a), b) / 4).backward()
    return {f"{3 * i}.part.{n}": q.grad for i, part in enumerate(parts) for n, q in part.named_parameters()}


def slice_by_slice(parts: list[runs.Part], x: Tensor) -> Tensor:
    stages, made = runs.stages_of(parts, 3), {}
    for i, j in ((i, j) for i in range(2) for j in range(3)):
        given = ([made[i - 1, j]] if i else []) + ([made[i, j - 1]] if j else [])
        made[i, j] = stages[3 * i + j](*(given or [x]))
    return made[1, 2]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_those_of_the_whole_sequence(split: bool) -> None:
    """To the last bit those of a loop over slices; a whole attention sums in another order."""
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, runs.TOKENS, runs.WIDTH, dtype=torch.float64)
    stages, schedule = runs.stages_of(runs.parts_of(2), 3), runs.sliced(2, 3, 4, split).build()
    pipe = ps.Pipeline(stages, schedule, loss_fn=nn.MSELoss())
    pipe.step(x, y, update=False)
    whole, slices = looped(runs.whole, x, y), looped(slice_by_slice, x, y)
    found = {n: p.grad for n, p in pipe.named_parameters()}
    assert set(found) == set(slices)
    for name, gradient in found.items():
        assert gradient is not None
        assert torch.equal(gradient, slices[name]), name  # type: ignore[arg-type]
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-13)
