"""Where nodes best lie: never worse than staying, and as good as trying everything."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.control import Configuration, Job
from penstock.control.configuration import peaks
from penstock.control.reranking import MeshTimes, rerank
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import Constant
from penstock.cost.mesh import LinkGroup, Mesh, Ring
from penstock.simulation.mesh import simulate_mesh
from tiers import examples

pytestmark = pytest.mark.unit

RING = Ring(2e6, num_chunks=2)


def job_of(num_ranks: int, dispatch: str = "frozen", num_microbatches: int = 6, **more: Any) -> Job:
    rows = [[10.0 + stage for stage in range(num_ranks)] for _ in range(3)]
    costs = ps.Costs(*rows, weight_bytes=[9e6 + 1e6 * stage for stage in range(num_ranks)])
    schedule = ps.build("zb", num_ranks, num_microbatches)
    return Job(costs, Configuration(schedule, dispatch, (), tuple(peaks(schedule, costs))), ring=RING, **more)


def late(delays: dict[tuple[int, int], float]) -> Links:
    return Links({pair: LinkCondition(Constant(ms)) for pair, ms in delays.items()}, base=0.1)


def drawn_links(num_nodes: int) -> st.SearchStrategy[Links]:
    node = st.integers(0, num_nodes - 1)
    pair = st.tuples(node, node).filter(lambda each: each[0] != each[1])
    return st.dictionaries(pair, st.sampled_from([5.0, 20.0, 60.0]), max_size=6).map(late)


@settings(max_examples=examples(15), deadline=None)
@given(
    data=st.data(), sizes=st.sampled_from([(2, 2), (3, 2), (2, 3)]), dispatch=st.sampled_from(["frozen", "dynamic"])
)
def test_what_is_predicted_is_what_the_simulator_says(data, sizes, dispatch):
    mesh = Mesh(*sizes)
    links = data.draw(drawn_links(mesh.num_nodes))
    then = Mesh(*sizes, nodes=tuple(data.draw(st.permutations(range(mesh.num_nodes)))))
    job = job_of(mesh.pp, dispatch)
    simulated = simulate_mesh(
        job.start.schedule,
        job.costs,
        then,
        links=links,
        ring=RING,
        dispatch=dispatch,
        transport=ps.Blocking(2),
        memory_limit=job.start.caps if dispatch == "dynamic" else None,
    )
    assert MeshTimes(job, mesh, links).iteration(then) == pytest.approx(simulated.iteration)


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data(), sizes=st.sampled_from([(2, 2), (4, 1), (1, 4), (5, 1), (2, 3)]))
def test_nothing_is_better_than_what_is_found(data, sizes):
    mesh, job = Mesh(*sizes), job_of(sizes[0], may_replan=False, may_delegate=False, dispatches=("frozen",))
    links = data.draw(drawn_links(mesh.num_nodes))
    found = rerank(job, mesh, links)
    times = MeshTimes(job, mesh, links)
    every = [Mesh(*sizes, nodes=nodes) for nodes in permutations(range(mesh.num_nodes))]
    least = min(map(times.iteration, every))
    assert found.ms_then == pytest.approx(least)
    equal = [each for each in every if times.iteration(each) <= least * (1 + 1e-9)]
    assert len(found.moved) == min(len(mesh.moved(each)) for each in equal)


@settings(max_examples=examples(10), deadline=None)
@given(data=st.data(), sizes=st.sampled_from([(3, 2), (2, 3), (4, 2)]), replans=st.booleans())
def test_it_is_never_slower_than_staying(data, sizes, replans):
    mesh, job = Mesh(*sizes), job_of(sizes[0], num_microbatches=4, may_replan=replans)
    links = data.draw(drawn_links(mesh.num_nodes))
    found = rerank(job, mesh, links)
    assert found.ms_then <= found.ms_now * (1 + 1e-9)
    assert MeshTimes(job, mesh, links).iteration(found.mesh, found.configuration) == found.ms_then
    if not links.conditions:
        assert found.mesh == mesh
        assert found.configuration == job.start


def test_swaps_find_where_one_late_link_does_no_harm():
    mesh, job = Mesh(4, 4), job_of(4)
    found = rerank(job, mesh, late({(4, 5): 60.0}))
    assert found.mesh.use(4, 5).group is LinkGroup.UNUSED
    assert len(found.moved) == 2
    ranks = [(mesh.coordinate(node)[0], found.mesh.coordinate(node)[0]) for node in found.moved]
    assert all(before == then for before, then in ranks), "within one rank it is enough to go round another way"


def test_a_late_ring_is_moved_under_a_pipeline_and_absorbed_there():
    mesh, job = Mesh(4, 2), job_of(4, num_microbatches=12)
    links = late({(6, 7): 30.0})

    def in_use(then: Mesh) -> bool:
        return then.use(6, 7).group is not LinkGroup.UNUSED

    found = rerank(job, mesh, links, allowed=in_use)
    assert mesh.use(6, 7).group is LinkGroup.DP
    assert found.mesh.use(6, 7).group is LinkGroup.PP
    assert found.ms_now > found.ms_moved > found.ms_then
    assert found.configuration != job.start
    free = rerank(job, mesh, links)
    assert free.mesh.use(6, 7).group is LinkGroup.UNUSED
    assert free.ms_then == MeshTimes(job, mesh, late({})).iteration(mesh)
    assert len(free.moved) == 2


def test_of_256_nodes_only_swaps_that_change_something_else_are_tried():
    """Row 9: all pairs with a marked node were swapped, 510 in each step, and 19 to 41 s passed."""
    mesh, job = Mesh(8, 32), job_of(8)
    times = MeshTimes(job, mesh, late({(40, 41): 60.0}))
    assert times.marked == (40, 41), "all others may stand for one another"
    swaps = [times.kind(nodes) for nodes in times.swaps(mesh.nodes)]
    every = {times.kind(mesh.swapped(*pair).nodes) for pair in combinations(range(256), 2) if {40, 41} & {*pair}}
    assert set(swaps) == every
    assert len(swaps) < 150
    found = rerank(job, mesh, late({(40, 41): 60.0}))
    assert found.mesh.use(40, 41).group is LinkGroup.UNUSED
    assert len(found.moved) == 2


def test_nodes_with_alike_links_are_one_class():
    mesh, job = Mesh(2, 4), job_of(2)
    halves = late({(a, b): 20.0 for a in range(4) for b in range(4, 8)})
    assert MeshTimes(job, mesh, halves).classes == [0, 0, 0, 0, 4, 4, 4, 4]
    node = late({(5, other): 20.0 for other in range(8) if other != 5})
    assert MeshTimes(job, mesh, node).marked == (5,)
    pair = late({(2, 3): 20.0, (2, 5): 20.0, (3, 5): 20.0})
    assert MeshTimes(job, mesh, pair).marked == (2, 3, 5)
    assert len({MeshTimes(job, mesh, pair).classes[each] for each in (2, 3, 5)}) == 1
