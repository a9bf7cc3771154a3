"""What `check` says of broken schedules: the whole text, with the arrow under the right cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import penstock as ps
from penstock.schedule import Op, needed_channel_depth, peak_in_flight

pytestmark = pytest.mark.unit

HEAD_2X2 = "schedule x: 2 ranks, 2 stages, 2 microbatches\npipeline 0: stages on ranks 0 1\n"
HEAD_V = "schedule x: 2 ranks, 4 stages, 1 microbatch\npipeline 0: stages on ranks 0 1 1 0\n"

BROKEN: dict[str, str] = {
    "a missing forward": HEAD_2X2 + "rank 0 | F0 B0 B1\nrank 1 | F0 B0 F1 B1",
    "a missing backward": HEAD_2X2 + "rank 0 | F0 F1 B0 B1\nrank 1 | F0 B0 F1",
    "a missing weight half": HEAD_2X2 + "rank 0 | F0 F1 I0 I1 W1\nrank 1 | F0 B0 F1 B1",
    "a missing input half": HEAD_2X2 + "rank 0 | F0 F1 W0 B1\nrank 1 | F0 B0 F1 B1",
    "a microbatch left out": HEAD_2X2 + "rank 0 | F0 B0\nrank 1 | F0 B0",
    "an op twice": HEAD_2X2 + "rank 0 | F0 F1 B0 F1 B1\nrank 1 | F0 B0 F1 B1",
    "B and I of one microbatch": HEAD_2X2 + "rank 0 | F0 F1 B0 I0 B1\nrank 1 | F0 B0 F1 B1",
    "an op of another rank": HEAD_2X2 + "rank 0 | F0 F1 B0 B1\nrank 1 | F0 0F1 B0 F1 B1",
    "a microbatch out of range": HEAD_2X2 + "rank 0 | F0 F1 B0 B2\nrank 1 | F0 B0 F1 B1",
    "a stage out of range": HEAD_2X2 + "rank 0 | F0 F1 B0 5B1\nrank 1 | F0 B0 F1 B1",
    "an unknown kind": HEAD_2X2 + "rank 0 | F0 F1 B0 B1 Q1\nrank 1 | F0 B0 F1 B1",
    "a backward before its forward": HEAD_2X2 + "rank 0 | F0 B1 F1 B0\nrank 1 | F0 B0 F1 B1",
    "a weight half before its input half": HEAD_2X2 + "rank 0 | F0 F1 W0 I0 B1\nrank 1 | F0 B0 F1 B1",
    "two stages of a rank in the wrong order": HEAD_V + "rank 0 | 0F0 3F0 3B0 0B0\nrank 1 | 2F0 1F0 2B0 1B0",
    "two ranks wait for each other": HEAD_2X2 + "rank 0 | F0 B0 F1 B1\nrank 1 | F0 F1 B0 B1",
    "more than the memory limit": HEAD_2X2.replace("batches\n", "batches, at most 1 in flight\n", 1)
    + "rank 0 | F0 F1 B0 B1\nrank 1 | F0 B0 F1 B1",
}


def far_from_both_ends() -> ps.Schedule:
    """A long schedule whose F10 comes after its B10, in the middle of the row."""
    schedule = ps.build("1f1b", 2, 20)
    row = list(schedule.order[0])
    row.insert(22, row.pop(19))
    return ps.Schedule.of("x", schedule.placement, [row, schedule.order[1]], 20)


def circle_of_three() -> ps.Schedule:
    """Each rank starts with what the one before it does later: all three wait for one another."""
    return ps.parse("""
        schedule x: 3 ranks, 6 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1 2 0 1 2
        order of F on stages 1 2: 1 0
        rank 0 | 0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1
        rank 1 | 1F1 1F0 4F0 4F1 4B0 4B1 1B0 1B1
        rank 2 | 2F1 2F0 5F0 5F1 5B0 5B1 2B0 2B1
    """)


def refusal(schedule: ps.Schedule, **options: int) -> ps.ScheduleError:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(schedule, **options)
    return caught.value


def test_every_message(golden: Callable[[str, str], None]) -> None:
    told = [f"== {name}\n{refusal(ps.parse(text))}\n" for name, text in BROKEN.items()]
    told.append(f"== far from both ends\n{refusal(far_from_both_ends())}\n")
    told.append(f"== a circle of three ranks\n{refusal(circle_of_three())}\n")
    slack = ps.build("zb", 4, 12, warmup=[9, 6, 3, 1])
    told.append(f"== channels too shallow for the slack\n{refusal(slack, channel_depth=1)}\n")
    golden("check_messages.txt", "\n".join(told))


@pytest.mark.parametrize("name", BROKEN)
def test_the_error_carries_the_spot_its_text_tells(name: str) -> None:
    error = refusal(ps.parse(BROKEN[name]))
    assert error.op is not None
    assert error.rank is not None
    assert f"{error.op.short()} of stage {error.op.stage}" in str(error)
    assert f"rank {error.rank}" in str(error)
    assert f"(rule: {error.rule})" in str(error)


@pytest.mark.parametrize("name", [name for name in BROKEN if "missing" not in name and "left out" not in name])
def test_the_arrow_is_under_the_op(name: str) -> None:
    schedule = ps.parse(BROKEN[name])
    error = refusal(schedule)
    assert error.step is not None
    lines = str(error).splitlines()
    arrow = next(k for k, line in enumerate(lines) if set(line.strip()) == {"^"})
    column = lines[arrow].index("^")
    cell = lines[arrow - 1][column:].split()[0]
    op = schedule.order[error.rank or 0][error.step]
    assert cell in (op.short(), str(op))
    assert len(lines[arrow].strip()) == len(cell)


def test_one_broken_rule_is_told_once() -> None:
    assert str(refusal(ps.parse(BROKEN["an op twice"]))).count("rule:") == 1


def test_slack_needs_depth() -> None:
    shallow = ps.build("zb", 4, 12, warmup=[7, 5, 3, 1])
    deep = ps.build("zb", 4, 12, warmup=[12, 8, 4, 1])
    assert (needed_channel_depth(shallow), needed_channel_depth(deep)) == (1, 4)
    ps.check(deep)
    ps.check(deep, channel_depth=4)
    assert refusal(deep, channel_depth=3).rule == "deadlock"


def test_max_in_flight_of_the_schedule_or_of_the_caller() -> None:
    schedule = ps.build("1f1b", 4, 8)
    ps.check(schedule, max_in_flight=4)
    error = refusal(schedule, max_in_flight=3)
    assert (error.rule, error.rank, error.op) == ("memory", 0, Op("F", 0, 3))


def test_a_rank_may_have_nothing_to_do() -> None:
    schedule = ps.build("1f1b", 2, 3)
    idle = ps.Schedule.of("x", schedule.placement, [*schedule.order, ()], 3)
    ps.check(idle)
    assert len(ps.simulate(idle).ops) == idle.num_ops
    assert ps.parse(str(idle)) == idle


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (ps.Schedule("x", ps.Placement(((0, 3),)), ((), ()), (0,)), "pipeline 0 places a stage on rank 3, but the"),
        (
            ps.Schedule("x", ps.Placement(((0,),)), ((),), (1,)),
            "a microbatch is given to pipeline 1, but there are 1",
        ),
        (ps.Schedule("x", ps.Placement(((0,),)), ((),), ()), "the schedule has no microbatch; it needs at least 1"),
        (ps.Schedule("x", ps.Placement(((0,),)), (), (0,)), "pipeline 0 places a stage on rank 0, but the schedule"),
    ],
)
def test_what_is_wrong_as_a_whole(schedule: ps.Schedule, message: str) -> None:
    assert str(refusal(schedule)).startswith(message)


def test_peak_in_flight_counts_from_f_to_w_or_b() -> None:
    head = "schedule x: 1 rank, 1 stage, 3 microbatches\npipeline 0: stages on ranks 0\n"
    assert peak_in_flight(ps.parse(head + "rank 0 | F0 B0 F1 I1 F2 I2 W1 W2")) == (2,)
