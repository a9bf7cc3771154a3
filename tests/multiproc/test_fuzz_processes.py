"""Random training runs between processes; benchmarks/fuzz runs hundreds."""

from __future__ import annotations

import pytest

from fuzz_cases import PLANTED, Case, draw
from fuzz_runs import SHAPES, between_processes
from tiers import sample

pytestmark = pytest.mark.multiproc


def _size(case: Case) -> int:
    pp, dp, tp = case.shape or (1, 1, 1)
    return pp * dp * tp


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_mistakes_that_were_there_once(num_processes: int) -> None:
    cases = {name: case for name, case in PLANTED.items() if case.shape and _size(case) == num_processes}
    outcomes = between_processes(num_processes, list(cases.values()))
    wrong = {name: o.detail for name, o in zip(cases, outcomes, strict=True) if o.kind != "same"}
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", list(SHAPES))
def test_random_runs_are_the_plain_loop(num_processes: int) -> None:
    shapes = SHAPES[num_processes]
    cases = [draw(seed, shapes[seed % len(shapes)]) for seed in range(sample(10, 4))]
    outcomes = between_processes(num_processes, cases)
    fine = ("same", "refused", "late", "invalid")
    wrong = {str(case): o.detail for case, o in zip(cases, outcomes, strict=True) if o.kind not in fine}
    assert not wrong
