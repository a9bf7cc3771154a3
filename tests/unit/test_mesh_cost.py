"""Nodes on the coordinates of a mesh, rings of gradients, and an iteration of all replicas."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import Constant, Trace
from penstock.cost.mesh import LinkGroup, Mesh, Ring
from penstock.passes import add_reductions
from penstock.simulation.mesh import simulate_mesh
from tiers import examples

pytestmark = pytest.mark.unit

COSTS = ps.Costs([8, 10, 9], [9, 11, 9], [6, 7, 8], other={"U": 5.0}, weight_bytes=[6e6, 9e6, 3e6])


def test_coordinates_and_groups_of_a_mesh():
    mesh = Mesh(3, 2, tp=2)
    assert mesh.pipeline(1) == (1, 3, 5)
    assert mesh.ring(2) == (4, 5)
    assert [mesh.coordinate(node) for node in (0, 3, 4)] == [(0, 0), (1, 1), (2, 0)]
    assert mesh.processes() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert str(mesh.use(3, 5)) == "PP link 1:2 of replica 1"
    assert str(mesh.use(4, 5)) == "DP ring of rank 2"
    assert mesh.use(0, 4).group is LinkGroup.UNUSED
    assert mesh.use(0, 4, joined=[(2, 0)]).group is LinkGroup.PP
    assert Mesh(1, 4).use(0, 2).group is LinkGroup.UNUSED, "a ring of four joins each with two others"
    assert Mesh(1, 4).use(0, 3).group is LinkGroup.DP


def test_moving_nodes():
    mesh = Mesh(3, 2)
    then = mesh.swapped(1, 2)
    assert str(then) == "0 1 4 | 2 3 5"
    assert then.use(0, 1).group is LinkGroup.PP
    assert mesh.moved(then) == (1, 2)
    conditions = Links({(1, 0): LinkCondition(Constant(7.0))})
    assert then.links_of(conditions, 0).conditions == {(1, 0): LinkCondition(Constant(7.0))}
    assert then.links_of(conditions, 1).conditions == {}


@pytest.mark.parametrize(
    ("sizes", "nodes", "said"),
    [((0, 2), (), "pp = 0: give at least 1"), ((2, 2), (0, 1, 2, 2), "give each of 0 to 3 once")],
)
def test_meshes_that_make_no_sense(sizes, nodes, said):
    with pytest.raises(ps.CostError, match=said):
        Mesh(*sizes, nodes=nodes)


def test_what_a_ring_takes_is_known_where_links_are_simple():
    fast = LinkCondition(bandwidth=Constant(1e9))
    assert Ring().all_reduce_ms(8e6, [fast]) == 0.0, "one member has the sum already"
    assert Ring(math.inf).all_reduce_ms(8e6, [fast] * 4) == pytest.approx(2 * 3 / 4 * 8)
    late = LinkCondition(Constant(10.0))
    assert Ring(math.inf).all_reduce_ms(8e6, [late] * 4) == pytest.approx(2 * 3 * 10)
    # 8 MB over each of two links, one window of 1 MB in 10 ms.
    assert Ring(1e6).all_reduce_ms(8e6, [late, late]) == pytest.approx(80)
    rising = LinkCondition(Trace((0.0, 100.0), (10.0, 30.0)))
    assert Ring(1e6).all_reduce_ms(8e6, [rising] * 2, at=100.0) == pytest.approx(240)
    busy = LinkCondition(bandwidth=Constant(1e9), half_duplex=True)
    assert Ring().all_reduce_ms(8e6, [busy] * 2) == pytest.approx(16), "both directions in one queue"
    with pytest.raises(ps.CostError, match="can carry nothing"):
        Ring(0.0)


def by_recursion(num_bytes: float, links: list[tuple[float, float]], ring: Ring) -> float:
    """When the last chunk is there, each chunk asked for what it waits for. Links are (latency, bytes a ms)."""
    num, (count, size) = len(links), ring.chunks(num_bytes, len(links))

    @cache
    def left(link: int, chunk: int) -> float:
        if chunk < 0:
            return 0.0
        began = max(left(link, chunk - 1), arrived((link - 1) % num, chunk - count))
        began = max(began, arrived(link, chunk - ring.num_chunks))
        return began + size / links[link][1]

    @cache
    def arrived(link: int, chunk: int) -> float:
        return left(link, chunk) + links[link][0] if chunk >= 0 else 0.0

    return max(arrived(link, 2 * (num - 1) * count - 1) for link in range(num))


@settings(max_examples=examples(25), deadline=None)
@given(
    links=st.lists(st.tuples(st.floats(0, 40), st.floats(1e4, 1e6)), min_size=2, max_size=5),
    num_bytes=st.floats(1e5, 4e7),
    num_chunks=st.integers(1, 5),
)
def test_a_ring_is_what_each_of_its_chunks_waits_for(links, num_bytes, num_chunks):
    ring = Ring(4e6, num_chunks)
    conditions = [LinkCondition(Constant(ms), bandwidth=Constant(rate * 1e3)) for ms, rate in links]
    found = ring.all_reduce_ms(num_bytes, conditions)
    assert found == pytest.approx(by_recursion(num_bytes, links, ring))
    assert found >= 2 * (len(links) - 1) / len(links) * num_bytes / min(rate for _, rate in links) * (1 - 1e-9)
    assert ring.all_reduce_ms(num_bytes, [*conditions[1:], conditions[0]]) == pytest.approx(found), "it has no first"


def test_an_iteration_of_a_mesh_is_its_pipelines_then_rings_then_updates():
    schedule = ps.build("zb", 3, 6)
    alone = ps.simulate(schedule, COSTS)
    assert simulate_mesh(schedule, COSTS, Mesh(3)).iteration == pytest.approx(
        max(row[-1].end for row in alone.rows) + 5
    )
    links = Links(default=LinkCondition(bandwidth=Constant(1e9)))
    found = simulate_mesh(schedule, COSTS, Mesh(3, 2), links=links)
    ready = {timed.op.stage: timed.end for timed in alone.ops if timed.op.kind == "W"}
    assert [(each.rank, each.stage) for each in found.reductions] == [(0, 0), (1, 1), (2, 2)]
    for each, num_bytes in zip(found.reductions, COSTS.weight_bytes, strict=True):
        assert each.start == pytest.approx(ready[each.stage])
        assert each.end - each.start == pytest.approx(num_bytes / 1e6)
    assert found.iteration == pytest.approx(max(each.end for each in found.reductions) + 5)
    assert found.exposed == pytest.approx(max(each.end for each in found.reductions) - alone.makespan)


def test_a_rank_adds_up_one_stage_after_the_other():
    costs = ps.Costs.uniform(4, 10, 10, 10)
    costs = ps.Costs(costs.f, costs.i, costs.w, weight_bytes=[40e6] * 4)
    links = Links(default=LinkCondition(bandwidth=Constant(1e9)))
    found = simulate_mesh(ps.build("interleaved-1f1b", 2, 4, num_stages=4), costs, Mesh(2, 2), links=links)
    for rank in range(2):
        first, second = (each for each in found.reductions if each.rank == rank)
        assert (first.stage, second.stage) == (rank + 2, rank), "deeper stages end first"
        assert first.start == first.ready
        assert second.start == max(second.ready, first.end)


@pytest.mark.parametrize(("name", "num_stages"), [("interleaved-1f1b", 4), ("zb-v", 4), ("zb-h1", 2)])
def test_reductions_are_what_the_engine_makes_of_them_as_asynchronous_ops(name, num_stages):
    costs = ps.Costs([5, 9, 7, 8][:num_stages], [9, 9, 6, 7][:num_stages], [4, 8, 6, 9][:num_stages])
    costs = replace(costs, weight_bytes=[40e6, 10e6, 30e6, 50e6][:num_stages])
    links = Links(default=LinkCondition(bandwidth=Constant(1e9)))
    schedule = ps.build(name, 2, 6, **({"num_stages": num_stages} if name == "interleaved-1f1b" else {}))
    found = simulate_mesh(schedule, costs, Mesh(2, 2), links=links)
    reducing = add_reductions(schedule)
    started = tuple(replace(each, asynchronous=True) for each in reducing.graph.registered)
    reducing = replace(reducing, stage_graph=replace(reducing.graph, registered=started))
    takes = {("REDUCE", stage): num_bytes / 1e6 for stage, num_bytes in enumerate(costs.weight_bytes)}
    timeline = ps.simulate(reducing, costs.with_other(takes))
    ended = {timed.op.stage: timed.end for timed in timeline.ops if timed.op.kind == "REDUCE"}
    assert ended == pytest.approx({each.stage: each.end for each in found.reductions})


def test_a_link_costs_what_it_serves():
    schedule, mesh = ps.build("zb", 3, 6), Mesh(3, 2)

    def iteration(a: int, b: int) -> float:
        return simulate_mesh(schedule, COSTS, mesh, links=ps.Links({(a, b): 30.0}), ring=Ring(2e6)).iteration

    without = simulate_mesh(schedule, COSTS, mesh, ring=Ring(2e6)).iteration
    assert iteration(0, 3) == iteration(1, 4) == without
    assert iteration(2, 3) > iteration(1, 3) > without
    assert iteration(1, 3) == iteration(0, 2), "all wait for the later replica"


@pytest.mark.parametrize(
    ("schedule", "mesh", "costs", "said"),
    [
        (ps.build("zb", 3, 6), Mesh(4, 2), COSTS, "3 ranks, the mesh has 4 per replica: give pp=3"),
        (ps.build("zb", 3, 6), Mesh(3, 2), ps.Costs.uniform(3), "neither gradient_bytes nor weight_bytes"),
        (ps.build("amdp", 4, 8, window=4), Mesh(4, 2), ps.Costs.uniform(4), "use ps.simulate, or another schedule"),
    ],
)
def test_meshes_that_are_not_simulated(schedule, mesh, costs, said):
    with pytest.raises((ps.CostError, ps.ScheduleError), match=said):
        simulate_mesh(schedule, costs, mesh)


@pytest.mark.parametrize("mesh", [Mesh(3, 2), Mesh(3)])
def test_links_name_nodes_that_are_there(mesh):
    with pytest.raises(ps.CostError, match=f"link 0:6: nodes go from 0 to {mesh.num_nodes - 1}"):
        simulate_mesh(ps.build("zb", 3, 6), COSTS, mesh, links=ps.Links({(0, 6): 1.0}))
