"""Simulations obey what they were given: order, dependencies, delays, memory, and bounds on the makespan."""

from __future__ import annotations

import random
from importlib import import_module
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from in_python import in_python
from penstock.dispatch import Dispatch, Dispatcher, Policy, lower
from penstock.schedule import Op
from penstock.simulation.lowered import frozen_caps, memory_changes
from strategies import library_schedules, problems
from tiers import examples

pytestmark = pytest.mark.property

simulator = import_module("penstock.simulation.simulator")  # ps.simulate is the function

QUICK = settings(deadline=None, max_examples=examples(120))
DISPATCH = st.sampled_from([*map(str, Dispatch), "hinted:0.5", "hinted:1", "auto"])
ANY_READY = st.sampled_from([each for each in Dispatch if each.is_dynamic])
TRANSPORT = st.just("decoupled") | st.integers(1, 3).map(ps.Blocking)
ROUNDING = 1e-6

Problem = tuple[ps.Schedule, ps.Costs, ps.Links]


def needs(schedule: ps.Schedule, op: Op) -> list[Op]:
    """What `op` waits for, in the design's words."""
    kind, stage, m = op
    if kind == "W":
        return [Op("I", stage, m)]
    if kind == "F":
        return [Op("F", stage - 1, m)] if stage else []
    ops = {other for row in schedule.order for other in row}
    above = [Op(k, stage + 1, m) for k in "BI" if Op(k, stage + 1, m) in ops]
    return [Op("F", stage, m), *above]


@pytest.mark.slow
@QUICK
@given(problems(), DISPATCH, TRANSPORT)
def test_every_op_runs_once_alone_and_after_what_it_needs(problem: Problem, dispatch: str, transport: object) -> None:
    schedule, costs, links = problem
    timeline = ps.simulate(schedule, costs, links=links, dispatch=dispatch, transport=transport)
    assert sorted(t.op for t in timeline.ops) == sorted(op for row in schedule.order for op in row)
    ended = {t.op: (t.end, t.rank) for t in timeline.ops}
    for rank, row in enumerate(timeline.rows):
        assert {t.op for t in row} == set(schedule.order[rank])
        for one, other in pairwise(row):
            assert other.start >= one.end + one.blocked - ROUNDING
        for timed in row:
            assert timed.end == pytest.approx(timed.start + costs.duration(timed.op.kind, timed.op.stage))
            for needed in needs(schedule, timed.op):
                end, source = ended[needed]
                delay = 0.0 if source == rank else links.delay(source, rank)
                assert timed.start >= end + delay - ROUNDING
    for message in timeline.messages:
        delay = links.delay(message.source_rank, message.target_rank)
        assert message.arrived >= message.sent + delay - ROUNDING


@pytest.mark.slow
@QUICK
@given(problems(), DISPATCH)
def test_within_a_stage_each_kind_keeps_its_order(problem: Problem, dispatch: str) -> None:
    schedule, costs, links = problem
    timeline = ps.simulate(schedule, costs, links=links, dispatch=dispatch)
    assert len(timeline.ops) == schedule.num_ops
    for row, planned in zip(timeline.executed().order, schedule.order, strict=True):
        if dispatch == "frozen":
            assert row == planned
        for key in {(op.kind, op.stage) for op in planned}:
            assert [op for op in row if op[:2] == key] == [op for op in planned if op[:2] == key]


@pytest.mark.slow
@QUICK
@given(problems(), DISPATCH, TRANSPORT)
def test_makespan_is_at_least_its_lower_bounds(problem: Problem, dispatch: str, transport: object) -> None:
    schedule, costs, links = problem
    timeline = ps.simulate(schedule, costs, links=links, dispatch=dispatch, transport=transport)
    assert timeline.makespan >= max(timeline.busy) - ROUNDING
    assert timeline.makespan >= timeline.span - ROUNDING
    assert -ROUNDING <= timeline.bubble_ratio <= 1
    assert timeline.makespan >= round_trip(schedule, costs, links) - ROUNDING
    assert min(t.start for t in timeline.ops) == 0


def round_trip(schedule: ps.Schedule, costs: ps.Costs, links: ps.Links) -> float:
    """One microbatch down the stages and its gradient back, with every delay on the way."""
    split = schedule.splits_backward()
    hosts = [schedule.rank_of(stage, 0) for stage in range(schedule.num_stages)]
    hops = [(a, b) for a, b in pairwise(hosts) if a != b]
    total = sum(costs.f) + sum(costs.i if split else costs.b)
    return total + sum(links.delay(a, b) + links.delay(b, a) for a, b in hops)


@pytest.mark.slow
@QUICK
@given(problems())
def test_a_frozen_run_is_the_longest_path(problem: Problem) -> None:
    schedule, costs, links = problem
    timeline = ps.simulate(schedule, costs, links=links)
    found = {t.op: t.start for t in timeline.ops}
    rank_of = {op: rank for rank, row in enumerate(schedule.order) for op in row}
    previous = {b: a for row in schedule.order for a, b in pairwise(row)}
    for op, start in found.items():
        earliest = 0.0
        for needed in needs(schedule, op) + ([previous[op]] if op in previous else []):
            end = found[needed] + costs.duration(needed.kind, needed.stage)
            apart = rank_of[needed] != rank_of[op]
            earliest = max(earliest, end + (links.delay(rank_of[needed], rank_of[op]) if apart else 0.0))
        assert start == pytest.approx(earliest)


@pytest.mark.slow
@QUICK
@given(problems(), st.floats(0, 8), ANY_READY)
def test_memory_stays_under_the_cap(problem: Problem, room: float, dispatch: Dispatch) -> None:
    schedule, costs, links = problem
    own = ps.simulate(schedule, costs)
    capped = ps.simulate(schedule, costs, links=links, dispatch=dispatch)
    for peak, cap in zip(capped.peak_activations, own.peak_activations, strict=True):
        assert peak <= cap * (1 + 1e-8)
    caps = [peak + room for peak in own.peak_activations]
    wider = ps.simulate(schedule, costs, links=links, dispatch=dispatch, memory_limit=caps)
    for peak, cap in zip(wider.peak_activations, caps, strict=True):
        assert peak <= cap * (1 + 1e-8)
    for timeline in (own, capped, wider):
        assert timeline.peak_activations == pytest.approx(_peaks(timeline, costs))


def _peaks(timeline: ps.Timeline, costs: ps.Costs) -> list[float]:
    peaks = []
    for row in timeline.rows:
        held = peak = 0.0
        for timed in row:
            held += costs.memory_change(timed.op.kind, timed.op.stage)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


@settings(deadline=None, max_examples=examples(200))
@given(
    library_schedules(), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 2**32), st.integers(0, 2), ANY_READY
)
def test_no_choice_ends_in_a_deadlock_whatever_comes_when(
    schedule: ps.Schedule, share: float, seed: int, room: int, dispatch: Dispatch
) -> None:
    """Ops end and messages arrive in a random order, as if every duration and delay were random."""
    rng = random.Random(seed)
    graph = lower(schedule)
    changes = memory_changes(graph, ps.Costs.uniform(schedule.num_stages, freed_by_input=share))
    caps = [cap + room for cap in frozen_caps(graph, changes)]
    deciders = [Dispatcher(graph, r, dispatch, changes, caps[r]) for r in range(graph.num_ranks)]
    running: dict[int, int] = {}
    travelling: list[int] = []
    while True:
        for rank in rng.sample(range(graph.num_ranks), graph.num_ranks):
            op = None if rank in running else deciders[rank].next()
            if op is not None:
                running[rank] = op
                assert deciders[rank].held <= caps[rank] * (1 + 1e-8)
        if not running and not travelling:
            break
        if travelling and (not running or rng.random() < 0.5):
            op = travelling.pop(rng.randrange(len(travelling)))
            deciders[graph.rank[op]].arrive(op)
        else:
            rank = rng.choice(list(running))
            op = running.pop(rank)
            deciders[rank].finish(op)
            travelling += [s for s in graph.successors(op) if graph.rank[s] != rank]
    assert all(decider.finished for decider in deciders), f"stuck, seed {seed}\n{schedule}"


@pytest.mark.slow
@QUICK
@given(problems(), st.sampled_from([1.0, 1.5, 4.0]))
def test_no_op_starts_later_than_in_the_frozen_run_where_ranks_wait_for_what_they_would_run_into(
    problem: Problem, wait: float
) -> None:
    schedule, costs, links = problem
    frozen = {(t.rank, t.op): t.start for t in ps.simulate(schedule, costs, links=links).ops}
    for timed in ps.simulate(schedule, costs, links=links, dispatch=Policy(Dispatch.HINTED, wait)).ops:
        assert timed.start <= frozen[timed.rank, timed.op] + ROUNDING


@pytest.mark.slow
@QUICK
@given(problems(), TRANSPORT)
def test_auto_is_never_slower_than_frozen(problem: Problem, transport: object) -> None:
    schedule, costs, links = problem
    frozen, auto = (
        ps.simulate(schedule, costs, links=links, dispatch=each, transport=transport) for each in ("frozen", "auto")
    )
    assert auto.makespan <= frozen.makespan * (1 + 1e-9)


@pytest.mark.slow
@QUICK
@given(problems(), DISPATCH, TRANSPORT)
def test_simulation_is_deterministic(problem: Problem, dispatch: str, transport: object) -> None:
    schedule, costs, links = problem
    runs = [ps.simulate(schedule, costs, links=links, dispatch=dispatch, transport=transport) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.slow
@QUICK
@given(problems())
def test_a_frozen_run_is_never_slower_with_deeper_or_decoupled_links(problem: Problem) -> None:
    """True of frozen orders, whose waits only ever add up; a dynamic run may be lured by an early message."""
    schedule, costs, links = problem
    spans = [
        ps.simulate(schedule, costs, links=links, transport=transport).makespan
        for transport in (ps.Blocking(1), ps.Blocking(2), ps.Blocking(4), "decoupled")
    ]
    for shallow, deep in pairwise(spans):
        assert deep <= shallow + ROUNDING


@pytest.mark.slow
@QUICK
@given(problems())
def test_a_frozen_run_is_never_faster_with_a_slower_link(problem: Problem) -> None:
    schedule, costs, links = problem
    slower = ps.Links({pair: delay + 1 for pair, delay in links.delays.items()}, links.default)
    now, then = (ps.simulate(schedule, costs, links=each).makespan for each in (links, slower))
    assert then >= now - ROUNDING


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(problems(), DISPATCH, TRANSPORT)
def test_c_gives_exactly_the_same_timeline(problem: Problem, dispatch: str, transport: object) -> None:
    schedule, costs, links = problem
    with in_python():
        plain = ps.simulate(schedule, costs, links=links, dispatch=dispatch, transport=transport)
    assert ps.simulate(schedule, costs, links=links, dispatch=dispatch, transport=transport) == plain
