"""The simulator: the paper's figures, transports, memory, and what it says when it cannot run."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from dataclasses import replace

import pytest

import penstock as ps
from penstock.dispatch import Dispatch
from penstock.schedule import Op

pytestmark = pytest.mark.unit

TENS = ps.Costs.uniform(4, f=10, i=10, w=10)


def zb_4x12() -> ps.Schedule:
    return ps.build("zb", num_ranks=4, num_microbatches=12, warmup=[7, 5, 3, 1])


@pytest.mark.parametrize(("delay", "makespan"), [(0, 390), (10, 400), (20, 440)])
def test_pipemorph_figures_4_and_5(delay: float, makespan: float) -> None:
    timeline = ps.simulate(zb_4x12(), TENS, links=ps.Links({(0, 1): delay}))
    assert timeline.makespan == makespan


def test_dynamic_absorbs_the_slow_link_under_the_same_peak() -> None:
    links = ps.Links({(0, 1): 20})
    frozen = ps.simulate(zb_4x12(), TENS, links=links)
    dynamic = ps.simulate(zb_4x12(), TENS, links=links, dispatch="dynamic")
    assert (frozen.makespan, dynamic.makespan) == (440, 410)
    assert all(d <= f for d, f in zip(dynamic.peak_activations, frozen.peak_activations, strict=True))


def test_eight_ranks_with_a_late_last_link() -> None:
    schedule = ps.build("zb", 8, 32, warmup=[2 * (8 - i) - 1 for i in range(8)])
    costs, links = ps.Costs.uniform(8, 10, 10, 10), ps.Links({(6, 7): 60})
    assert ps.simulate(schedule, costs, links=links).makespan == 2140
    assert ps.simulate(schedule, costs, links=links, dispatch="dynamic").makespan == 1090
    assert ps.simulate(schedule, costs).makespan == 1030


def test_a_timeline_told_by_hand() -> None:
    schedule = ps.build("1f1b", 2, 2)
    timeline = ps.simulate(schedule, ps.Costs(f=[1, 2], i=[1, 2], w=[1, 2]), links=ps.Links({(0, 1): 3, (1, 0): 5}))
    found = [(str(t.op), t.start, t.end, None if t.waited_for is None else str(t.waited_for)) for t in timeline.ops]
    assert found == [
        ("0F0", 0, 1, None),
        ("0F1", 1, 2, None),
        ("0B0", 15, 17, "1B0"),
        ("0B1", 21, 23, "1B1"),
        ("1F0", 4, 6, "0F0"),
        ("1B0", 6, 10, None),
        ("1F1", 10, 12, None),
        ("1B1", 12, 16, None),
    ]
    assert [(str(m.source), str(m.target), m.sent, m.arrived) for m in timeline.messages] == [
        ("0F0", "1F0", 1, 4),
        ("0F1", "1F1", 2, 5),
        ("1B0", "0B0", 10, 15),
        ("1B1", "0B1", 16, 21),
    ]
    assert timeline.makespan == 23
    assert timeline.span == 23
    assert timeline.busy == (6, 12)
    assert timeline.bubble_ratio == pytest.approx(1 - 18 / 46)
    assert timeline.peak_activations == (2, 1)
    assert [t.waited for t in timeline.rows[0]] == [0, 0, 13, 4]


def test_one_direction_of_a_link_may_be_late() -> None:
    schedule = ps.build("1f1b", 2, 1)
    there = ps.simulate(schedule, links=ps.Links({(0, 1): 7, (1, 0): 0})).makespan
    both = ps.simulate(schedule, links=ps.Links({(0, 1): 7})).makespan
    none = ps.simulate(schedule).makespan
    assert (none, there, both) == (6, 13, 20)


def test_a_full_link_blocks_its_sender() -> None:
    """GPipe's second rank gets nothing for 10 ms; the first stands still after as many sends as the link holds."""
    schedule, links = ps.build("gpipe", 2, 3), ps.Links({(0, 1): 10, (1, 0): 0})
    starts = {}
    for depth in (1, 2, 3):
        timeline = ps.simulate(schedule, links=links, transport=ps.Blocking(depth))
        starts[depth] = [t.start for t in timeline.rows[0][:3]]
        assert sum(t.blocked for t in timeline.rows[1]) == 0
    assert starts == {1: [0, 1, 11], 2: [0, 1, 2], 3: [0, 1, 2]}
    depth_1 = ps.simulate(schedule, links=links, transport=ps.Blocking(1))
    assert [t.blocked for t in depth_1.rows[0][:3]] == [0, 9, 9]
    assert ps.simulate(schedule, links=links, transport="decoupled").makespan <= depth_1.makespan


def test_memory_is_freed_partly_by_i_and_the_rest_by_w() -> None:
    schedule = ps.parse(
        "schedule x: 1 rank, 1 stage, 2 microbatches\npipeline 0: stages on ranks 0\nrank 0 | F0 I0 F1 I1 W0 W1"
    )
    for share, peak in ((0.0, 2.0), (0.5, 1.5), (0.75, 1.25), (1.0, 1.0)):
        costs = ps.Costs.uniform(1, freed_by_input=share)
        assert ps.simulate(schedule, costs).peak_activations == (peak,)
    bytes_ = ps.Costs.uniform(1, activation=1000.0)
    assert ps.simulate(schedule, bytes_).peak_activations == (1500.0,)


def test_hinted_dispatch_absorbs_the_slow_link_too() -> None:
    links = ps.Links({(0, 1): 20.0})
    hinted = ps.simulate(zb_4x12(), TENS, links=links, dispatch="hinted")
    assert (hinted.makespan, hinted.dispatch) == (410, "hinted")
    ps.check(hinted.executed())


def test_without_delays_hinted_dispatch_keeps_an_order_that_class_first_leaves() -> None:
    schedule = ps.build("interleaved-1f1b", 4, 8)
    frozen, hinted, dynamic = (ps.simulate(schedule, dispatch=each) for each in Dispatch)
    assert hinted.makespan <= frozen.makespan < dynamic.makespan


def test_a_wider_cap_helps_a_dynamic_run() -> None:
    schedule, links = ps.build("1f1b", 4, 12), ps.Links({(0, 1): 3})
    own = ps.simulate(schedule, links=links, dispatch="dynamic")
    wide = ps.simulate(schedule, links=links, dispatch="dynamic", memory_limit=12)
    each = ps.simulate(schedule, links=links, dispatch="dynamic", memory_limit=[12, 12, 12, 12])
    assert wide.makespan < own.makespan
    assert wide == each
    assert max(wide.peak_activations) <= 12


def test_gpipe_frozen_and_dynamic_agree_without_delays() -> None:
    schedule = ps.build("gpipe", 3, 5)
    assert ps.simulate(schedule).makespan == ps.simulate(schedule, dispatch="dynamic").makespan


def test_forward_only_runs() -> None:
    for name in ps.library.SCHEDULES:
        schedule = ps.build(name, 2, 4).forward_only()
        timeline = ps.simulate(schedule)
        assert len(timeline.ops) == schedule.num_ops
        assert {t.op.kind for t in timeline.ops} == {"F"}


def test_executed_is_the_order_that_ran() -> None:
    schedule = zb_4x12()
    frozen = ps.simulate(schedule, TENS, links=ps.Links({(0, 1): 20}))
    dynamic = ps.simulate(schedule, TENS, links=ps.Links({(0, 1): 20}), dispatch="dynamic")
    assert frozen.executed() == schedule
    assert dynamic.executed() != schedule
    ps.check(dynamic.executed())
    assert ps.simulate(dynamic.executed(), TENS, links=ps.Links({(0, 1): 20})).makespan == 410


def test_empty_costs_of_zero_take_no_time() -> None:
    timeline = ps.simulate(ps.build("zb-v", 2, 4), ps.Costs.uniform(4, 0, 0, 0))
    assert (timeline.makespan, timeline.bubble_ratio) == (0, 0)


DEADLOCK = """\
schedule x: 2 ranks, 2 stages, 2 microbatches
pipeline 0: stages on ranks 0 1
rank 0 | F0 B0 F1 B1
rank 1 | F0 F1 B0 B1
"""


def test_a_deadlock_is_an_error_that_names_what_never_runs() -> None:
    schedule = ps.parse(DEADLOCK)
    with pytest.raises(ps.ScheduleError) as caught:
        ps.simulate(schedule)
    assert caught.value.rule == "deadlock"
    assert caught.value.op == Op("B", 0, 0)
    assert "after 2 of 8 ops: rank 0 never runs 0B0" in str(caught.value)
    assert len(ps.simulate(schedule, dispatch="dynamic", memory_limit=2).ops) == 8  # readiness is a fact


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": ps.Costs.uniform(3)}, "the costs are for 3 stages, the schedule has 4"),
        ({"links": ps.Links({(0, 4): 1.0})}, "link 0:4: ranks go from 0 to 3"),
        ({"dispatch": "warm"}, "dispatch 'warm': give 'frozen', 'hinted' or 'dynamic'"),
        (
            {"transport": "slow"},
            "transport 'slow': give 'decoupled', 'blocking', 'blocking:4', 'gloo' or",
        ),
        (
            {"dispatch": "dynamic", "memory_limit": 1},
            "rank 0: the cap is 1 activations, but the schedule's own order",
        ),
        (
            {"dispatch": "dynamic", "memory_limit": math.nan},
            "memory_limit of rank 0 is nan: give a number of at least 0",
        ),
        ({"dispatch": "dynamic", "memory_limit": [9, 9]}, "memory_limit has 2 entries; give one per rank, 4 in all"),
        ({"dispatch": "dynamic", "warmup": [1]}, "warmup has 1 counts; give one per rank, 4 in all"),
        ({"dispatch": "dynamic", "memory_limit": "many"}, "memory_limit is 'many': give a number of activations"),
        ({"dispatch": "dynamic", "memory_limit": "9999"}, "memory_limit is '9999': give a number of activations"),
        ({"memory_limit": dict.fromkeys(range(4), 9)}, "memory_limit is {0: 9, 1: 9, 2: 9, 3: 9}: give a number"),
        ({"dispatch": "dynamic", "warmup": [1, 1, -1, 1]}, "warmup of rank 2 is -1: give a whole number"),
        ({"dispatch": "dynamic", "warmup": [1, 1, 1.5, 1]}, "warmup of rank 2 is 1.5: give a whole number"),
        ({"warmup": [7, 5, 3, 1]}, "warmup [7, 5, 3, 1] steers a dynamic run, and a frozen one follows its order"),
        ({"memory_limit": 1}, "rank 0: the cap is 1 activations, but the schedule's own order"),
    ],
)
def test_wrong_arguments_say_what_was_given(options: dict, message: str) -> None:
    with pytest.raises((ps.ScheduleError, ps.CostError)) as caught:
        ps.simulate(zb_4x12(), **options)
    assert str(caught.value).startswith(message)


def test_a_frozen_run_keeps_under_a_cap_that_holds_its_order() -> None:
    schedule = zb_4x12()
    peaks = ps.simulate(schedule).peak_activations
    assert ps.simulate(schedule, memory_limit=peaks) == ps.simulate(schedule)


def test_a_timeline_is_copied_with_its_ops() -> None:
    made = ps.simulate(ps.build("1f1b", 2, 3))
    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), replace(made)):
        assert copied == made
        assert (copied.makespan, copied.span, copied.busy) == (made.makespan, made.span, made.busy)


def test_an_attribute_that_a_timeline_lacks_is_named_as_python_does() -> None:
    made = ps.simulate(ps.build("1f1b", 2, 3))
    with pytest.raises(AttributeError, match="'Timeline' object has no attribute 'makespam'") as caught:
        _ = made.makespam
    assert (caught.value.name, caught.value.obj) == ("makespam", made)  # from which Python suggests a name


@pytest.mark.parametrize(
    ("name", "warmup", "cap", "message"),
    [
        ("1f1b", [9, 3, 2, 1], None, "rank 0 is to run 9 forwards before anything else, and its cap of 4"),
        ("1f1b", [4, 3, 3, 1], None, "rank 2 is to run 3 forwards before anything else, and its cap of 2"),
        ("zb-v", [8, 8, 9, 8], None, "rank 2 is to run 9 forwards before anything else, and its cap of 8"),
        ("1f1b", [20, 3, 2, 1], 99, "rank 0 is to run 20 forwards before anything else, and it has only 8"),
        ("mllm", [9, 9, 9, 9], 99, "rank 0 is to run 9 forwards before anything else, and after 7 none can run"),
    ],
)
def test_a_warm_up_above_the_cap_is_no_deadlock(name: str, warmup: list, cap: float | None, message: str) -> None:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.simulate(ps.build(name, 4, 8), dispatch="dynamic", warmup=warmup, memory_limit=cap)
    assert caught.value.rule == "options"
    assert str(caught.value).startswith(message)
    assert "give a warm-up of at most" in str(caught.value)


def test_a_blocking_link_holds_at_least_one() -> None:
    with pytest.raises(ps.CostError, match="a blocking link of depth 0 can carry nothing"):
        ps.Blocking(0)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("0F9", "0F9 is missing"),
        ("0F0", "0F0 is there twice"),
        ("0X0", "0X0 is of no known kind"),
        ("7F0", "7F0 is not in stages 0 to 0"),
    ],
)
def test_a_schedule_that_is_none_is_refused(op: str, message: str) -> None:
    rows = [[Op("F", 0, 0), Op("B", 0, 0)]]
    kind, stage, microbatch = op[1], int(op[0]), int(op[2:])
    rows[0].append(Op("B" if message.endswith("missing") else kind, stage, microbatch))
    with pytest.raises(ps.ScheduleError) as caught:
        ps.simulate(ps.Schedule.of("x", ps.Placement(((0,),)), rows, 1))
    assert str(caught.value).startswith(message)


def test_ops_that_take_no_time_are_listed_in_the_order_they_ran() -> None:
    """I of the last microbatches overtakes W in a dynamic run, though all start at the same moment."""
    schedule = ps.parse(
        "schedule x: 1 rank, 1 stage, 2 microbatches\npipeline 0: stages on ranks 0\nrank 0 | F0 I0 W0 F1 I1 W1"
    )
    timeline = ps.simulate(schedule, ps.Costs.uniform(1, 0, 0, 0), dispatch="dynamic", memory_limit=2)
    assert [str(t.op) for t in timeline.ops] == ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]


def test_arguments_stand_alike_in_plan_and_simulate() -> None:
    schedule, costs, links = ps.build("zb-h1", 2, 4), ps.Costs.uniform(2), ps.Links({(0, 1): 2.0})
    assert ps.simulate(schedule, costs, links) == ps.simulate(schedule, costs, links=links)
    both = set(inspect.signature(ps.plan).parameters) & set(inspect.signature(ps.simulate).parameters)
    assert {"costs", "links", "dispatch", "memory_limit"} <= both


@pytest.mark.parametrize(("dispatch", "in_flight"), [("frozen", 1), ("hinted", 1), ("dynamic", None)])
def test_what_ran_has_the_schedules_own_limit_only_where_it_kept_to_it(dispatch: str, in_flight: int | None) -> None:
    """An I that frees all memory lets a dynamic rank run F1 before W0, which is two in flight, counted to the W."""
    schedule = replace(ps.parse("rank 0 | F0 I0 W0 F1 I1 W1"), max_in_flight=1)
    costs = ps.Costs(f=[1], i=[1], w=[1], freed_by_input=1.0)
    ran = ps.simulate(schedule, costs, dispatch=dispatch)
    assert ran.peak_activations == (1,)
    ps.check(ran.executed())
    assert ran.executed().max_in_flight == in_flight


@pytest.mark.parametrize(("cost", "late"), [(1e307, 0.0), (10.0, 1e308)])
def test_times_beyond_any_float_were_infinite(cost: float, late: float) -> None:
    """The command line called it a bug, as JSON knows no such number."""
    schedule, costs = ps.build("zb", 4, 12), ps.Costs.uniform(4, f=cost, i=cost, w=cost)
    with pytest.raises(ps.CostError, match="more milliseconds than a float can hold; give smaller costs and delays"):
        ps.simulate(schedule, costs, links=ps.Links({(0, 1): late}))
