"""The passes on schedules whose best times are known, and what they refuse."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.passes import overlap_pairs, recompute, separate_gradients
from penstock.schedule import Op
from tiers import examples

pytestmark = pytest.mark.unit


def timed_rows(schedule: ps.Schedule, links: ps.Links | None = None) -> list[str]:
    """Each rank's ops at the ms at which they start."""
    timeline = ps.simulate(schedule, links=links)
    rows = []
    for row in timeline.rows:
        cells = ["."] * int(timeline.makespan)
        for timed in row:
            cells[int(timed.start) : int(timed.end)] = [timed.op.short()] + ["--"] * int(timed.end - timed.start - 1)
        rows.append(" ".join(cell.ljust(2) for cell in cells).rstrip(" ."))
    return rows


def count(schedule: ps.Schedule, kind: str) -> int:
    return sum(op.kind == kind for row in schedule.order for op in row)


def makespan(schedule: ps.Schedule, costs: ps.Costs | None = None, links: ps.Links | None = None) -> float:
    return ps.simulate(schedule, costs, links=links).makespan


# -- Separate gradients --------------------------------------------------------------------------------------------


def test_the_papers_example() -> None:
    """FlexPipe, Figure 10: the bubbles of actor 0 go as actors 1 and 2 stash their weight gradients."""
    before = ps.build("1f1b", 3, 3)
    assert timed_rows(before) == [
        "F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --",
        ".  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        ".  .  F0 B0 -- F1 B1 -- F2 B2 --",
    ]
    assert timed_rows(separate_gradients(before)) == [
        "F0 F1 F2 .  .  B0 -- B1 -- B2 --",
        ".  F0 F1 .  I0 F2 I1 W0 I2 W1 W2",
        ".  .  F0 I0 F1 I1 F2 I2 W0 W1 W2",
    ]


@pytest.mark.parametrize(
    ("name", "options", "before", "after"),
    [
        ("gpipe", {}, 33, 30),
        ("1f1b", {}, 33, 27),
        ("interleaved-1f1b", {"num_stages": 8}, 28.5, 25.5),
        ("chimera", {}, 30, 25),
    ],
)
def test_the_gain_over_named_schedules(name: str, options: dict, before: float, after: float) -> None:
    """4 ranks, 8 microbatches, F = I = W = 1."""
    schedule = ps.build(name, 4, 8, **options)
    assert makespan(schedule) == before
    assert makespan(separate_gradients(schedule)) == after


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (6, 12), (8, 16)])
def test_1f1b_becomes_as_good_as_zb_h1(num_ranks: int, num_microbatches: int) -> None:
    plain, best = ps.build("1f1b", num_ranks, num_microbatches), ps.build("zb-h1", num_ranks, num_microbatches)
    separated = separate_gradients(plain)
    assert makespan(separated) == makespan(best) == 3 * num_microbatches + num_ranks - 1
    assert max(ps.simulate(separated).peak_activations) == num_ranks
    assert all(op.kind in "FB" for op in separated.order[0])


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_two_pipelines_lose_all_but_half_their_ramp(num_ranks: int) -> None:
    """Two opposite pipelines with split backwards: a bubble of (p - 2) / 2 is the best there is."""
    schedule = ps.build("chimera", num_ranks, 2 * num_ranks)
    separated = separate_gradients(schedule)
    assert makespan(separated) <= 6 * num_ranks + (num_ranks - 2) / 2 < makespan(schedule)


def test_what_has_no_bubble_to_fill_comes_back_as_it_was() -> None:
    for schedule in (ps.build("zb-h2", 3, 8), ps.build("1f1b", 1, 4)):
        assert separate_gradients(schedule) is schedule


def test_weight_gradients_make_room_for_forwards() -> None:
    schedule = ps.build("interleaved-1f1b", 4, 8, num_stages=8)
    costs = ps.Costs.uniform(8)
    own = max(ps.simulate(schedule).peak_activations)
    free = separate_gradients(schedule, costs)
    tight = separate_gradients(schedule, costs, memory_limit=own)
    assert max(ps.simulate(free, costs).peak_activations) > own
    assert max(ps.simulate(tight, costs).peak_activations) <= own
    assert makespan(free) <= makespan(tight) < makespan(schedule)


def test_the_schedules_own_limit_holds_too() -> None:
    schedule = replace(ps.build("1f1b", 4, 8), max_in_flight=4)
    separated = separate_gradients(schedule)
    ps.check(separated)
    assert makespan(separated) < makespan(schedule)


def test_a_late_link_is_answered() -> None:
    links = ps.Links({(1, 2): 3.0})
    schedule = ps.build("1f1b", 4, 8)
    assert makespan(separate_gradients(schedule, links=links), links=links) < makespan(schedule, links=links)


def test_one_slow_stage_costs_no_splits_where_nothing_waits() -> None:
    """The last stage is the bottleneck: only the first backwards are urgent, and rank 0's never are."""
    costs = ps.Costs(f=[1, 1, 4], i=[1, 1, 4], w=[1, 1, 4])
    separated = separate_gradients(ps.build("1f1b", 3, 8), costs)
    assert makespan(separated, costs) < makespan(ps.build("1f1b", 3, 8), costs)
    assert all(op.kind in "FB" for op in separated.order[0])


def test_no_weight_half_comes_between_the_two_ops_of_a_pair() -> None:
    costs = ps.Costs(f=[2, 1, 5, 6, 1, 2], i=[2, 1, 1, 6, 2, 6], w=[3, 2, 1, 3, 4, 6])
    schedule = overlap_pairs(ps.build("interleaved-1f1b", 3, 6))
    separated = separate_gradients(schedule, costs)
    assert separated.pairs == schedule.pairs
    assert makespan(separated, costs) < makespan(schedule, costs)


def adders(row: Sequence[Op], stage: int) -> list[int]:
    """The microbatches of a stage, in the order in which they add to its gradients."""
    return [op.microbatch for op in row if op.stage == stage and op.kind in ("B", "W")]


@pytest.mark.parametrize(
    ("name", "options"),
    [("interleaved-1f1b", {}), ("chimera", {}), ("dualpipe-v", {"overlap": True}), ("dualpipe", {"overlap": True})],
)
def test_pairs_stay_and_sums_keep_their_order_whatever_ops_take(name: str, options: dict) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        num_ranks = draw.choice([2, 4])
        built = ps.build(name, num_ranks, num_ranks * draw.choice([1, 2, 3]), **options)
        schedule = built if options else overlap_pairs(built)
        rows = [[draw.randint(low, 6) for _ in range(schedule.num_stages)] for low in (1, 1, 0)]
        costs = ps.Costs(*rows, overlap=ps.cost.Overlap(*[[draw.choice([0.5, 1.0]) for _ in rows[0]] for _ in "fb"]))
        links = ps.Links({(0, 1): float(draw.randint(0, 9))})
        limit = [peak + draw.choice([0, 1]) for peak in ps.simulate(schedule, costs, links=links).peak_activations]
        separated = separate_gradients(schedule, costs, links=links, memory_limit=limit)
        ps.check(separated)
        assert separated.pairs == schedule.pairs, seed
        assert makespan(separated, costs, links) <= makespan(schedule, costs, links), seed
        for before, after in zip(schedule.order, separated.order, strict=True):
            for stage in range(schedule.num_stages):
                assert adders(before, stage) == adders(after, stage), seed


# -- Recompute -----------------------------------------------------------------------------------------------------


def test_a_forward_is_run_again_where_memory_asks() -> None:
    lighter = recompute(ps.build("gpipe", 2, 3), ps.Costs.uniform(2), 2)
    assert timed_rows(lighter) == ["F0 F1 F2 .  .  .  B0 -- B1 -- R2 B2 --", ".  F0 F1 F2 B0 -- B1 -- R2 B2 --"]


def test_enough_memory_leaves_the_schedule_as_it_is() -> None:
    schedule = ps.build("1f1b", 4, 8)
    assert recompute(schedule, ps.Costs.uniform(4), 4) is schedule
    only_first = recompute(schedule, ps.Costs.uniform(4), [3, 4, 4, 4])
    assert only_first.order[1:] == schedule.order[1:]


def test_what_recompute_keeps_counts() -> None:
    costs = replace(ps.Costs.uniform(2, activation=10.0), kept_by_recompute=0.2)
    schedule = ps.build("gpipe", 2, 4)
    assert max(ps.simulate(recompute(schedule, costs, 16), costs).peak_activations) == 16
    with pytest.raises(
        ps.ScheduleError, match="rank 0, step 3, F3 of stage 0: the rank would hold 16 even"
    ) as caught:
        recompute(schedule, costs, 15)
    assert (caught.value.rule, caught.value.rank, caught.value.step) == ("memory", 0, 3)


def test_the_cheaper_stage_is_recomputed() -> None:
    """Two stages on one rank, alike in what they keep: the one whose forward is short is run again."""
    text = """
        schedule x: 1 rank, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 0
        rank 0 | 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1
    """
    for stage, f in ((1, [9, 1]), (0, [1, 9])):
        lighter = recompute(ps.parse(text), ps.Costs(f=f, i=[1, 1], w=[1, 1]), 3)
        assert [op.stage for op in lighter.order[0] if op.kind == "R"] == [stage]


def test_an_early_r_moves_behind_those_of_earlier_backwards() -> None:
    """Left where it was, the R of a later microbatch would come before that of an earlier one."""
    text = """
        schedule x: 1 rank, 1 stage, 4 microbatches
        pipeline 0: stages on ranks 0
        rank 0 | F0 F1 F2 F3 R3 B0 B1 B2 B3
    """
    costs = replace(ps.Costs.uniform(1), kept_by_recompute=0.0)
    lighter = recompute(ps.parse(text), costs, 2)
    assert [op.microbatch for op in lighter.order[0] if op.kind == "R"] == [1, 2, 3]
    assert max(ps.simulate(lighter, costs).peak_activations) <= 2


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data(), num=st.integers(1, 6))
def test_no_fewer_would_do(data: st.DataObject, num: int) -> None:
    """One stage on one rank, forwards and backwards in any mixture: against trying all subsets."""
    row, held, done = [Op("F", 0, 0)], 1, 0
    started = 1
    while done < num:
        if started < num and (held == 0 or data.draw(st.booleans())):
            row.append(Op("F", 0, started))
            started, held = started + 1, held + 1
        else:
            row.append(Op("B", 0, done))
            done, held = done + 1, held - 1
    schedule = ps.Schedule.of("any", ps.Placement(((0,),)), [row], num)
    costs = replace(ps.Costs.uniform(1), kept_by_recompute=data.draw(st.sampled_from([0.0, 0.25, 0.5])))
    peak = max(ps.simulate(schedule, costs).peak_activations)
    limit = data.draw(st.floats(0.9, peak))

    def with_r(chosen: Sequence[int]) -> ps.Schedule:
        parts = [
            [Op("R", 0, op.microbatch), op] if op.kind == "B" and op.microbatch in chosen else [op] for op in row
        ]
        return replace(schedule, order=(tuple(op for part in parts for op in part),))

    def fits(chosen: Sequence[int]) -> bool:
        return max(ps.simulate(with_r(chosen), costs).peak_activations) <= limit * (1 + 1e-9)

    fewest = next((size for size in range(num + 1) if any(map(fits, combinations(range(num), size)))), None)
    try:
        found = count(recompute(schedule, costs, limit), "R")
    except ps.ScheduleError:
        found = None
    assert found == fewest


# -- What all of them refuse ---------------------------------------------------------------------------------------

PASSES: list[Callable[[ps.Schedule, ps.Costs], ps.Schedule]] = [
    separate_gradients,
    lambda schedule, costs: recompute(schedule, costs, 4),
]


@pytest.mark.parametrize("apply", PASSES)
def test_bad_input(apply: Callable[[ps.Schedule, ps.Costs], ps.Schedule]) -> None:
    schedule = ps.build("1f1b", 2, 3)
    broken = replace(schedule, order=(schedule.order[0], schedule.order[1][:-1]))
    with pytest.raises(ps.ScheduleError, match="B2 of stage 1 is missing"):
        apply(broken, ps.Costs.uniform(2))
    with pytest.raises(ps.CostError, match="the costs are for 3 stages, the schedule has 2"):
        apply(schedule, ps.Costs.uniform(3))


def test_a_limit_below_the_schedules_own_peak() -> None:
    schedule = ps.build("gpipe", 2, 4)
    with pytest.raises(
        ps.ScheduleError, match=r"rank 0, step 2, F2 of stage 0: the rank would hold 3, the limit is 2"
    ):
        separate_gradients(schedule, memory_limit=2)
    with pytest.raises(ps.ScheduleError, match="memory_limit has 3 entries; give one per rank, 2 in all"):
        separate_gradients(schedule, memory_limit=[4, 4, 4])
    with pytest.raises(ps.ScheduleError, match="memory_limit of rank 0 is nan"):
        separate_gradients(schedule, memory_limit=float("nan"))
    with pytest.raises(ps.CostError, match="link 0:7"):
        separate_gradients(schedule, links=ps.Links({(0, 7): 1.0}))
