"""Any program that has to come out does: proved, timed as it was made, under its limits, however it is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.dispatch.queues import Lister
from penstock.formats import native
from penstock.program import Traversal
from penstock.schedule import peak_in_flight
from strategies import times
from tiers import examples


@st.composite
def any_placements(draw: st.DrawFn) -> ps.Placement:
    """1 to 3 pipelines of 1 to 6 stages over up to 4 ranks, all of them used; sometimes a shared stage."""
    num_pipelines, num_stages = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages)
    table = draw(st.lists(row, min_size=num_pipelines, max_size=num_pipelines))
    number = {rank: i for i, rank in enumerate(sorted({rank for ranks in table for rank in ranks}))}
    table = [[number[rank] for rank in ranks] for ranks in table]
    if len(number) > 1 and draw(st.booleans()):
        stage = draw(st.integers(0, num_stages - 1))
        ranks = draw(st.permutations(range(len(number))))[: draw(st.integers(2, len(number)))]
        for ranks_of_stages in table:
            ranks_of_stages[stage] = ranks[0]
        placement = ps.Placement(tuple(map(tuple, table)), ((stage, tuple(ranks)),))
        assume(all(placement.stages_of(rank) for rank in range(len(number))))
        return placement
    return ps.placements.table(table)


@st.composite
def traversals(draw: st.DrawFn, strict: bool) -> Traversal:
    pick = draw(
        st.sampled_from([ps.breadth_first, ps.depth_first, ps.program.earliest_first, ps.program.by_microbatch])
    )
    if pick in (ps.program.earliest_first, ps.program.by_microbatch):
        return pick(deepest_first=draw(st.booleans()))
    return pick(draw(st.none() | st.integers(1, 4)), strict=strict and draw(st.booleans()))


@dataclass(frozen=True)
class Case:
    """A program and what holds for it: the most that each rank may have in flight, and in memory."""

    program: ps.Program
    in_flight: list[float]
    memory: float


def least(placement: ps.Placement, rank: int, weight: Any) -> float:
    """What a rank must be let hold so that some forward can pass: its own, and that of one stage deeper at a time
    on any of the ranks that run it."""

    def need(pipeline: int, stage: int) -> float:
        deeper = [
            need(k, later)
            for host in placement.hosts(pipeline, stage)
            for k in range(placement.num_pipelines)
            for later in range(stage + 1, placement.num_stages)
            if host in placement.hosts(k, later)
        ]
        return float(weight(stage) + max(deeper, default=0))

    pipelines, stages = range(placement.num_pipelines), range(placement.num_stages)
    return max(need(k, stage) for k in pipelines for stage in stages if rank in placement.hosts(k, stage))


@st.composite
def cases(draw: st.DrawFn, strict: bool = False) -> Case:
    """Programs that must come out; with `strict` also rules and warm-ups under which the ranks may get stuck."""
    one_to_one = draw(st.booleans())
    placement = ps.placements.one_to_one(draw(st.integers(1, 4))) if one_to_one else draw(any_placements())
    num_ranks, num_stages = ps.program.placements.num_ranks_of(placement), placement.num_stages
    num = draw(st.integers(1, 7))
    ranks = range(num_ranks)

    row = st.lists(times(), min_size=num_stages, max_size=num_stages)
    kept = draw(st.lists(st.integers(1, 4), min_size=num_stages, max_size=num_stages))
    costs = ps.Costs(draw(row), draw(row), draw(row), [], kept, draw(st.sampled_from([0.0, 0.5, 1.0])))
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    links = ps.Links(draw(st.dictionaries(st.sampled_from(pairs), times(40), max_size=3)) if pairs else {})

    caps = [float("inf")] * num_ranks
    limits: dict[str, Any] = {}
    if draw(st.booleans()):
        caps = [least(placement, rank, lambda _: 1) + draw(st.integers(0, 3)) for rank in ranks]
        limits["max_in_flight"] = caps
    memory = float("inf")
    if draw(st.booleans()):
        memory = max(least(placement, rank, lambda s: kept[s]) for rank in ranks) + draw(st.integers(0, 4))
        limits["memory_limit"] = memory
    if one_to_one and "memory_limit" not in limits:
        counts = [draw(st.integers(0, int(min(cap, num)))) for cap in caps]
        if strict:
            limits["warmup"] = counts
        else:
            limits["warmup"] = [min(counts[: rank + 1]) for rank in ranks]

    rules = ps.Rules(
        draw(st.sampled_from(["backward-first", "forward-first", "interleaved"])),
        units=(draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        strict=strict and draw(st.booleans()),
        forward=draw(traversals(strict)),
        backward=draw(traversals(strict)),
        patience=draw(st.sampled_from([0.0, 0.0, 1.0, 10.0])),
        **limits,
    )
    in_turn = st.just(None)
    pipelines = st.lists(st.integers(0, placement.num_pipelines - 1), min_size=num, max_size=num)
    program = ps.Program(
        placement,
        num,
        rules,
        split=draw(st.sampled_from([False, True, lambda stage: stage % 2 == 0])),
        costs=costs,
        links=links,
        pipelines=draw(in_turn | pipelines),
    )
    return Case(program, caps, memory)


def holds(case: Case) -> None:
    """All that is promised of a program that comes out."""
    program = case.program
    schedule = program.build()
    ps.check(schedule)
    assert all(held <= cap for held, cap in zip(peak_in_flight(schedule), case.in_flight, strict=True))

    graph = program.queues()
    plain = Lister(graph, compile=False).list_by_rules(program.tables(graph))
    fast = Lister(graph, compile=True).list_by_rules(program.tables(graph))
    assert plain.copy_rows() == fast.copy_rows()
    assert list(fast.start_time) == plain.start_time
    assert plain.schedule("program").order == schedule.order

    timeline = ps.simulate(schedule, program.all_costs, links=program.links or ps.Links())
    assert plain.makespan == pytest.approx(timeline.makespan, rel=1e-9)
    assert max(timeline.peak_activations) <= case.memory * (1 + 1e-9)

    stepped = ps.program.Stepper(program)
    steps = list(stepped)
    assert stepped.schedule().order == schedule.order
    assert [step.time for step in steps] == sorted(step.time for step in steps)
    assert all(step.chosen is None or step.chosen in step.ready for step in steps)


@pytest.mark.slow
@settings(max_examples=examples(120), deadline=None)
@given(cases())
def test_any_program_comes_out_proved_and_timed_as_it_was_made(case: Case) -> None:
    holds(case)


@settings(max_examples=examples(80), deadline=None)
@given(cases(strict=True))
def test_strict_rules_come_out_or_say_that_they_deadlock(case: Case) -> None:
    stuck: ps.ScheduleError | None = None
    try:
        case.program.build()
    except ps.ScheduleError as error:
        stuck = error
    if stuck is None:
        holds(case)
    else:
        assert stuck.rule == "deadlock"
        assert "no rank can go on" in str(stuck)


@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_a_function_that_allows_everything_changes_nothing(case: Case) -> None:
    """The user's functions take the uncompiled path and are asked at every decision."""
    # Who is held back by the cap of another rank of a shared stage is asked again sooner where functions are.
    assume(not case.program.placement.shared)
    plain = case.program.build()
    rules = case.program.rules
    assert isinstance(rules, ps.Rules)
    asked: list[ps.Op] = []

    def check(view: ps.program.View, op: ps.Op) -> bool:
        assert view.ready_since(op) <= view.time
        assert op in view.upcoming()
        assert not view.has_run(op)
        asked.append(op)
        return True

    program = replace(case.program, rules=replace(rules, check=check))
    assert program.build().order == plain.order
    assert set(asked) == {op for row in plain.order for op in row}


@st.composite
def with_gathers(draw: st.DrawFn) -> ps.Program:
    """Branches of their own placements, microbatches and rules, joined by a gather every few microbatches."""
    groups = draw(st.integers(1, 3))
    branches, after, before = {}, {}, {}
    for name in ("image", "text", "audio")[: draw(st.integers(1, 3))]:
        ranks, chunk = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        shape = draw(st.sampled_from(["one-to-one", "circular", "v", "shared"]))
        placement = {
            "one-to-one": ps.placements.one_to_one(ranks),
            "circular": ps.placements.circular(ranks, 2 * ranks),
            "v": ps.placements.v_shape(ranks),
            "shared": ps.placements.shared_ends(ps.placements.one_to_one(ranks)),
        }[shape]
        rules = ps.Rules(
            draw(st.sampled_from(["backward-first", "forward-first", "interleaved"])),
            forward=draw(traversals(strict=False)),
            backward=draw(traversals(strict=False)),
        )
        branches[name] = ps.Branch(placement, groups * chunk, rules)
        after["F", (name, -1)] = chunk
        before["B", (name, -1)] = chunk
    ends = tuple((name, -1) for name in branches)
    gather = ps.NewOp(
        "GATHER",
        ends[0],
        after,
        before,
        on=ends,
        time=draw(times(5)),
        memory=draw(st.integers(0, 2)),
        last=draw(st.booleans()),
    )
    freed = ps.NewOp("FREE", ends[0], after={("GATHER", ends[0]): 1}, memory=-gather.memory, last=draw(st.booleans()))
    num_ranks = sum(ps.program.placements.num_ranks_of(branch.placement) for branch in branches.values())
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    links = ps.Links(draw(st.dictionaries(st.sampled_from(pairs), times(20), max_size=3)) if pairs else {})
    return ps.Program.of_branches(branches, split=draw(st.booleans()), ops=[gather, freed], links=links)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(with_gathers())
def test_branches_with_registered_ops_come_out_and_go_round_through_text_and_json(program: ps.Program) -> None:
    schedule = program.build()
    ps.check(schedule)
    graph = program.queues()
    for compile in (False, True):
        listed = Lister(graph, compile=compile).list_by_rules(program.tables(graph))
        assert listed.schedule("program").order == schedule.order
        timeline = ps.simulate(schedule, program.all_costs, links=program.links or ps.Links())
        assert listed.makespan == pytest.approx(timeline.makespan, rel=1e-9)
    assert ps.program.Stepper(program).run().order == schedule.order
    assert ps.parse(str(schedule)) == schedule
    assert native.from_json(native.to_json(schedule)) == schedule
