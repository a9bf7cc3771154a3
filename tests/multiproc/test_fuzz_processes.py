"""Random training runs between processes; benchmarks/fuzz runs hundreds."""

from __future__ import annotations

import os
import sys

import pytest
import torch.distributed as dist

import fuzz_runs
from fuzz_cases import PLANTED, Case, Outcome, draw, with_turns
from fuzz_runs import SHAPES, between_processes, run_case
from tiers import NIGHTLY, others_nightly

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
@pytest.mark.parametrize("num_processes", others_nightly(SHAPES, [2, 4]))
def test_random_runs_are_the_plain_loop(num_processes: int) -> None:
    shapes = SHAPES[num_processes]
    seeds = range(10) if NIGHTLY else (0, 2)  # of four processes pipelines alone, and replicas of pipelines
    cases = [draw(seed, shapes[seed % len(shapes)]) for seed in seeds]
    seeds = range(100, 110) if NIGHTLY else (100, 101)  # with shards, and replicas of them
    cases += [with_turns(draw(seed, shapes[seed % len(shapes)])) for seed in seeds]
    outcomes = between_processes(num_processes, cases)
    fine = ("same", "refused", "late", "invalid")
    wrong = {str(case): o.detail for case, o in zip(cases, outcomes, strict=True) if o.kind not in fine}
    assert not wrong


def steps_many_at_once(case: Case) -> Outcome:
    """As optimizers of torch do by default where parameters lie on a GPU."""
    with pytest.MonkeyPatch.context() as here:
        here.setattr(sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
        return run_case(case)


@pytest.mark.slow
def test_shards_and_whole_parameters_are_stepped_where_torch_steps_many_at_once() -> None:
    """Torch refused to step them together, in the first update on a GPU with tensor parallelism."""
    case = Case(3, ("linear", "gpt block"), num_ranks=1, shape=(1, 1, 2))
    (outcome,) = between_processes(2, [case], steps_many_at_once)
    assert outcome.kind == "same", outcome.detail


def fails_on_one_rank(case: Case) -> Outcome:
    """The other one tells what it found, and is ended while it waits, as at its deadline."""
    if dist.get_rank() == 0:
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
    fuzz_runs._kinds = lambda *_: os._exit(1)
    return Outcome("raw", "what rank 1 found")


def test_a_case_that_one_rank_does_not_tell_of_has_its_error_and_what_the_others_found() -> None:
    """Three errors of a GPU were known by the last line alone, which all of them have."""
    (outcome,) = between_processes(2, [Case(3, ("linear",), shape=(2, 1, 1))], fails_on_one_rank)
    assert outcome == Outcome(
        "raw",
        "the processes did not go on: rank 0 ended with 1: RuntimeError: CUDA error: out of memory; "
        "rank 1 ended with 1: raw, what rank 1 found",
    )
