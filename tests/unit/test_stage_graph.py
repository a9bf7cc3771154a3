"""Stages that branch or are shared, and registered ops: values, proof, text, JSON, simulation."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.formats.native import from_json, to_json
from penstock.schedule import peak_in_flight

GATHER = ps.schedule.Registered("GATHER", 1, 2, (1, 3))
TOWERS = ps.schedule.StageGraph(
    4,
    ((0, 1), (2, 3)),
    registered=(GATHER,),
    needs=(
        ps.schedule.Needs(("F", 1), ("GATHER", 1), num_before=2),
        ps.schedule.Needs(("F", 3), ("GATHER", 1), num_before=2),
        ps.schedule.Needs(("GATHER", 1), ("B", 1), num_after=2),
        ps.schedule.Needs(("GATHER", 1), ("B", 3), num_after=2),
    ),
)


def rows(*texts: str) -> tuple:
    return tuple(tuple(ps.schedule.parse_op(cell) for cell in text.split()) for text in texts)


def towers(**changes: tuple) -> ps.Schedule:
    order = rows(
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1GATHER0 1B0 1B1 1F2 1F3 1GATHER1 1B2 1B3",
        "2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3",
        "3F0 3F1 1GATHER0 3B0 3B1 3F2 3F3 1GATHER1 3B2 3B3",
    )
    return ps.Schedule("towers", ps.Placement(((0, 1, 2, 3),)), order, (0,) * 4, None, TOWERS)


def shared() -> ps.Schedule:
    placement = ps.Placement(((0, 0, 1),), ((0, (0, 1)),))
    order = rows("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1")
    return ps.Schedule("shared", placement, order, (0, 0))


def with_row(schedule: ps.Schedule, rank: int, text: str) -> ps.Schedule:
    order = list(schedule.order)
    order[rank] = rows(text)[0]
    return ps.Schedule(
        schedule.name, schedule.placement, tuple(order), schedule.microbatch_pipeline, None, schedule.stage_graph
    )


@pytest.mark.parametrize("make", [towers, shared])
def test_text_and_json_hold_all_of_it(make: type) -> None:
    schedule = make()
    assert ps.parse(str(schedule)) == schedule
    assert from_json(to_json(schedule)) == schedule


def test_valid_ones_pass_and_are_timed() -> None:
    for schedule in (towers(), shared()):
        ps.check(schedule)
    # F 1, B 2, GATHER 3: both towers alike, their ends wait for each other twice.
    timeline = ps.simulate(towers(), ps.Costs.uniform(4).with_other({("GATHER", 1): 3.0}))
    starts = {(t.rank, str(t.op)): t.start for t in timeline.ops}
    assert starts[1, "1GATHER0"] == starts[3, "1GATHER0"] == 3
    assert starts[1, "1B0"] == 6
    assert timeline.makespan == 21


def test_a_shared_op_starts_when_the_last_of_its_ranks_is_there() -> None:
    timeline = ps.simulate(shared(), ps.Costs([1, 4, 1], [1, 1, 1], [0, 0, 0]))
    starts = {(t.rank, str(t.op)): t.start for t in timeline.ops}
    assert starts[0, "0F1"] == starts[1, "0F1"] == 7  # rank 1 runs 2F0 and 2B0 first
    assert peak_in_flight(shared()) == (4, 3)


def test_dynamic_dispatch_keeps_the_order_of_what_ranks_run_together() -> None:
    frozen = ps.simulate(towers())
    dynamic = ps.simulate(towers(), dispatch="dynamic")
    assert dynamic.makespan <= frozen.makespan
    ps.check(dynamic.executed())


@pytest.mark.parametrize(
    ("schedule", "rule", "message"),
    [
        (
            with_row(towers(), 3, "3F0 3F1 3B0 3B1 3F2 3F3 1GATHER1 3B2 3B3"),
            "coverage",
            "rank 3 runs it together with this rank, and its row has no such op",
        ),
        (
            with_row(towers(), 1, "1F0 1F1 1F2 1F3 1GATHER1 1GATHER0 1B0 1B1 1B2 1B3"),
            "microbatches",
            "GATHER1 of stage 1 comes before it, at step 4, but the order of GATHER of stage 1 is 0 1",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(schedule: ps.Schedule, rule: str, message: str) -> None:
    with pytest.raises(ps.ScheduleError, match=message) as caught:
        ps.check(schedule)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.schedule.StageGraph(3, ((0, 1), (1, 2), (2, 1))), "cycle, 1 -> 2 -> 1"),
        (lambda: ps.schedule.StageGraph(2, ((0, 2),)), "edge 0 -> 2 names a stage that is not there"),
        (lambda: ps.schedule.StageGraph(2, ((0, 1), (0, 1))), "an edge is there twice"),
        (lambda: ps.schedule.StageGraph(2, ((0, 1),), (4,)), "give one count per stage"),
        (lambda: ps.schedule.Registered("F", 0, 1), "other than F, B"),
        (lambda: ps.schedule.Registered("GATHER", 0, 0), "has 0 ops: give at least 1"),
        (lambda: ps.schedule.Needs(("F", 0), ("B", 0), 0, 1), "both are at least 1"),
        (
            lambda: ps.schedule.StageGraph(1, (), needs=(ps.schedule.Needs(("F", 0), ("SYNC", 0)),)),
            "kind SYNC is not registered",
        ),
        (lambda: ps.Placement(((0, 1),), ((0, (1, 0)),)), "must have it on 1, not on 0"),
        (lambda: ps.Placement(((0, 1),), ((0, (0,)),)), "name at least two"),
        (lambda: ps.Schedule("x", ps.Placement(((0,),)), ((),), (0,), None, TOWERS), "4 stages, the placement 1"),
    ],
)
def test_contradictions_are_refused(make: type, message: str) -> None:
    with pytest.raises(ps.ScheduleError, match=message):
        make()


def test_counts_that_do_not_meet_are_refused() -> None:
    graph = ps.schedule.StageGraph(
        1,
        (),
        registered=(ps.schedule.Registered("SYNC", 0, 2),),
        needs=(ps.schedule.Needs(("F", 0), ("SYNC", 0), 3),),
    )
    order = rows("0F0 0F1 0F2 0F3 0SYNC0 0SYNC1 0B0 0B1 0B2 0B3")
    schedule = ps.Schedule("x", ps.Placement(((0,),)), order, (0,) * 4, None, graph)
    with pytest.raises(ps.ScheduleError, match=r"there are 4 F and 2 SYNC .* as many whole groups"):
        ps.check(schedule)


def test_stages_with_microbatches_of_other_sizes() -> None:
    graph = ps.schedule.StageGraph(2, ((0, 1),), num_microbatches=(4, 2))
    order = rows("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1")
    schedule = ps.Schedule("halves", ps.Placement(((0, 1),)), order, (0,) * 4, None, graph)
    ps.check(schedule)
    starts = {str(t.op): t.start for t in ps.simulate(schedule).ops}
    assert starts["1F0"] == 2  # after 0F0 and 0F1
    assert starts["0B0"] == starts["1B0"] + 2
    assert ps.parse(str(schedule)) == schedule


def test_the_network_has_one_node_for_what_ranks_run_together_whoever_is_named_first() -> None:
    from penstock.passes.separate import TimedOps

    placement = ps.Placement(((1, 0),), ((0, (1, 0)),))
    order = rows("0F0 1F0 1B0 0B0", "0F0 0B0")
    schedule = ps.Schedule("swapped", placement, order, (0,))
    costs = ps.Costs.uniform(2)
    net = TimedOps(schedule, costs, ps.Links())
    starts, makespan = net.earliest(net.durations)
    timeline = ps.simulate(schedule, costs)
    assert makespan == timeline.makespan == 6
    for timed in timeline.ops:
        assert starts[net.node_of[net.graph.number[timed.op]]] == timed.start
