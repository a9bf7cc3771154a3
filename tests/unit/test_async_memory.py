"""Asynchronous ops that hold memory: what an offload gives back is not counted while it lies in host memory, and what
needs the room waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import penstock as ps
from offload_programs import held_at_most, offloading
from penstock.formats.native import from_json, to_json
from penstock.formats.perfetto import held_over_time


def one_rank(row: str, limit: str = "", more: str = "") -> ps.Schedule:
    """One rank, with two microbatches that an offload may give away; OFFLOAD0 needs F0, and B0 needs RELOAD0."""
    return ps.parse(f"""
        schedule mine: 1 rank, 1 stage, 3 microbatches{limit}
        pipeline 0: stages on ranks 0
        edges none
        kind OFFLOAD of stage 0: 3 ops, asynchronous, holds -1
        kind RELOAD of stage 0: 3 ops, asynchronous, holds 1
        needs 1 F of stage 0 before 1 OFFLOAD of stage 0
        needs 1 OFFLOAD of stage 0 before 1 RELOAD of stage 0
        needs 1 RELOAD of stage 0 before 1 B of stage 0
        {more}
        rank 0 | {row}
    """)


ROW = "F0 OFFLOAD0 F1 OFFLOAD1 F2 OFFLOAD2 RELOAD0 B0 RELOAD1 B1 RELOAD2 B2"
COSTS = replace(ps.Costs.uniform(1, f=10, i=5, w=5), other={"OFFLOAD": 25.0, "RELOAD": 5.0})


def test_what_needs_the_room_waits_for_the_end_of_an_offload() -> None:
    free, capped = one_rank(ROW), one_rank(ROW, ", at most 2 in flight")
    for schedule, starts, peak in ((free, (0, 10, 20), 3.0), (capped, (0, 10, 35), 2.0)):
        ps.check(schedule)
        timeline = ps.simulate(schedule, COSTS)
        assert tuple(t.start for t in timeline.rows[0] if t.op.kind == "F") == starts
        assert timeline.peak_activations == (peak,)
    assert [t.start for t in ps.simulate(capped, COSTS).streams[0]] == [10, 35, 60, 85, 100, 115]
    held = held_over_time(ps.simulate(capped, COSTS).ops, capped.graph.holds)
    assert max(count for _, count in held) == 2
    assert held[-1] == (130, 0)


def test_no_wait_where_the_order_waits_anyway() -> None:
    """B0 needs the reload, which comes after the offload: no edge more than that is needed."""
    ps.check(schedule := one_rank(ROW, ", at most 3 in flight"))
    assert ps.simulate(schedule, COSTS).makespan == ps.simulate(one_rank(ROW), COSTS).makespan


@pytest.mark.parametrize(
    ("schedule", "rule", "message"),
    [
        (
            one_rank(ROW, ", at most 0.5 in flight"),
            "memory",
            "the rank would hold 1 stage activations, the limit is 0.5",
        ),
        (
            one_rank("F0 F1 OFFLOAD0 OFFLOAD1 RELOAD0 RELOAD1 F2 OFFLOAD2 RELOAD2 B0 B1 B2", ", at most 2 in flight"),
            "memory",
            "the rank would hold 3 stage activations, the limit is 2; let a backward run before it",
        ),
    ],
)
def test_the_limit_is_proved(schedule: ps.Schedule, rule: str, message: str) -> None:
    with pytest.raises(ps.ScheduleError, match=message) as caught:
        ps.check(schedule)
    assert caught.value.rule == rule


def test_a_limit_that_is_asked_about_holds_only_where_ops_wait_for_it() -> None:
    with pytest.raises(
        ps.ScheduleError, match="the limit is 2; give the schedule that max_in_flight, so that ops wait"
    ):
        ps.check(one_rank(ROW), max_in_flight=2)
    ps.check(one_rank(ROW, ", at most 2 in flight"), max_in_flight=2)
    ps.check(one_rank(ROW), max_in_flight=3)


def test_nothing_is_given_back_twice() -> None:
    given = ps.parse("""
        schedule twice: 1 rank, 1 stage, 2 microbatches
        pipeline 0: stages on ranks 0
        edges none
        kind DROP of stage 0: 1 op, asynchronous, holds -1
        rank 0 | F0 F1 DROP0 B0 B1
    """)
    with pytest.raises(ps.ScheduleError, match="it gives back 1 stage activations more than stage 0 holds"):
        ps.check(given)


def test_an_offload_that_waits_for_what_comes_after_it_is_refused() -> None:
    late = ps.parse("""
        schedule late: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        edges 0>1
        kind OFFLOAD of stage 0: 1 op, asynchronous, holds -1
        kind RELOAD of stage 0: 1 op, asynchronous, holds 1
        needs 2 F of stage 1 before 1 OFFLOAD of stage 0
        needs 1 OFFLOAD of stage 0 before 1 RELOAD of stage 0
        needs 1 RELOAD of stage 0 before 2 B of stage 0
        rank 0 | F0 OFFLOAD0 F1 RELOAD0 B0 B1
        rank 1 | F0 F1 B0 B1
    """)
    with pytest.raises(ps.ScheduleError, match="an asynchronous op that holds memory waits for what comes after it"):
        ps.check(late)


def test_a_program_offloads_and_is_drawn(golden: Callable[[str, str], None]) -> None:
    program = offloading(ps.placements.one_to_one(4), 8, 3, stages=(0, 1))
    schedule, costs = program.build(), program.all_costs
    golden("offload.txt", str(schedule) + "\n")
    assert ps.parse(str(schedule)) == schedule
    assert from_json(to_json(schedule)) == schedule
    whole = ps.Program(ps.placements.one_to_one(4), 8, ps.Rules(max_in_flight=3)).build()
    for dispatch in ("frozen", "hinted", "dynamic", "auto"):
        timeline = ps.simulate(schedule, costs, dispatch=dispatch)
        assert timeline.makespan < ps.simulate(whole).makespan
        assert max(timeline.peak_activations) <= 3
        assert list(timeline.peak_activations) == held_at_most(timeline, costs)


def test_a_slow_link_to_the_host_costs_time_and_no_memory() -> None:
    program = offloading(ps.placements.one_to_one(4), 8, 3, stages=(0, 1))
    schedule = program.build()
    slow = program.all_costs.with_other({("OFFLOAD", 0): 20.0, ("RELOAD", 1): 15.0})
    for dispatch in ("frozen", "hinted", "dynamic"):
        timeline = ps.simulate(schedule, slow, dispatch=dispatch, links=ps.Links({(1, 2): 7.0}))
        assert max(timeline.peak_activations) <= 3
    assert ps.simulate(schedule, slow).makespan > ps.simulate(schedule, program.all_costs).makespan


def test_steps_are_those_of_the_build() -> None:
    program = offloading(ps.placements.v_shape(2), 6, 3, stages=(0, 3), share=0.5)
    assert ps.program.Stepper(program).run() == program.build()


def test_limits_that_no_schedule_can_say_are_refused() -> None:
    placement = ps.placements.one_to_one(2)
    program = offloading(placement, 4, None, stages=(0,))
    assert program.build().max_in_flight is None
    alike = replace(program, rules=ps.Rules(memory_limit=6.0), costs=ps.Costs.uniform(2, activation=2.0))
    assert alike.build().max_in_flight == 3.0
    for rules in (ps.Rules(max_in_flight=[2, 3]), ps.Rules(max_in_flight={0: 2}), {0: ps.Rules(max_in_flight=2)}):
        with pytest.raises(
            ps.ScheduleError, match="which is one number of stage activations: give max_in_flight=num"
        ):
            replace(program, rules=rules).build()


def test_what_it_holds_is_a_number() -> None:
    with pytest.raises(
        ps.ScheduleError, match="kind OFFLOAD of stage 0 holds nan: give a number of stage activations"
    ):
        ps.schedule.Registered("OFFLOAD", 0, 1, holds=float("nan"))


@pytest.mark.parametrize("kind", ["A2A", "H2D", "GATHER2", "E1", "LOSS_2"])
def test_kinds_may_have_digits(kind: str) -> None:
    once = ps.NewOp(kind, 0, {("F", 0): 2}, {("B", 0): 2})
    schedule = ps.Program(ps.placements.one_to_one(2), 4, ops=[once]).build()
    op = ps.Op(kind, 0, 1)
    assert op in schedule.order[0]
    assert str(op) == f"0{kind}{'.' if kind[-1].isdigit() else ''}1"
    assert ps.parse(str(schedule)) == schedule
    assert from_json(to_json(schedule)) == schedule
    assert ps.simulate(schedule).makespan > 0


@pytest.mark.parametrize("kind", ["2A", "a2a", "AB", "F", "_A2", "A2_", ""])
def test_other_names_are_refused(kind: str) -> None:
    with pytest.raises(ps.ScheduleError, match="give an upper-case letter or word"):
        ps.schedule.Registered(kind, 0, 1)
