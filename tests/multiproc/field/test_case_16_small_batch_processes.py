"""Batches with rules, and batches smaller than the number of microbatches, one process a rank."""

from __future__ import annotations

import pytest

import input_runs
from processes import run_ranks_to_end
from tiers import others_nightly

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", others_nightly(["1f1b", "zb-h1"], ["1f1b"]))
def test_gradients_are_those_of_a_plain_loop_over_fewer_microbatches(name: str) -> None:
    outcomes = run_ranks_to_end(2, input_runs.over_processes, name)
    assert [o.value for o in outcomes] == [[]] * 2


def test_replicas_are_given_whole_batches_or_their_parts() -> None:
    outcomes = run_ranks_to_end(4, input_runs.over_replicas)
    assert [o.value for o in outcomes] == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_one_sample_under_a_schedule_of_two_pipelines(num_replicas: int) -> None:
    """It was refused: in the middle of training, once the last batch of an epoch came."""
    names = [("chimera", "copies"), ("chimera", "zero1"), ("chimera", "none"), ("dualpipe", "copies")]
    options = [(name, num_replicas, sharding) for name, sharding in names]
    outcomes = run_ranks_to_end(2 * num_replicas, input_runs.over_two_ways, options)
    assert [o.value for o in outcomes] == [[]] * len(outcomes)
