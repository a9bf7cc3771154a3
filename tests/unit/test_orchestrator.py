"""Links of a mesh, probed: what is told of them and when."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.control import Configuration, ControlError, Job, Orchestrator
from penstock.control.configuration import peaks
from penstock.control.events import Probed
from penstock.control.reranking import Reranking
from penstock.cost.mesh import LinkGroup
from penstock.runtime.mesh.probe import rounds

pytestmark = pytest.mark.unit

MESH = ps.Mesh(3, 2)
COSTS = ps.Costs([10, 10, 10], [10, 10, 10], [10, 10, 10], weight_bytes=[20e6] * 3)


def orchestrator() -> Orchestrator:
    schedule = ps.build("zb", 3, 6)
    start = Configuration(schedule, "frozen", (), tuple(peaks(schedule, COSTS)))
    return Orchestrator(Job(COSTS, start, may_delegate=False, ring=ps.cost.Ring(2e6)), MESH)


def probed(late: dict[tuple[int, int], float], random: Random) -> dict[tuple[int, int], float]:
    """All links take about 0.2 ms, the late ones longer."""
    return {pair: 0.2 * random.uniform(1, 1.3) + late.get(pair, 0.0) for pair in combinations(range(6), 2)}


def fed(watch: Orchestrator, times: dict[tuple[int, int], float]) -> Reranking | None:
    """Takes a round of probes; returns what to do, where something else is faster by the job's least gain."""
    if not watch.verifies(Probed.of(times)):
        return None
    if watch.answer() is None and watch.search is not None:
        watch.take(watch.search())
    found = watch.answer()
    return found if found is not None and watch.gains(found) else None


def test_a_late_ring_link_is_moved_out_of_the_way_and_stays_there() -> None:
    watch, random = orchestrator(), Random(1)
    for _ in range(5):
        assert fed(watch, probed({}, random)) is None
    decided = [fed(watch, probed({(2, 3): 30.0}, random)) for _ in range(3)]
    (found,) = [each for each in decided if each is not None]
    assert found is decided[1], "two probes verify it"
    assert list(watch.late) == [(2, 3)]
    assert watch.late[2, 3] == pytest.approx(30.0, abs=0.2)
    assert MESH.use(2, 3).group is LinkGroup.DP
    assert found.mesh.use(2, 3).group is LinkGroup.UNUSED
    watch.switched(found.mesh, found.configuration)
    for late in [{(2, 3): 30.0}] * 3 + [{}] * 20:
        assert fed(watch, probed(late, random)) is None, "where it lies nobody needs the link, late or not"
    assert watch.late == {}


def test_what_matters_to_nobody_moves_nothing() -> None:
    watch, random = orchestrator(), Random(2)
    for late in [{}] * 5 + [{(0, 3): 30.0}] * 5:
        assert fed(watch, probed(late, random)) is None
    assert list(watch.late) == [(0, 3)], "it is known all the same"


def test_links_are_of_nodes_that_are_there() -> None:
    with pytest.raises(ControlError, match="give two nodes of 0 to 5"):
        orchestrator().verifies(Probed.of({(0, 6): 1.0}))


@given(st.integers(1, 17))
def test_rounds_have_every_pair_once_and_no_node_twice(num_nodes: int) -> None:
    found = list(rounds(num_nodes))
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(num_nodes), 2))
    for pairs in found:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    assert len(found) == max(0, num_nodes - 1 + num_nodes % 2)
