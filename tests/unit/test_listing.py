"""List scheduling over queue graphs: compiled and not, by rules and of given rows, against the simulator."""

from __future__ import annotations

import random
from itertools import chain

import pytest

import penstock as ps
from penstock.dispatch.queues import Lister, QueueGraph, queue_graph, rows_of
from penstock.engine.min_tree import fill, least_of, leaves_for, sift
from penstock.engine.needs import last_needed
from penstock.engine.rule_tables import Tables
from penstock.engine.sweep import Timer
from penstock.schedule import one_to_one, v_shape


def with_rules(graph: QueueGraph, **rules: list[float]) -> Tables:
    """The tables of a graph whose ranks have other rules."""
    return graph.tables._replace(ranks=graph.tables.ranks._replace(**rules))


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("shape", [one_to_one, v_shape])
def test_compiled_and_not_agree_and_the_simulator_agrees_with_both(num_ranks: int, shape: type) -> None:
    draw = random.Random(num_ranks)
    placement = shape(num_ranks)
    n = placement.num_stages
    costs = ps.Costs(*([draw.uniform(5, 15) for _ in range(n)] for _ in range(3)))
    links = ps.Links({(0, 1): 12.5}) if num_ranks > 1 else ps.Links()
    num = 3 * num_ranks
    graph = queue_graph(placement, num_ranks, (0,) * num, costs, links, split=True)
    tables = with_rules(graph, warmup=[min(num, 2 * (num_ranks - rank) - 1) for rank in range(num_ranks)])
    plain = Lister(graph, compile=False).list_by_rules(tables)
    fast = Lister(graph, compile=True).list_by_rules(tables)
    assert plain.complete
    assert fast.complete
    assert plain.copy_rows() == fast.copy_rows()
    assert list(fast.start_time) == plain.start_time

    schedule = plain.schedule("listed")
    ps.check(schedule)
    simulated = ps.simulate(schedule, costs, links=links)
    assert plain.makespan == pytest.approx(simulated.makespan, rel=1e-12)
    assert rows_of(graph, schedule) == plain.copy_rows()
    for compile in (False, True):
        timed = Timer(*graph.network, compile=compile).time(list(chain(*plain.copy_rows())))
        assert timed.makespan == plain.makespan


def test_the_order_is_that_of_the_decision_core_for_zb() -> None:
    warmup = [7, 5, 3, 1]
    graph = queue_graph(one_to_one(4), 4, (0,) * 12, ps.Costs.uniform(4), split=True)
    listed = Lister(graph, compile=False).list_by_rules(with_rules(graph, warmup=warmup))
    assert listed.schedule("zb") == ps.build("zb", 4, 12, warmup=warmup)


def test_rows_that_deadlock_stop_and_say_so() -> None:
    graph = queue_graph(one_to_one(2), 2, (0, 0), ps.Costs.uniform(2))
    f0, b0, f1, b1 = range(4)
    timer = Timer(*graph.network, compile=False)
    assert timer.time([f0, b0, f0, b0, f1, b1, f1, b1]).complete
    stuck = timer.time([f0, b0, f0, b0, f1, f1, b1, b1])
    assert not stuck.complete
    assert stuck.reached == [1, 1]


def test_two_stages_of_a_rank_do_not_lock_each_other_out_under_a_cap() -> None:
    graph = queue_graph(v_shape(3), 3, (0,) * 9, ps.Costs.uniform(6), split=True)
    listed = Lister(graph, compile=False).list_by_rules(with_rules(graph, cap_count=[2.0] * 3))
    assert listed.complete
    assert max(ps.schedule.peak_in_flight(listed.schedule("tight"))) == 2


def test_rows_with_streams_and_gathers_are_timed_as_they_are_listed() -> None:
    stages = ps.schedule.StageGraph(
        4,
        ((0, 1), (2, 3)),
        registered=(ps.schedule.Registered("GATHER", 1, 2, (0, 1), asynchronous=True),),
        needs=(
            ps.schedule.Needs(("F", 1), ("GATHER", 1), num_before=2),
            ps.schedule.Needs(("GATHER", 1), ("B", 3), 1, 2),
        ),
    )
    costs = ps.Costs.uniform(4).with_other({("GATHER", 1): (3.0, 0.0)})
    graph = queue_graph(ps.Placement(((0, 1, 0, 1),)), 2, (0,) * 4, costs, ps.Links({(0, 1): 2.0}), stages)
    assert graph.num_rows == 4
    listed = Lister(graph, compile=False).list_by_rules(graph.tables)
    assert listed.complete
    timed = Timer(*graph.network, compile=False).time(list(chain(*listed.copy_rows())))
    assert timed.makespan == listed.makespan


def test_windows_of_ops_unlock_windows() -> None:
    """Op j waits for the last op of the window before it, as counted op by op."""
    for before, after in ((1, 1), (4, 1), (1, 4), (2, 3)):
        unlocked = [last for last in range(before - 1, 40, before) for _ in range(after)]
        assert [last_needed(j, before, after) for j in range(len(unlocked))] == unlocked
    assert [last_needed(j, 1, 1, -1) for j in range(3)] == [-1, 0, 1]
    assert last_needed(4, 2, 2, -3) == 2


def test_a_tree_of_minima_finds_the_first_of_the_least() -> None:
    for values in ([3.0], [2.0, 1.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]):
        leaves = leaves_for(len(values))
        assert leaves // 2 < len(values) <= leaves
        tree = [float("inf")] * 2 * leaves
        tree[leaves : leaves + len(values)] = values
        fill(tree)
        assert tree[1] == min(values)
        assert least_of(tree, leaves) == values.index(min(values))
        sift(tree, leaves + least_of(tree, leaves), 9.0)
        assert tree[1] == min([9.0, *sorted(values)[1:]])
