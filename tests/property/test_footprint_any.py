"""Any schedule's footprint: what is there is somewhere, and ZeRO only takes away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.simulation.memory_footprint import count_buffers
from tiers import examples

pytestmark = pytest.mark.property

ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "xpipe", "spectrain", "vnag", "amdp")
SYNCHRONOUS = ("1f1b", "gpipe", "interleaved-1f1b", "chimera", "zb-v", "dualpipe", "bitpipe")


@st.composite
def runs(draw: st.DrawFn) -> tuple[ps.Schedule, ps.Costs]:
    name = draw(st.sampled_from((*ASYNCHRONOUS, *SYNCHRONOUS)))
    num_ranks = 2 * draw(st.integers(2, 3))
    num_microbatches = 2 * num_ranks * draw(st.integers(1, 2))
    options = {"window": num_ranks * draw(st.integers(1, 2))} if name in ASYNCHRONOUS else {}
    schedule = ps.build(name, num_ranks, num_microbatches, **options)
    n = schedule.num_stages
    row = st.lists(st.integers(1, 1000), min_size=n, max_size=n)
    costs = replace(
        ps.Costs.uniform(n, f=draw(st.integers(1, 3))),
        weight_bytes=draw(row),
        gradient_bytes=draw(row),
        optimizer_bytes=draw(row),
        activation=draw(row),
    )
    return schedule, costs


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(runs())
def test_a_footprint_adds_up(run: tuple[ps.Schedule, ps.Costs]) -> None:
    schedule, costs = run
    copies = schedule.placement.num_pipelines
    zero, everywhere = ps.footprint(schedule, costs), ps.footprint(schedule, costs, sharding="none")
    assert sum(rank.weights for rank in zero.ranks) == copies * sum(costs.weight_bytes)
    assert sum(rank.gradients for rank in zero.ranks) >= copies * sum(costs.gradient_bytes)
    assert sum(rank.optimizer for rank in zero.ranks) == sum(costs.optimizer_bytes)
    assert sum(rank.optimizer for rank in everywhere.ranks) == copies * sum(costs.optimizer_bytes)
    for mine, all_of_it in zip(zero.ranks, everywhere.ranks, strict=True):
        assert mine._replace(optimizer=0) == all_of_it._replace(optimizer=0)
        assert mine.optimizer <= all_of_it.optimizer
        assert mine.total == sum(mine)
    assert tuple(rank.activations for rank in zero.ranks) == ps.simulate(schedule, costs).peak_activations
    assert 0 < zero.mean <= zero.peak * (1 + 1e-12)


@settings(max_examples=examples(40), deadline=None)
@given(runs())
def test_never_gradients_of_three_windows(run: tuple[ps.Schedule, ps.Costs]) -> None:
    """Where windows are no shorter than a block no third one begins before the first is applied (`amdp`)."""
    buffers = count_buffers(run[0])
    assert set(buffers.values()) <= {1, 2}
    if run[0].updates is None or run[0].placement.num_pipelines == 1:
        assert set(buffers.values()) == {1}  # one pipeline's updates come right after the last backward
