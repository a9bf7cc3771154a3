"""What makes orders or changes them times them on its way, and times them as the engine's one sweep does: bit by bit.

List schedulers, the walks of searches and the order of AMDP know when ops start because they decide by it, or walk
back from it. Here each is held to `Timer`, over random times and delays. What had a sweep of its own and now asks the
engine is held to the orders it made before, by their digest.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.dispatch.queues import Lister, queue_graph
from penstock.engine.list_by_values import ListSpace, list_ops
from penstock.engine.network import Network
from penstock.engine.sweep import Timer
from penstock.library.amdp_order import OrderOptions, StageTimes, ran_with
from penstock.planning.graph.problem import pose_graph
from penstock.planning.joint.problem import pose_joint
from penstock.planning.options import OpForms, limits_of
from penstock.planning.problem import pose
from penstock.schedule.placement import multi_directional
from tiers import examples

pytestmark = pytest.mark.property

SEEDS = st.integers(0, 2**32)


def drawn_costs(draw: random.Random, num_stages: int) -> ps.Costs:
    return ps.Costs(*([draw.uniform(1, 9) for _ in range(num_stages)] for _ in "fiw"))


def drawn_links(draw: random.Random, num_ranks: int) -> ps.Links:
    return ps.Links({(r, r + 1): draw.uniform(0, 20) for r in range(num_ranks - 1) if draw.random() < 0.5})


def starts_of(schedule: ps.Schedule, costs: ps.Costs, links: ps.Links) -> dict[ps.Op, float]:
    """By the sweep: `simulate` runs frozen orders over plain links by it."""
    return {timed.op: timed.start for timed in ps.simulate(schedule, costs, links=links).ops}


@given(SEEDS)
@settings(max_examples=examples(60), deadline=None)
def test_list_scheduling_by_values(seed: int) -> None:
    draw = random.Random(seed)
    ranks, num = draw.randint(1, 4), draw.randint(1, 7)
    placement = draw.choice([ps.placements.one_to_one, ps.placements.v_shape])(ranks)
    costs, cap = drawn_costs(draw, placement.num_stages), draw.choice([2.0, 3.5, float("inf")])
    held = [(1.0, 0.0)] * placement.num_stages
    problem = pose(costs, placement, ranks, num, drawn_links(draw, ranks), held, [cap] * ranks, split=True)
    network: Network = problem.queues
    space = ListSpace.of(network)
    space.values[:] = [draw.random() for _ in range(network.num_ops)]
    space.wait[:] = draw.choice([0.0, 4.0])
    makespan = list_ops(network, space, False, False)
    assert makespan > 0
    timed = Timer(network, compile=False).time(space.row)
    if not space.wait.any():  # where ranks never wait for a better op
        assert list(timed.start) == space.start.tolist()
        assert timed.makespan == makespan
    assert timed.makespan <= makespan


@given(SEEDS)
@settings(max_examples=examples(60), deadline=None)
def test_list_scheduling_by_rules(seed: int) -> None:
    draw = random.Random(seed)
    ranks, num = draw.randint(1, 4), draw.randint(1, 7)
    placement = draw.choice([ps.placements.one_to_one, ps.placements.v_shape])(ranks)
    costs = drawn_costs(draw, placement.num_stages)
    graph = queue_graph(placement, ranks, (0,) * num, costs, drawn_links(draw, ranks), split=True)
    warmup = [draw.randint(0, 3) for _ in range(ranks)]
    tables = graph.tables._replace(ranks=graph.tables.ranks._replace(warmup=warmup))
    listed = Lister(graph, compile=False).list_by_rules(tables)
    if listed.complete:
        timed = Timer(*graph.network, compile=False).time(list(chain(*listed.copy_rows())))
        assert list(timed.start) == list(listed.start_time)
        assert timed.makespan == listed.makespan


@given(SEEDS)
@settings(max_examples=examples(40), deadline=None)
def test_orders_of_the_joint_search(seed: int) -> None:
    draw = random.Random(seed)
    name, ranks = draw.choice(["1f1b", "zb-h1", "gpipe", "zb-v", "interleaved-1f1b"]), draw.randint(1, 4)
    schedule = ps.build(name, ranks, ranks * draw.randint(1, 3))
    costs, links = replace(drawn_costs(draw, schedule.num_stages), kept_by_recompute=0.1), drawn_links(draw, ranks)
    if draw.random() < 0.5 and name == "1f1b":
        schedule = ps.passes.recompute(schedule, costs, 2.0)
    limits = limits_of(costs, schedule.placement, ranks, None, None, split=True)
    forms = OpForms(again=True, split=True, whole=True)
    problem = pose_joint(costs, schedule.placement, ranks, [schedule.num_microbatches], links, limits, forms)
    orders, start = problem.read(schedule), np.empty(len(problem.ops.chain))
    assert problem.fits(orders)
    makespan = problem.timed(orders, start)
    expected = starts_of(schedule, costs, links)
    assert makespan == ps.simulate(schedule, costs, links=links).makespan
    found = [start[op] for r in range(ranks) for op in orders.row[r, : orders.length[r]]]
    assert found == [expected[op] for row in schedule.order for op in row]


@given(SEEDS)
@settings(max_examples=examples(40), deadline=None)
def test_sequences_of_graph_plans(seed: int) -> None:
    draw = random.Random(seed)
    ranks, num = draw.randint(2, 3), draw.randint(1, 4)
    everyone = tuple(range(ranks))
    placement = ps.Placement(((0, *everyone, 0),), shared=((0, everyone), (ranks + 1, everyone)))
    costs = drawn_costs(draw, ranks + 2)
    limits = limits_of(costs, placement, ranks, None, None, split=True)
    problem = pose_graph(costs, placement, ranks, num, drawn_links(draw, ranks), limits, split=True)
    sequence = problem.serial()
    makespan, start = problem.placed(sequence)
    rows: list[list[int]] = [[] for _ in range(problem.graph.num_rows)]
    for q in sequence:
        for row in problem.graph.hosts(q):
            rows[row].append(q)
    timed = Timer(problem.network, problem.more, compile=False).time(list(chain(*rows)))
    assert list(timed.start) == start.tolist()
    assert timed.makespan == makespan
    lined_up = problem.lined_up(rows)
    assert lined_up is not None
    assert problem.placed(lined_up)[1].tolist() == start.tolist()


@given(SEEDS)
@settings(max_examples=examples(40), deadline=None)
def test_amdp(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([2, 4, 6])
    num, message = ranks * draw.randint(1, 4), draw.choice([0.0, 0.7])
    f, b = ([draw.choice([1.0, 2.0, 3.5]) for _ in range(ranks)] for _ in "fb")
    placement = multi_directional(ranks)
    way = OrderOptions(StageTimes(f, b, message), draw.randint(0, 2), draw.random() < 0.5)
    ran = ran_with(placement.pipelines, num, way, None)
    pipeline_of = tuple(m % placement.num_pipelines for m in range(num))
    schedule = ps.Schedule("amdp", placement, tuple(map(tuple, ran.rows)), pipeline_of)
    expected = starts_of(schedule, ps.Costs(f, b, [0.0] * ranks), ps.Links(default=message))
    assert ran.starts == pytest.approx(expected, abs=1e-9)  # it reads microbatches ahead when a backward has ended
