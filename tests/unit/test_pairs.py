"""Pairs: a forward and a backward that run as one. Their text, their proof, their time, and that numbers stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from ordered_loop import wrong
from penstock.cost import CostError, Overlap
from penstock.formats.costs import costs_from_json, costs_to_json
from penstock.passes import add_communication, overlap_pairs, remove_communication, separate_pairs
from penstock.runtime.emulation.backend import EmulatedBackend
from penstock.runtime.transport.wiring import wire
from penstock.schedule import Op, Pair
from penstock.schedule.dependencies import predecessors
from strategies import costs_for, library_schedules, links_for, paired
from tiers import examples

pytestmark = pytest.mark.unit

GRID = """\
schedule two: 2 ranks, 2 stages, 3 microbatches
pipeline 0: stages on ranks 0 1
rank 0 | F0    F1    .     F2+B0 .     B1    .     B2
rank 1 | .     F0    B0    F1    B1    F2    B2"""


def costs_of(num_stages: int, hidden: float = 0.9) -> ps.Costs:
    row = [10.0] * num_stages
    overlap = Overlap(f=[5.0] * num_stages, b=[9.0] * num_stages, hidden=hidden)
    return ps.Costs(f=row, i=row, w=row, overlap=overlap)


def op(text: str) -> Op:
    return ps.schedule.parse_op(text)


def with_pairs(schedule: ps.Schedule, *pairs: str) -> ps.Schedule:
    return replace(schedule, pairs=tuple(tuple(op(each) for each in pair.split("+")) for pair in pairs))


# ---- written and read


def test_a_pair_is_one_cell_of_the_grid() -> None:
    schedule = ps.parse(GRID)
    assert schedule.pairs == (Pair(op("0F2"), op("0B0")),)
    assert schedule.order[0] == tuple(map(op, ("0F0", "0F1", "0F2", "0B0", "0B1", "0B2")))
    assert str(schedule) == GRID
    ps.check(schedule)


def test_a_grid_of_rows_alone_has_pairs_too() -> None:
    rows = "rank 0 | F0 F1 F2+B0 B1 B2\nrank 1 | F0 B0 F1 B1 F2 B2\n"
    assert ps.parse(rows) == ps.parse(GRID).renamed("grid")
    v = "\n".join(str(ps.build("dualpipe-v", 2, 4, overlap=True)).splitlines()[2:])
    assert ps.parse(v) == ps.build("dualpipe-v", 2, 4, overlap=True).renamed("grid")


@pytest.mark.parametrize("cell", ["F2+B0+F1", "F2+", "+B0", "F2++B0", "F2+B", "F2 + B0"])
def test_a_cell_that_is_no_pair_is_refused_at_its_place(cell: str) -> None:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.parse(GRID.replace("F2+B0", cell))
    assert caught.value.rule == "text"
    assert caught.value.line == 3


@pytest.mark.parametrize("ending", ["json", "txt", "csv"])
def test_pairs_are_saved_and_loaded(ending: str, tmp_path: Path) -> None:
    schedule = ps.build("dualpipe-v", 4, 10, overlap=True)
    ps.save(schedule, tmp_path / f"dualpipe-v.{ending}")
    assert ps.load(tmp_path / f"dualpipe-v.{ending}") == schedule


def test_torchs_table_with_messages_is_the_same_schedule() -> None:
    schedule = ps.build("dualpipe-v", 4, 10, overlap=True)
    placed = add_communication(schedule)
    ps.check(placed)
    assert placed.pairs == schedule.pairs
    assert remove_communication(placed) == schedule
    assert separate_pairs(schedule) == ps.build("dualpipe-v", 4, 10)


def test_messages_placed_by_costs_leave_pairs_whole() -> None:
    schedule = ps.build("dualpipe-v", 3, 7, overlap=True)
    placed = add_communication(schedule, replace(costs_of(6), f=[0.0, 5, 10, 0, 3, 7], overlap=None))
    ps.check(placed)
    assert remove_communication(placed) == schedule


# ---- the proof


V = ps.build("dualpipe-v", 2, 4)
ONE = ps.build("1f1b", 2, 4)


@pytest.mark.parametrize(
    ("schedule", "pair", "says"),
    [
        (V, "0F3+3B2", "in the pair .* the backward stands at step 11: it comes right after its forward, at step 8"),
        (V, "0F3+2B0", r"0F3\+2B0 2B0 is on rank 1: the two of a pair run on one rank"),
        (V, "3B1+0F3", "is of kind B, where a forward .F. is due"),
        (V, "0F3+3I0", "3I0 is of kind I, where a full backward .B. is due; a backward in halves"),
        (V, "3F0+3W0", "3W0 is of kind W"),
        (V, "0F3+3B9", "needs 3B9, which no rank runs"),
        (V, "9F9+9B8", "of ops that no rank runs"),
        (ONE, "1F0+1B0", "is of one microbatch, 0"),
    ],
)
def test_what_can_be_no_pair_is_refused_with_its_ops(schedule: ps.Schedule, pair: str, says: str) -> None:
    with pytest.raises(ps.ScheduleError, match=says) as caught:
        ps.check(with_pairs(schedule, pair))
    assert caught.value.rule == "pairs"


def test_an_op_in_two_pairs_is_refused() -> None:
    with pytest.raises(ps.ScheduleError, match=r"it is in two pairs, 0F1\+0B0 and 0F1\+0B1"):
        ps.check(with_pairs(ONE, "0F1+0B0", "0F1+0B1"))


def test_what_is_no_pair_of_ops_is_refused_by_the_schedule() -> None:
    with pytest.raises(ps.ScheduleError, match="is no pair: give a forward and a backward"):
        replace(ONE, pairs=(("F1", "B0"),))


def test_an_op_that_ranks_run_together_is_in_no_pair() -> None:
    schedule = ps.parse("""
        schedule shared: 2 ranks, 1 stage, 2 microbatches
        pipeline 0: stages on ranks 0
        stage 0: shared by ranks 0 1
        edges none
        rank 0 | F0 F1+B0 B1
        rank 1 | F0 F1+B0 B1""")
    with pytest.raises(ps.ScheduleError, match="pair"):
        ps.check(schedule)


def test_pairs_that_wait_for_one_another_deadlock() -> None:
    """In order all is well. As pairs rank 0 waits for B0, so F1 never starts, for which rank 1 waits before B0."""
    schedule = ps.parse("rank 0 | F0 F1 B0 B1\nrank 1 | F0 F1 B0 B1")
    ps.check(schedule)
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(with_pairs(schedule, "0F1+0B0"))
    assert caught.value.rule == "deadlock"
    with pytest.raises(ps.ScheduleError) as caught:
        ps.simulate(with_pairs(schedule, "0F1+0B0"))
    assert caught.value.rule == "deadlock"
    assert overlap_pairs(schedule).pairs == (Pair(op("1F1"), op("1B0")),)


# ---- time


def test_a_pair_starts_when_both_can_and_ends_as_one() -> None:
    costs = ps.Costs(f=[10, 10], i=[10, 10], w=[10, 10], overlap=Overlap(f=[4, 4], b=[8, 8], hidden=0.5))
    assert costs.pair_duration(("F", 0), ("B", 0)) == 24  # 18 of compute, 12 of communication, of which 6 show
    timeline = ps.simulate(ps.parse(GRID), costs, links=ps.Links({(0, 1): 5.0}))
    times = {str(t.op): (t.start, t.end) for t in timeline.ops}
    assert times["1B0"] == (25, 45)
    assert times["0F2"] == (50, 74)  # when B0's gradient has come; both ops take what the pair takes
    assert times["0B0"] == (74, 74)  # at whose end the backward stands
    assert times["1F2"][0] == 79
    assert timeline.busy == (84, 90)


def test_without_an_overlap_a_pair_takes_what_its_ops_take() -> None:
    schedule = ps.parse(GRID)
    costs = replace(costs_of(2), overlap=None)
    assert ps.simulate(schedule, costs).busy == ps.simulate(separate_pairs(schedule), costs).busy


def test_the_published_chunk_gives_the_share_that_is_stated() -> None:
    """118 ms of compute and 115 ms of all-to-all in 128.5 ms."""
    hidden = 1 - (128.5 - 118) / 115
    costs = ps.Costs(f=[78], i=[80], w=[75], overlap=Overlap(f=[40], b=[75], hidden=hidden))
    assert costs.pair_duration(("F", 0), ("B", 0)) == pytest.approx(128.5)
    assert round(hidden, 3) == 0.909


def test_measured_pairs_go_before_the_model() -> None:
    overlap = Overlap(f=[0, 0], b=[0, 0], measured={(0, 1): 21.5})
    costs = ps.Costs(f=[10, 10], i=[10, 10], w=[10, 10], overlap=overlap)
    assert costs.pair_duration(("F", 0), ("B", 1)) == 21.5
    assert costs.pair_duration(("F", 1), ("B", 0)) == 30
    uneven = replace(costs, uneven=[1, 2])
    assert uneven.pair_duration(("F", 0, 1), ("B", 1, 1)) == 43
    assert uneven.pair_duration(("F", 0, 0), ("B", 1, 0)) == 21.5


@pytest.mark.parametrize(
    ("overlap", "says"),
    [
        (lambda: Overlap([1, 2], [1]), "give one entry per stage in both"),
        (lambda: Overlap([-1], [1]), r"overlap.f\[0\] is -1"),
        (lambda: Overlap([1], [float("nan")]), r"overlap.b\[0\] is nan"),
        (lambda: Overlap([1], [1], hidden=1.5), "overlap.hidden is 1.5: give a share from 0 to 1"),
        (lambda: Overlap([1], [1], measured={(0, 1): 3}), r"each from 0 to 0"),
        (lambda: Overlap([1], [1], measured={(0, 0): -3}), r"overlap.measured\[\(0, 0\)\] is -3"),
        (
            lambda: ps.Costs(f=[1], i=[1], w=[1], overlap=Overlap([2], [1])),
            r"overlap.f\[0\] is 2 ms of communication",
        ),
        (lambda: ps.Costs(f=[1], i=[1], w=[1], overlap=Overlap([1, 1], [1, 1])), "for 2 stages, the costs for 1"),
        (lambda: ps.Costs(f=[1], i=[1], w=[1], overlap=0.5), "give ps.cost.Overlap"),
    ],
)
def test_an_overlap_that_makes_no_sense_is_refused(overlap: object, says: str) -> None:
    with pytest.raises(CostError, match=says):
        overlap()  # type: ignore[operator]


def test_an_overlap_is_saved_with_the_costs() -> None:
    costs = replace(costs_of(3), overlap=Overlap([1, 2, 3], [4, 5, 6], 0.25, {(0, 2): 17.5}))
    assert costs_from_json(costs_to_json(costs), 3) == costs
    for text in (
        '{"f": 1}',
        '{"f": 1, "b": 1, "hidden": true}',
        '{"f": 1, "b": 1, "measured": [1]}',
        "[]",
        '{"f": 1, "b": 1, "measured": [[[0], 1, 2]]}',
    ):
        with pytest.raises(CostError, match="overlap"):
            costs_from_json(f'{{"f": 2, "i": 2, "w": 2, "overlap": {text}}}', 3)


def by_definition(schedule: ps.Schedule, costs: ps.Costs, links: ps.Links) -> tuple[float, list[float]]:
    """The makespan and each rank's time in ops, from the words alone: steps of one op or of two, each of which starts
    when its rank is free and all that its ops need has come, and whose ops end together."""
    alone = separate_pairs(schedule).graph
    host = {each: rank for rank, row in enumerate(schedule.order) for each in row}
    backward_of = dict(schedule.pairs)
    rows: list[list[tuple[Op, ...]]] = []
    for row in schedule.order:
        joined = set(backward_of.values())
        rows.append(
            [(each, backward_of[each]) if each in backward_of else (each,) for each in row if each not in joined]
        )
    end: dict[Op, float] = {}
    start: dict[Op, float] = {}
    free, busy, at = [0.0] * len(rows), [0.0] * len(rows), [0] * len(rows)
    while any(at[r] < len(row) for r, row in enumerate(rows)):
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row):
                ops = row[at[r]]
                needed = [(each, p) for each in ops for p in predecessors(each, alone, host) if p not in ops]
                if any(p not in end for _, p in needed):
                    break
                begin = max(
                    [free[r], *(end[p] + (links.delay(host[p], r) if host[p] != r else 0.0) for _, p in needed)]
                )
                ms = costs.pair_duration(*ops) if len(ops) == 2 else costs.duration(*ops[0])
                for each in ops:
                    start[each], end[each] = begin, begin + ms
                free[r], busy[r], at[r], moved = begin + ms, busy[r] + ms, at[r] + 1, True
        assert moved
    return max(end.values()) - min(start.values()), busy


@st.composite
def paired_problems(draw: st.DrawFn) -> tuple[ps.Schedule, ps.Costs, ps.Links]:
    schedule = draw(library_schedules(max_ranks=4, max_microbatches=8).filter(lambda s: s.updates is None))
    schedule = draw(paired(schedule))
    costs = draw(costs_for(schedule))
    shares = [draw(st.lists(st.floats(0, 1), min_size=len(costs.f), max_size=len(costs.f))) for _ in range(2)]
    f, b = (
        [share * ms for share, ms in zip(shares[k], row, strict=True)] for k, row in enumerate((costs.f, costs.b))
    )
    return schedule, replace(costs, overlap=Overlap(f, b, draw(st.floats(0, 1)))), draw(links_for(schedule))


@settings(max_examples=examples(60), deadline=None)
@given(paired_problems())
def test_pairs_take_their_time_by_definition(problem: tuple[ps.Schedule, ps.Costs, ps.Links]) -> None:
    schedule, costs, links = problem
    ps.check(schedule)
    assert ps.parse(str(schedule)) == schedule
    timeline = ps.simulate(schedule, costs, links)
    makespan, busy = by_definition(schedule, costs, links)
    assert timeline.makespan == pytest.approx(makespan)
    assert list(timeline.busy) == pytest.approx(busy)
    alone = ps.simulate(separate_pairs(schedule), costs, links)
    assert timeline.peak_activations == pytest.approx(alone.peak_activations)
    for dispatch in ("hinted", "dynamic"):
        ran = ps.simulate(schedule, costs, links, dispatch=dispatch)
        executed = ran.executed()
        ps.check(executed)  # pairs among others stay side by side, whatever the rank runs when
        assert all(a <= b + 1e-9 for a, b in zip(ran.peak_activations, timeline.peak_activations, strict=True))


@settings(max_examples=examples(25), deadline=None)
@given(paired_problems())
def test_pairs_are_joined_where_they_pay(problem: tuple[ps.Schedule, ps.Costs, ps.Links]) -> None:
    schedule, costs, links = problem
    joined = overlap_pairs(schedule, costs, links)
    ps.check(joined)
    assert separate_pairs(joined) == separate_pairs(schedule)
    alone = ps.simulate(separate_pairs(schedule), costs, links).makespan
    assert ps.simulate(joined, costs, links).makespan <= alone


def test_dualpipe_is_shorter_with_its_pairs() -> None:
    """Two ranks, six microbatches: 370 ms one after the other; the pairs of 17.4 ms instead of 30 make it 284.4."""
    costs = costs_of(4)
    alone, schedule = ps.build("dualpipe-v", 2, 6), ps.build("dualpipe-v", 2, 6, overlap=True)
    assert ps.simulate(alone, costs).makespan == 370
    assert ps.simulate(schedule, costs).makespan == pytest.approx(284.4)
    assert ps.simulate(overlap_pairs(alone, costs), costs).makespan <= ps.simulate(schedule, costs).makespan


def test_passes_keep_pairs_or_refuse_them_by_name() -> None:
    schedule, costs = ps.build("dualpipe-v", 2, 6, overlap=True), costs_of(4)
    twice = ps.passes.repeat_windows(schedule, 2)
    assert len(twice.pairs) == 2 * len(schedule.pairs)
    turned = ps.passes.reorder_microbatches(schedule, [5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0])
    assert len(turned.pairs) == len(schedule.pairs)
    for each in (
        twice,
        turned,
        ps.passes.separate_gradients(schedule, costs),
        ps.passes.recompute(schedule, replace(costs, kept_by_recompute=0.1), 5),
        ps.passes.add_reductions(schedule),
        ps.schedule.with_updates(schedule, 2),
    ):
        ps.check(each)
        assert len(each.pairs) >= len(schedule.pairs)
    with pytest.raises(ps.ScheduleError, match=r"14 pairs .* order_microbatches times ops that run by themselves"):
        ps.planning.order_microbatches(schedule, replace(costs, uneven=[1, 2, 1, 2, 1, 3]))


# ---- running


@pytest.mark.parametrize("dispatch", ["frozen", "hinted", "dynamic"])
@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe", "1f1b", "interleaved-1f1b", "chimera"])
def test_pairs_train_like_the_plain_loop(name: str, dispatch: str) -> None:
    schedule = ps.build(name, 4, 8) if "dualpipe" not in name else ps.build(name, 4, 8, overlap=True)
    schedule = schedule if schedule.pairs else overlap_pairs(schedule)
    assert schedule.pairs
    assert wrong(schedule, dispatch) == []


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_without_its_pairs_a_schedule_gives_the_same_numbers(data: st.DataObject) -> None:
    schedule = data.draw(library_schedules(max_ranks=4, max_microbatches=6).filter(lambda s: s.updates is None))
    schedule = data.draw(paired(schedule))
    dispatch = data.draw(st.sampled_from(["frozen", "hinted", "dynamic"]))
    assert wrong(schedule, dispatch) == []
    assert wrong(separate_pairs(schedule), dispatch) == []


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_emulated_ranks_run_a_pair_for_its_time(dispatch: str) -> None:
    schedule, costs = ps.build("dualpipe-v", 2, 4, overlap=True), costs_of(4)
    run = ps.emulate(schedule, costs, dispatch=dispatch)
    (timeline,), (simulated,) = run.timelines, run.simulated
    assert simulated.makespan == ps.simulate(schedule, costs).makespan
    assert timeline.executed() == schedule or dispatch != "frozen"
    ps.check(timeline.executed())
    backend = EmulatedBackend(wire(schedule), costs)
    for forward, backward in schedule.pairs:
        assert (backend._duration(forward), backend._duration(backward)) == (17_400_000, 0)
    assert timeline.makespan >= simulated.makespan * (1 - 1e-6)
