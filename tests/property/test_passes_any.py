"""The passes on any valid schedule: branches, shared stages, several pipelines, registered ops, any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.passes import recompute, separate_gradients
from penstock.passes.separate import TimedOps
from penstock.schedule import Needs, Op, Registered, StageGraph, declare_shown_order
from penstock.schedule.dependencies import predecessors
from strategies import costs_for, library_schedules, links_for
from tiers import examples

pytestmark = pytest.mark.property

QUICK = settings(deadline=None, max_examples=examples(150))
ROUNDING = 1e-6

Problem = tuple[ps.Schedule, ps.Costs, ps.Links]


@st.composite
def wild_schedules(draw: st.DrawFn) -> ps.Schedule:
    """A valid schedule from nothing: ops in any order they can run in, one after the other, dealt to their ranks."""
    num_ranks, num_stages = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num = draw(st.integers(1, 4))
    ranks = st.integers(0, num_ranks - 1)
    pipelines = draw(
        st.lists(st.lists(ranks, min_size=num_stages, max_size=num_stages).map(tuple), min_size=1, max_size=2)
    )
    shared = ()
    if num_ranks > 1 and draw(st.booleans()):
        stage = draw(st.integers(0, num_stages - 1))
        together = tuple(draw(st.permutations(range(num_ranks)))[:2])
        pipelines = [(*chain[:stage], together[0], *chain[stage + 1 :]) for chain in pipelines]
        shared = ((stage, together),)
    graph = None
    if draw(st.booleans()):
        pairs = [(a, b) for b in range(num_stages) for a in range(b)]
        edges = tuple(sorted(draw(st.sets(st.sampled_from(pairs))))) if pairs else ()
        kinds: tuple[Registered, ...] = ()
        needs: tuple[Needs, ...] = ()
        if draw(st.booleans()):
            at = draw(st.integers(0, num_stages - 1))
            kinds = (Registered("GATHER", at, num),)
            ends = draw(st.sampled_from(["F", "B"]))
            needs = (Needs((ends, at), ("GATHER", at)),)
        graph = StageGraph(num_stages, edges, (), kinds, needs)
    pipeline_of = tuple(draw(st.integers(0, len(pipelines) - 1)) for _ in range(num))
    empty = ps.Schedule("wild", ps.Placement(tuple(pipelines), shared), ((),) * num_ranks, pipeline_of, None, graph)
    ops: list[Op] = []
    for stage in range(num_stages):
        for m in range(num):
            kinds_here = draw(st.sampled_from(["FB", "FB", "FIW", "FRB", "FRIW"]))
            ops += [Op(kind, stage, m) for kind in kinds_here]
    if graph is not None:
        ops += [Op(r.kind, r.stage, index) for r in graph.registered for index in range(r.num_ops)]
    return declare_shown_order(replace(empty, order=dealt(empty, ops, draw(st.randoms(use_true_random=False)))))


def dealt(empty: ps.Schedule, ops: list[Op], random: object) -> tuple[tuple[Op, ...], ...]:
    present = {op: index for index, op in enumerate(ops)}
    needs = {op: set(predecessors(op, empty.graph, present)) for op in ops}
    random.shuffle(ops)  # type: ignore[attr-defined]
    for chain in ("BI", "BW", "R"):  # the backwards of a stage keep one order, whichever that is
        last: dict[tuple[int, int], Op] = {}
        place = {m: number for number, m in enumerate(dict.fromkeys(op.microbatch for op in ops))}
        for op in sorted((op for op in ops if op.kind in chain), key=lambda op: place[op.microbatch]):
            queue = op.stage, empty.microbatch_pipeline[op.microbatch]
            if queue in last:
                needs[op].add(last[queue])
            last[queue] = op
    rows: list[list[Op]] = [[] for _ in empty.order]
    done: set[Op] = set()
    while len(done) < len(ops):
        ready = [op for op in ops if op not in done and needs[op] <= done]
        op = random.choice(ready)  # type: ignore[attr-defined]
        done.add(op)
        for rank in empty.hosts(op):
            rows[rank].append(op)
    return tuple(map(tuple, rows))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    schedule = draw(wild_schedules() | library_schedules(max_ranks=4, max_microbatches=8))
    costs = draw(costs_for(schedule))
    costs = replace(costs, kept_by_recompute=draw(st.sampled_from([0.0, 0.2, 1.0])), other={"GATHER": 3.0})
    return schedule, costs, draw(links_for(schedule))


def makespan(schedule: ps.Schedule, costs: ps.Costs, links: ps.Links) -> float:
    return ps.simulate(schedule, costs, links=links).makespan


def adders(schedule: ps.Schedule) -> dict[tuple[int, int], list[int]]:
    """Per rank and stage, the microbatches in the order in which they add to the weights' gradients."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank, row in enumerate(schedule.order):
        for op in row:
            if op.kind in "BW":
                found.setdefault((rank, op.stage), []).append(op.microbatch)
    return found


def rest(schedule: ps.Schedule) -> list[list[Op]]:
    """Per rank, the order of all that is no weight half."""
    return [[op._replace(kind="B") if op.kind == "I" else op for op in row if op.kind != "W"]
            for row in schedule.order]  # fmt: skip


def within(schedule: ps.Schedule, costs: ps.Costs, caps: tuple[float, ...]) -> bool:
    peaks = ps.simulate(schedule, costs).peak_activations
    return all(peak <= cap * (1 + 1e-6) + 1e-9 for peak, cap in zip(peaks, caps, strict=True))


@pytest.mark.slow
@QUICK
@given(problems())
def test_the_networks_times_are_the_simulators(problem: Problem) -> None:
    schedule, costs, links = problem
    net = TimedOps(schedule, costs, links)
    starts, end = net.earliest(net.durations)
    timeline = ps.simulate(schedule, costs, links=links)
    assert end == pytest.approx(max((t.end for t in timeline.ops), default=0.0))
    for timed in timeline.ops:
        assert starts[net.node_of[net.graph.number[timed.op]]] == pytest.approx(timed.start, abs=ROUNDING)
    latest = net.latest(net.durations, end)
    assert all(latest[node] >= starts[node] - ROUNDING for node in net.nodes)


@pytest.mark.slow
@QUICK
@given(problems(), st.none() | st.floats(1.0, 2.0))
def test_separating_is_valid_and_never_longer(problem: Problem, room: float | None) -> None:
    schedule, costs, links = problem
    own = ps.simulate(schedule, costs).peak_activations
    caps = tuple(max(peak * room, 1e-9) for peak in own) if room else None
    result = separate_gradients(schedule, costs, links, memory_limit=caps)
    ps.check(result)
    assert makespan(result, costs, links) <= makespan(schedule, costs, links) + ROUNDING
    assert rest(result) == rest(schedule)
    assert adders(result) == adders(schedule)
    assert caps is None or within(result, costs, caps)


@pytest.mark.slow
@QUICK
@given(problems(), st.floats(0.2, 1.2))
def test_recomputing_meets_the_limit_or_says_why_not(problem: Problem, share: float) -> None:
    schedule, costs, _ = problem
    limit = max(1e-6, share * max(ps.simulate(schedule, costs).peak_activations))
    caps = (limit,) * schedule.num_ranks
    result, refused = schedule, ""
    try:
        result = recompute(schedule, costs, limit)
    except ps.ScheduleError as error:
        refused = error.rule or "none"
    if refused:
        assert refused == "memory"
        assert not within(everything_recomputed(schedule), costs, caps)
        return
    ps.check(result)
    assert within(result, costs, caps)
    assert [[op for op in row if op.kind != "R"] for row in result.order] == [
        [op for op in row if op.kind != "R"] for row in schedule.order
    ]
    assert (result is schedule) == within(schedule, costs, caps)


def everything_recomputed(schedule: ps.Schedule) -> ps.Schedule:
    """An R before every backward that a rank runs alone."""
    again = {op for row in schedule.order for op in row if op.kind == "R"}
    rows = []
    for row in schedule.order:
        new: list[Op] = []
        for op in row:
            r = op._replace(kind="R")
            if op.kind in "BI" and r not in again and len(schedule.hosts(op)) == 1:
                new.append(r)
            new.append(op)
        rows.append(tuple(new))
    return replace(schedule, order=tuple(rows))
