"""Tessel's search as a baseline: in its own times it finds its own makespans."""

from __future__ import annotations

from math import comb

import pytest

import penstock as ps
from experiments.flexpipe import tessel

pytestmark = pytest.mark.unit


def flow(num_ranks: int, links: ps.Links | None = None) -> tessel.Flow:
    """All ops take 1 but the backwards of a rank's own stage, which take 3."""
    p = num_ranks
    costs = ps.Costs(f=[1.0] * (p + 2), i=[0.5, *[1.5] * p, 0.5], w=[0.5, *[1.5] * p, 0.5])
    return tessel.flow_of(costs, links or ps.Links(), p)


def test_every_way_gives_a_later_block_no_later_microbatch() -> None:
    for count in range(1, 6):
        found = list(tessel.ways(6, count))
        assert len(set(found)) == len(found) == comb(5, count - 1)
        assert all(list(way) == sorted(way, reverse=True) and set(way) == set(range(count)) for way in found)


def test_two_ranks_reach_tessels_makespan() -> None:
    pytest.importorskip("ortools")
    found = tessel.search(flow(2), 60.0)
    assert found.is_shortest
    assert found.repetend is not None
    assert found.repetend.period == 8.0
    for num_microbatches in (2, 5, 16):
        least = ps.simulate(
            ps.build("mllm", 2, num_microbatches), ps.Costs([1.0] * 4, [0.5, 1.5, 1.5, 0.5], [0.5, 1.5, 1.5, 0.5])
        ).makespan
        assert found.makespan(num_microbatches) == least == 8 * num_microbatches + 4


def test_without_time_there_is_no_repetend() -> None:
    pytest.importorskip("ortools")
    found = tessel.search(flow(4), 0.0)
    assert (found.repetend, found.is_shortest, found.num_tried, found.num_ways) == (None, False, 0, 2**11)
    assert found.makespan(4) is None


def test_messages_between_ranks_are_late() -> None:
    links = ps.Links({(0, 1): 2.0})
    late = flow(2, links)
    assert [need.delay for block in late.blocks for need in block.needs] == [0, 2, 2, 0, 0, 2, 2]
    costs = ps.Costs([1.0] * 4, [0.5, 1.5, 1.5, 0.5], [0.5, 1.5, 1.5, 0.5])
    assert late.latency == ps.simulate(ps.build("mllm", 2, 1), costs, links=links).makespan
