"""Stepping through a program: each decision with its reasons, and what users' functions see."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

import penstock as ps
from penstock.schedule import peak_in_flight

ONE = ps.placements.one_to_one


def story(program: ps.Program) -> str:
    return "\n".join(map(str, ps.program.Stepper(program)))


def test_every_decision_says_what_was_ready_and_why_nothing_else_ran() -> None:
    program = ps.Program(ONE(2), 2, ps.Rules(max_in_flight=[2, 1]), split=True)
    assert story(program) == (
        """\
0 ms, rank 0: 0F0
    0I0  waits for 0F0 on rank 0
    0W0  waits for 0I0 on rank 0
1 ms, rank 0: 0F1
    0I0  waits for 1I0 on rank 1
    0W0  waits for 0I0 on rank 0
1 ms, rank 1: 1F0
    1I0  waits for 1F0 on rank 1
    1W0  waits for 1I0 on rank 1
2 ms, rank 0: idle
    0I0  waits for 1I0 on rank 1
    0W0  waits for 0I0 on rank 0
2 ms, rank 1: 1I0
    1F1  rank 1 holds 1 of at most 1 in flight
    1W0  waits for 1I0 on rank 1
3 ms, rank 0: 0I0
    0W0  waits for 0I0 on rank 0
3 ms, rank 1: 1W0
    1I1  waits for 1F1 on rank 1
    1F1  rank 1 holds 1 of at most 1 in flight
4 ms, rank 0: 0W0
    0I1  waits for 1I1 on rank 1
4 ms, rank 1: 1F1
    1I1  waits for 1F1 on rank 1
    1W1  waits for 1I1 on rank 1
5 ms, rank 0: idle
    0I1  waits for 1I1 on rank 1
    0W1  waits for 0I1 on rank 0
5 ms, rank 1: 1I1
    1W1  waits for 1I1 on rank 1
6 ms, rank 0: 0I1
    0W1  waits for 0I1 on rank 0
6 ms, rank 1: 1W1
7 ms, rank 0: 0W1"""
    )


def reasons(program: ps.Program) -> set[str]:
    """What is said of the ops that were not chosen, without the times."""
    return {c.reason for step in ps.program.Stepper(program) for c in step.candidates if c.op != step.chosen}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (ps.Program(ONE(1), 2), "ready since 0; backward-first: 0B0 goes first"),
        (ps.Program(ONE(1), 2, ps.Rules("forward-first")), "ready since 1; forward-first: 0F1 goes first"),
        (
            ps.Program(ONE(2), 2, ps.Rules(warmup=[2, 2])),
            "ready since 2; 1 forwards of the warm-up come first",
        ),
        (
            ps.Program(ps.placements.circular(1, 2), 2, ps.Rules("forward-first", forward=ps.depth_first())),
            "ready since 0; by the traversal 1F0 goes first",
        ),
        (
            ps.Program(ps.placements.v_shape(1), 2, ps.Rules(max_in_flight=2)),
            "rank 0 holds 1 of at most 2 in flight (and must keep room for 1 deeper in the model)",
        ),
        (ps.Program(ONE(1), 2, ps.Rules(memory_limit=1.5)), "rank 0 holds 1 of at most 1.5 of memory"),
        (ps.Program(ONE(1), 2, ps.Rules(max_in_flight={0: 1})), "its stage holds the 1 in flight that it may"),
        (
            ps.Program(ONE(2), 3, ps.Rules("interleaved", strict=True, warmup=[2, 1])),
            "ready since 0; strict: it is the turn of a backward",
        ),
        (
            ps.Program(
                ps.placements.circular(2, 4),
                4,
                ps.Rules("forward-first", forward=ps.breadth_first(2, strict=True)),
                costs=ps.Costs([1, 3, 1, 1], [1] * 4, [1] * 4),
            ),
            "ready since 0; strict: another stage's interval is not over",
        ),
        (
            ps.Program(
                ONE(2), 3, ps.Rules(patience=2.0), split=True, costs=ps.Costs([3, 1], [1, 1], [4, 4])
            ),
            "ready since 5; a forward or backward comes within 2 ms",
        ),
        (
            ps.Program(ONE(1), 2, ps.Rules(check=lambda view, op: op.kind == "B" or view.in_flight() == 0)),
            "refused by the user's function",
        ),
        (
            ps.Program(ONE(1), 2, ps.Rules(choose=lambda view, ready: ready[-1])),
            "ready since 1; choose preferred 0F1",
        ),
        (
            ps.Program(ONE(2), 2, costs=ps.Costs([3, 1], [1, 1], [1, 1])),
            "all it needs is there at 6 ms",
        ),
        (
            ps.Program(ps.placements.shared_ends(ONE(2), last=False), 1),
            "waits for 0F0 on ranks 0, 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_reason(program: ps.Program, reason: str) -> None:
    assert reason in reasons(program)


def test_the_ready_queue_is_what_could_have_run() -> None:
    steps = list(ps.program.Stepper(ps.Program(ONE(1), 2)))
    assert [list(map(str, step.ready)) for step in steps] == [["0F0"], ["0B0", "0F1"], ["0F1"], ["0B1"]]
    assert [str(step.chosen) for step in steps] == ["0F0", "0B0", "0F1", "0B1"]
    assert [step.time for step in steps] == [0, 1, 3, 4]


def test_stepping_may_stop_and_go_on() -> None:
    program = ps.Program(ONE(2), 3, ps.Rules(max_in_flight=[2, 1]))
    stepper = ps.program.Stepper(program)
    first = list(itertools.islice(stepper, 4))
    part = stepper.schedule()
    assert [step.chosen for step in first if step.chosen] == [op for row in part.order for op in row] == [
        ps.Op("F", 0, 0), ps.Op("F", 0, 1), ps.Op("F", 1, 0)
    ]  # fmt: skip
    whole = stepper.run()
    assert whole == program.build()
    assert list(stepper) == []
    assert stepper.schedule() == whole


def test_functions_see_the_moment_and_all_ranks() -> None:
    seen: list[tuple[float, int]] = []

    def check(view: ps.program.View, op: ps.Op) -> bool:
        seen.append((view.time, view.rank))
        ran = [view.ran(rank) for rank in (0, 1)]
        assert [view.steps(rank) for rank in (0, 1)] == [len(row) for row in ran]
        for rank, row in enumerate(ran):
            held = sum({"F": 1, "W": -1}.get(done.kind, 0) for done in row)
            assert view.in_flight(rank) == view.in_flight(stage=rank) == held
            assert view.memory(rank) == sum({"F": 1.0, "I": -0.5, "W": -0.5}[done.kind] for done in row)
            for kind in "FIW":
                assert view.started(kind, rank) == sum(done.kind == kind for done in row)
        assert view.started("B", 0) == view.started("F", 9) == 0
        assert view.ready_since(op) <= view.time
        assert view.ready_since(op._replace(microbatch=op.microbatch + 1)) == float("inf")
        assert op in view.upcoming() == view.upcoming(view.rank)
        assert not view.has_run(op)
        assert not any(view.has_run(absent) for absent in (ps.Op("F", 7, 0), ps.Op("B", 0, 0), ps.Op("F", 0, 99)))
        return True

    program = ps.Program(ONE(2), 4, ps.Rules(max_in_flight=3, check=check), split=True)
    assert program.build() == ps.Program(ONE(2), 4, ps.Rules(max_in_flight=3), split=True).build()
    assert seen == sorted(seen, key=lambda moment: moment[0])


def test_an_op_has_run_when_it_has_ended_whatever_its_rank_does_then() -> None:
    answers: list[tuple[float, bool, bool]] = []

    def check(view: ps.program.View, op: ps.Op) -> bool:
        if view.rank == 1:
            answers.append((view.time, view.has_run(ps.Op("F", 0, 0)), view.has_run(ps.Op("F", 0, 1))))
        return True

    ps.Program(ONE(2), 2, ps.Rules(check=check)).build()
    # Rank 0 runs F0 from 0 to 1 and F1 from 1 to 2.
    assert answers[0] == (1.0, True, False)
    assert all(first and second for time, first, second in answers if time >= 2)


def test_who_was_told_to_wait_is_asked_again_and_time_never_goes_back() -> None:
    """Rank 1 lets its forwards wait until rank 0 has run all of its own; nothing that it waits for wakes it."""
    asked: list[float] = []

    def check(view: ps.program.View, op: ps.Op) -> bool:
        asked.append(view.time)
        return view.rank == 0 or op.kind == "B" or view.has_run(ps.Op("F", 0, 3))

    program = ps.Program(ONE(2), 4, ps.Rules(check=check))
    stepper = ps.program.Stepper(program)
    times = {step.chosen: step.time for step in stepper if step.chosen is not None}
    # Rank 0 is busy with a backward at 7, but its forwards ended long ago.
    assert (times[ps.Op("F", 1, 0)], times[ps.Op("F", 1, 1)]) == (4.0, 7.0)
    assert asked == sorted(asked)
    assert ps.simulate(stepper.schedule(), transport="decoupled").makespan < max(times.values()) + 2


def test_a_wait_ends_at_the_end_of_an_op_on_another_rank() -> None:
    def check(view: ps.program.View, op: ps.Op) -> bool:
        return op != ps.Op("F", 0, 1) or view.has_run(ps.Op("B", 1, 0))

    steps = list(
        ps.program.Stepper(ps.Program(ONE(2), 2, ps.Rules(check=check), costs=ps.Costs([1, 1], [2, 2], [2, 2])))
    )
    # B0 of stage 1 ends at 6: rank 0 may then run F1, and takes B0 of stage 0 first.
    assert [(step.time, str(step.chosen)) for step in steps if step.rank == 0 and step.chosen] == [
        (0, "0F0"), (6, "0B0"), (10, "0F1"), (16, "0B1")
    ]  # fmt: skip


def test_limits_by_function_count_what_the_rank_holds() -> None:
    asked: list[ps.Op] = []

    def growing(view: ps.program.View, op: ps.Op) -> float:
        asked.append(op)
        return 1 if op.microbatch < 4 else 3

    schedule = ps.Program(ONE(2), 8, ps.Rules(max_in_flight=growing)).build()
    assert {op.kind for op in asked} == {"F"}
    assert peak_in_flight(schedule)[0] == 3
    assert [str(op) for op in schedule.order[0][:4]] == ["0F0", "0B0", "0F1", "0B1"]


def test_choose_is_given_the_ready_ops_in_the_order_of_the_rules() -> None:
    offered: list[Sequence[str]] = []

    def first(view: ps.program.View, ready: tuple[ps.Op, ...]) -> ps.Op:
        offered.append(tuple(map(str, ready)))
        return ready[0]

    placement = ps.placements.circular(1, 2)
    rules = ps.Rules("forward-first", forward=ps.depth_first())
    note = ps.NewOp("NOTE", 0, after={("F", 0): 1})
    chosen = ps.Program(placement, 2, ps.Rules(rules.kinds, forward=rules.forward, choose=first), ops=[note]).build()
    assert chosen == ps.Program(placement, 2, rules, ops=[note]).build()
    assert offered[:3] == [("0F0",), ("0NOTE0", "1F0", "0F1"), ("1F0", "0F1")]


def test_idling_by_choice_lasts_until_something_happens() -> None:
    def patient(view: ps.program.View, ready: tuple[ps.Op, ...]) -> ps.Op | None:
        return None if view.rank == 1 and view.started("F", 0) < 3 else ready[0]

    schedule = ps.Program(ONE(2), 3, ps.Rules("forward-first", choose=patient)).build()
    steps = [
        step
        for step in ps.program.Stepper(ps.Program(ONE(2), 3, ps.Rules("forward-first", choose=patient)))
        if step.rank == 1
    ]
    assert steps[0].chosen is None
    assert next(step.time for step in steps if step.chosen) == 2.0
    ps.check(schedule)
