"""Random training runs in one process; benchmarks/fuzz runs thousands, and between processes as well."""

from __future__ import annotations

import warnings

import pytest

import fuzz_cases
from fuzz_cases import PLANTED, draw, run, with_turns
from tiers import others_nightly

pytestmark = pytest.mark.usefixtures("one_thread")
IN_ONE = [name for name, case in PLANTED.items() if case.shape is None]


@pytest.mark.parametrize("name", IN_ONE)
def test_a_mistake_that_was_there_once(name: str) -> None:
    outcome = run(PLANTED[name], None)
    assert outcome.kind == "same", outcome.detail


@pytest.mark.parametrize("seed", others_nightly(range(20), range(10)))
def test_random_runs_are_the_plain_loop_to_the_bit(seed: int) -> None:
    _right_or_refused(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", others_nightly(range(20, 100), range(20, 25)))
def test_more_random_runs_are_the_plain_loop_to_the_bit(seed: int) -> None:
    _right_or_refused(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", others_nightly(range(200, 260), range(200, 206)))
def test_so_are_runs_that_turn_to_another_schedule_or_are_resumed(seed: int) -> None:
    _right_or_refused(seed, turns=True)


def _right_or_refused(seed: int, turns: bool = False) -> None:
    case = with_turns(draw(seed)) if turns else draw(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = run(case, None)
    assert outcome.kind in ("same", "refused", "late", "invalid"), f"{case}: {outcome.detail}"


def test_few_random_runs_are_refused_or_have_nothing_to_compare() -> None:
    cases = [draw(seed) for seed in range(400)]
    assert sum(case.form == "subclass" for case in cases) < 70  # these alone may be refused
    assert {case.schedule for case in cases} >= {"distmm", "chimera", "zb-v", "amdp", "mllm"}


def test_a_run_that_differs_is_found() -> None:
    """A pipeline whose model is changed behind its back is not the plain loop."""

    def shifted(model: object, case: fuzz_cases.Case) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the pipeline's, after the plain loop's
            parameter = next(p for p in fuzz_cases.as_module(model).parameters() if p.requires_grad)
            parameter.data.add_(0.5)

    calls = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz_cases, "after", shifted)
        outcome = run(fuzz_cases.Case(3, ("linear", "linear")), None)
    assert outcome.kind == "different", outcome
