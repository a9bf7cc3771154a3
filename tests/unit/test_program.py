"""The language: the papers' schedules as the page of docs/ writes them, traversals and units, branches, new ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from documents import PAGES, blocks
from penstock.formats import native
from penstock.schedule import peak_in_flight

PAGE = next(page for page in PAGES if page.stem == "papers-schedules")
SIZES = [(2, 4), (4, 8), (4, 12), (6, 12), (8, 16)]
ONE = ps.placements.one_to_one


def papers_blocks() -> list[str]:
    """The blocks of the page on the papers' schedules; the first sets p and n."""
    return [block.text for block in blocks(PAGE) if block.language == "python"]


def papers_programs(p: int, n: int) -> dict[str, ps.Program]:
    """The page's programs for p ranks and n microbatches, by name."""
    space: dict[str, Any] = {}
    setting, *rest = papers_blocks()
    assert "p, n = 4, 8" in setting
    exec(setting.replace("p, n = 4, 8", f"p, n = {p}, {n}"), space)
    found: dict[str, ps.Program] = {}
    for text in rest:
        exec(text, space)
        for variable, value in space.items():
            if isinstance(value, ps.Program) and value not in found.values():
                found[variable if value.name == "program" else value.name] = value
    return found


def stage_times(schedule: ps.Schedule) -> ps.Costs:
    return ps.Costs.uniform(schedule.num_stages)


SAME_ORDER = (
    "gpipe", "1f1b", "interleaved-1f1b", "chimera", "hanayo", "bitpipe", "vchimera", "zb-h1", "zb-h2", "amdp", "mllm",
    "distmm",
)  # fmt: skip
OTHERS = ("zb-v", "v-half", "v-min", "t-1f1b", "all-forwards", "mixed")


def test_each_takes_at_most_eight_lines() -> None:
    for text in papers_blocks():
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= 8, text
        assert max(map(len, lines)) <= 118


def test_the_page_has_them_all() -> None:
    assert set(papers_programs(4, 8)) == {*SAME_ORDER, *OTHERS}


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_the_papers_schedules_are_the_librarys(p: int, n: int) -> None:
    programs = papers_programs(p, n)
    for name in SAME_ORDER:
        if name == "zb-h2" and n < 2 * p - 1:
            continue
        made, known = programs[name].build(), ps.build(name, p, n)
        if name == "amdp" and p == 6:  # where d/2 is odd the library finds a faster way
            times = ps.Costs.uniform(p)
            assert ps.simulate(known, times).makespan < ps.simulate(made, times).makespan
        else:
            assert made.order == known.order, name
        assert (made.placement, made.microbatch_pipeline) == (known.placement, known.microbatch_pipeline)
        assert made.graph == known.graph


@pytest.mark.parametrize(("p", "n"), [*SIZES, (3, 9), (5, 10), (7, 14)])
def test_zb_v_holds_no_more_than_the_librarys_and_takes_as_long(p: int, n: int) -> None:
    made, known = v_shaped(p, n)["zb-v"].build(), ps.build("zb-v", p, n)
    times = stage_times(known)
    assert ps.simulate(made, times).makespan <= ps.simulate(known, times).makespan + p % 2
    assert max(peak_in_flight(made)) <= max(peak_in_flight(known))


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize(("p", "n"), [*SIZES, (3, 9), (4, 40), (5, 10)])
def test_patterns_hold_no_more_than_the_librarys_and_take_at_most_4_ms_longer(name: str, p: int, n: int) -> None:
    made, known = v_shaped(p, n)[name].build(), ps.build(name, p, n)
    times = stage_times(known)
    assert ps.simulate(made, times).makespan <= ps.simulate(known, times).makespan + 4
    assert max(peak_in_flight(made)) <= max(peak_in_flight(known))


def v_shaped(p: int, n: int) -> dict[str, ps.Program]:
    """The page's programs on V placements, which take an odd number of ranks too."""
    space: dict[str, Any] = {"ps": ps, "p": p, "n": n, "ranks": range(p)}
    for start in ("v = ", "def next_by", "def of_pattern", "k = 0"):
        exec(next(text for text in papers_blocks() if text.startswith(start)), space)
    return {space[name].name: space[name] for name in ("zb_v", "v_half", "v_min")}


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_large_embeddings_take_what_the_page_says(p: int, n: int) -> None:
    programs = papers_programs(p, n)
    times = programs["t-1f1b"].all_costs
    assert ps.simulate(programs["t-1f1b"].build(), times).makespan == 10 * n + 4 * p - 6
    assert ps.simulate(programs["all-forwards"].build(), times).makespan == 8 * n + 4 * (p - 1)
    assert ps.simulate(ps.build("mllm", p, n), times).makespan == 8 * n + 4 * (p - 1)
    own = ps.Costs([1] * (p + 2), [1] * (p + 2), [1] * (p + 2), activation=[0, *[1] * p, 0])
    for rank, held in enumerate(ps.simulate(programs["t-1f1b"].build(), own).peak_activations):
        assert held <= p - rank


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_mixed_modalities_run_side_by_side(p: int, n: int) -> None:
    program = papers_programs(p, n)["mixed"]
    made = program.build()
    assert round_trips(made)
    joint = {p - 1, 2 * p - 1}
    for rank, row in enumerate(made.order):
        assert [op.microbatch for op in row if op.kind == "GATHER"] == (list(range(n)) if rank in joint else [])
    # The forwards of the first modality go round by round as interleaved 1F1B's do.
    known = ps.build("interleaved-1f1b", p, n)
    for rank in range(p):
        assert [op for op in made.order[rank] if op.kind == "F"][: 2 * p] == [
            op for op in known.order[rank] if op.kind == "F"
        ][: 2 * p]
    assert all(held <= p - rank for rank, held in enumerate(peak_in_flight(made)[p:]))
    # A gather that overlaps computation: the link between its ranks is late, and they go on meanwhile.
    later = ps.Links({(p - 1, 2 * p - 1): 1.0})
    free = ps.Program.of_branches(
        {"one": branch_of(program, "one", p, n), "two": branch_of(program, "two", p, n)},
        ops=[ps.NewOp("GATHER", op.stage, op.after, op.before, op.on) for op in program.ops],
        links=later,
    )
    assert (
        ps.simulate(free.build(), free.all_costs, links=later).makespan
        <= ps.simulate(made, program.all_costs).makespan
    )


def branch_of(program: ps.Program, name: str, p: int, n: int) -> ps.Branch:
    first, num = program.branches[name]
    ranks = [rank - (0 if name == "one" else p) for rank in program.placement.pipelines[0][first : first + num]]
    own = [program.rules_of(rank + (0 if name == "one" else p)) for rank in range(p)]
    rules = ps.Rules(
        own[0].kinds,
        forward=own[0].forward,
        backward=own[0].backward,
        warmup=[r.warmup_of(0, 1) for r in own],
        max_in_flight=[r.cap_of(0, 1) for r in own],
    )
    return ps.Branch(ps.Placement((tuple(ranks),)), n, rules)


def round_trips(schedule: ps.Schedule) -> bool:
    return ps.parse(str(schedule)) == schedule == native.from_json(native.to_json(schedule))


def grid(program: ps.Program) -> str:
    """The rows of a program's schedule."""
    return "\n".join(line for line in str(program.build()).splitlines() if line.startswith("rank "))


def expect(program: ps.Program, rows: str) -> None:
    assert grid(program) == "\n".join(line.strip() for line in rows.strip().splitlines())


# fmt: off
@pytest.mark.parametrize(
    ("kinds", "units", "rows"),
    [
        ("backward-first", (1, 1), """
            rank 0 | F0 F1 F2 F3 F4 B0 B1 F5 B2 B3 .  B4 .  B5
            rank 1 | .  F0 F1 B0 B1 F2 B2 F3 B3 F4 B4 F5 B5"""),
        ("backward-first", (2, 1), """
            rank 0 | F0 F1 F2 F3 F4 B0 B1 F5 B2 B3 .  .  B4 B5
            rank 1 | .  F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5"""),
        ("backward-first", (1, 2), """
            rank 0 | F0 F1 F2 F3 F4 B0 B1 F5 B2 B3 .  B4 .  B5
            rank 1 | .  F0 F1 B0 B1 F2 B2 F3 B3 F4 B4 F5 B5"""),
        ("forward-first", (1, 2), """
            rank 0 | F0 F1 F2 F3 F4 F5 .  .  B0 B1 B2 B3 B4 B5
            rank 1 | .  F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5"""),
        ("interleaved", (1, 1), """
            rank 0 | F0 F1 F2 F3 F4 B0 F5 B1 B2 .  B3 .  B4 B5
            rank 1 | .  F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"""),
        ("interleaved", (2, 1), """
            rank 0 | F0 F1 F2 F3 F4 B0 F5 B1 .  .  B2 B3 B4 B5
            rank 1 | .  F0 F1 B0 F2 F3 B1 F4 F5 B2 B3 B4 B5"""),
        ("interleaved", (1, 2), """
            rank 0 | F0 F1 F2 F3 F4 B0 B1 F5 B2 B3 .  B4 .  B5
            rank 1 | .  F0 F1 B0 B1 F2 B2 F3 B3 F4 B4 F5 B5"""),
    ],
)
def test_kinds_and_units(kinds: str, units: tuple[int, int], rows: str) -> None:
    expect(ps.Program(ONE(2), 6, ps.Rules(kinds, units=units, warmup=[3, 2])), rows)


FORWARDS = {
    "breadth_first()": (ps.breadth_first(), """
        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1 | .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3"""),
    "breadth_first(2)": (ps.breadth_first(2), """
        rank 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3 .   .   2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1 | .   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3"""),
    "breadth_first(3)": (ps.breadth_first(3), """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 0F3 .   2F3 2B0 .   2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 1F3 3B0 3F3 3B1 3B2 3B3 1B0 1B1 1B2 1B3"""),
    "depth_first()": (ps.depth_first(), """
        rank 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3 .   .   2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1 | .   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3"""),
    "depth_first(1)": (ps.depth_first(1), """
        rank 0 | 0F0 0F1 2F0 0F2 2F1 0F3 2F2 2F3 .   .   2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1 | .   1F0 1F1 3F0 1F2 3F1 1F3 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3"""),
}
BACKWARDS = {
    "breadth_first()": (ps.breadth_first(), """
        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3
        rank 1 | .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 1B0 1B1 3B2 3B3 1B2 1B3"""),
    "depth_first()": (ps.depth_first(), """
        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1 | .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3"""),
    "depth_first(1)": (ps.depth_first(1), """
        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   2B0 2B1 0B0 2B2 0B1 2B3 0B2 0B3
        rank 1 | .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 1B0 3B2 1B1 3B3 1B2 1B3"""),
    "depth_first(2)": (ps.depth_first(2), """
        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3
        rank 1 | .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 1B0 1B1 3B2 3B3 1B2 1B3"""),
}
# fmt: on


@pytest.mark.parametrize("name", FORWARDS)
def test_traversals_of_forwards(name: str) -> None:
    forward, rows = FORWARDS[name]
    rules = ps.Rules("forward-first", forward=forward, backward=ps.depth_first())
    expect(ps.Program(ps.placements.circular(2, 4), 4, rules), rows)


@pytest.mark.parametrize("name", BACKWARDS)
def test_traversals_of_backwards(name: str) -> None:
    backward, rows = BACKWARDS[name]
    expect(ps.Program(ps.placements.circular(2, 4), 4, ps.Rules("forward-first", backward=backward)), rows)


def test_earliest_first_and_lowest_microbatch_first() -> None:
    # Stage 0 is ready from the start; by microbatch, stage 2 comes before stage 0's later microbatches.
    placement = ps.placements.circular(2, 4)
    first_come = ps.Program(placement, 4, ps.Rules("forward-first", forward=ps.program.earliest_first()))
    lowest = ps.Program(placement, 4, ps.Rules("forward-first", forward=ps.program.by_microbatch()))
    assert grid(first_come).startswith("rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3")
    assert grid(lowest).startswith("rank 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3")


def test_strict_waits_for_the_kind_whose_turn_it_is() -> None:
    loose = ps.Program(ONE(2), 4, ps.Rules("interleaved", warmup=[2, 1]))
    strict = ps.Program(ONE(2), 4, ps.Rules("interleaved", warmup=[2, 1], strict=True))
    assert grid(loose).startswith("rank 0 | F0 F1 F2 F3 B0")
    assert grid(strict).startswith("rank 0 | F0 F1 .  B0 F2 B1 F3 B2")


def test_patience_keeps_a_weight_gradient_from_delaying_what_comes_next() -> None:
    costs = ps.Costs([3, 1], [1, 1], [4, 4])
    long_w = {p: ps.Program(ONE(2), 3, ps.Rules(patience=p), split=True, costs=costs) for p in (0.0, 2.0)}
    times = {p: ps.simulate(program.build(), costs) for p, program in long_w.items()}
    starts = {p: next(op.start for op in t.ops if op.op == ps.Op("F", 1, 1)) for p, t in times.items()}
    assert starts == {0.0: 9.0, 2.0: 6.0}


def test_a_function_of_the_stage_splits_only_some_backwards() -> None:
    schedule = ps.Program(ONE(3), 3, split=lambda stage: stage == 1).build()
    assert [{op.kind for op in row} for row in schedule.order] == [{"F", "B"}, {"F", "I", "W"}, {"F", "B"}]


def test_rules_by_rank_hold_for_that_rank_alone() -> None:
    by_rank = ps.Program(ONE(2), 4, {0: ps.Rules(max_in_flight=2), 1: ps.Rules("forward-first")}).build()
    assert peak_in_flight(by_rank) == (2, 2)
    assert by_rank.max_in_flight is None


def test_a_cap_by_stage_holds_in_each_pipeline_under_the_rules_of_its_own_rank() -> None:
    # Stage 0 is on rank 0 in one pipeline and on rank 1 in the other; only rank 1 caps it.
    placement = ps.placements.bidirectional(ONE(2))
    schedule = ps.Program(placement, 8, {1: ps.Rules(max_in_flight={0: 1})}, name="caps").build()

    def most(pipeline: int) -> int:
        held = highest = 0
        for op in schedule.order[pipeline]:
            if op.stage == 0:
                held += 1 if op.kind == "F" else -1
                highest = max(highest, held)
        return highest

    assert (most(0), most(1)) == (4, 1)


def test_costs_and_links_shape_the_order() -> None:
    late = ps.Links({(0, 1): 4.0})
    costs = ps.Costs.uniform(2)
    rules = ps.Rules(max_in_flight=6)
    known = ps.Program(ONE(2), 6, rules, split=True, costs=costs, links=late).build()
    unknown = ps.Program(ONE(2), 6, rules, split=True, costs=costs).build()
    assert known.order != unknown.order
    assert ps.simulate(known, costs, links=late).makespan <= ps.simulate(unknown, costs, links=late).makespan


def test_microbatches_go_to_the_pipelines_that_are_named() -> None:
    schedule = ps.Program(ps.placements.bidirectional(ONE(2)), 3, pipelines=[1, 1, 0]).build()
    assert schedule.microbatch_pipeline == (1, 1, 0)
    assert [op for op in schedule.order[1] if op.stage == 0 and op.kind == "F"] == [
        ps.Op("F", 0, 0),
        ps.Op("F", 0, 1),
    ]


def test_multi_directional_is_amdps() -> None:
    assert ps.placements.multi_directional(8).pipelines == (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (3, 2, 1, 0, 7, 6, 5, 4),
        (4, 5, 6, 7, 0, 1, 2, 3),
        (7, 6, 5, 4, 3, 2, 1, 0),
    )


def test_placements_compose() -> None:
    assert ps.placements.bidirectional(ps.placements.v_shape(2)).pipelines == ((0, 1, 1, 0), (1, 0, 0, 1))
    assert ps.placements.wave(2, 2).pipelines == ((0, 1, 1, 0, 0, 1, 1, 0),)
    shared = ps.placements.bidirectional(ps.placements.shared_ends(ONE(2)))
    assert shared.pipelines == ((0, 0, 1, 0), (0, 1, 0, 0))
    assert shared.shared == ((0, (0, 1)), (3, (0, 1)))


# --- branches and new ops -----------------------------------------------------------------------------------------


def test_branches_share_ranks_under_the_same_rules() -> None:
    rules = ps.Rules(max_in_flight={0: 1})
    towers = {name: ps.Branch(ONE(2), 4, rules, ranks=(0, 1)) for name in ("image", "text")}
    program = ps.Program.of_branches(towers)
    assert program.rules_of(1).max_in_flight == {0: 1, 2: 1}
    schedule = program.build()
    assert schedule.num_ranks == 2
    assert all(len(row) == 16 for row in schedule.order)
    assert peak_in_flight(schedule) == (2, 1)


def test_limits_by_stage_count_within_their_branch() -> None:
    loose, tight = ps.Branch(ONE(2), 6), ps.Branch(ONE(2), 6, ps.Rules(max_in_flight={0: 1}))
    peaks = peak_in_flight(ps.Program.of_branches({"loose": loose, "tight": tight}).build())
    assert peaks[0] > 1
    assert peaks[2:] == (1, 1)


def test_a_branch_keeps_its_shared_stages() -> None:
    shared = ps.Branch(ps.placements.shared_ends(ONE(2)), 2)
    program = ps.Program.of_branches({"plain": ps.Branch(ONE(1), 2), "shared": shared})
    assert program.placement.shared == ((1, (1, 2)), (4, (1, 2)))
    schedule = program.build()
    assert ps.Op("F", 1, 0) in schedule.order[1]
    assert ps.Op("F", 1, 0) in schedule.order[2]


def test_a_branch_feeds_another_of_fewer_larger_microbatches() -> None:
    vision = ps.Branch(ONE(1), 4, feeds=("language",))
    language = ps.Branch(ONE(2), 2)
    schedule = ps.Program.of_branches({"vision": vision, "language": language}).build()
    assert schedule.graph.edges == ((1, 2), (0, 1))
    assert schedule.graph.num_microbatches == (4, 2, 2)
    started = [op.op for op in sorted(ps.simulate(schedule).ops, key=lambda op: op.start)]
    assert started.index(ps.Op("F", 0, 1)) < started.index(ps.Op("F", 1, 0))
    assert started.index(ps.Op("B", 1, 0)) < started.index(ps.Op("B", 0, 0))
    assert round_trips(schedule)


def test_a_gather_takes_its_time_and_holds_its_memory() -> None:
    ends = (("image", -1), ("text", -1))
    tower = ps.Branch(ONE(2), 4)

    def program(time: float) -> ps.Program:
        gather = ps.NewOp(
            "GATHER",
            ends[0],
            {("F", e): 2 for e in ends},
            {("B", e): 2 for e in ends},
            on=ends,
            time=time,
            memory=8.0,
        )
        drop = ps.NewOp("DROP", ends[0], after={("GATHER", ends[0]): 1}, memory=-8.0, on=ends)
        return ps.Program.of_branches({"image": tower, "text": tower}, ops=[gather, drop])

    schedule = program(1.5).build()
    timeline = ps.simulate(schedule, program(1.5).all_costs)
    gathers = [op for op in timeline.ops if op.op.kind == "GATHER"]
    assert {(op.rank, op.op.microbatch) for op in gathers} == {(1, 0), (3, 0), (1, 1), (3, 1)}
    assert {op.end - op.start for op in gathers} == {1.5}
    assert timeline.makespan == ps.simulate(schedule, program(0).all_costs).makespan + 2 * 1.5
    peaks = timeline.peak_activations
    assert peaks[0] < 8 < peaks[1]
    assert round_trips(schedule)


def test_an_op_runs_before_everything_else_or_after() -> None:
    def rows(last: bool) -> str:
        note = ps.NewOp("NOTE", 0, after={("F", 0): 1}, last=last)
        return " ".join(map(str, ps.Program(ONE(1), 2, ps.Rules("forward-first"), ops=[note]).build().order[0]))

    assert rows(last=False) == "0F0 0NOTE0 0F1 0NOTE1 0B0 0B1"
    assert rows(last=True) == "0F0 0F1 0B0 0B1 0NOTE0 0NOTE1"


def test_ops_build_on_ops_and_on_split_backwards() -> None:
    offload = ps.NewOp("OFFLOAD", 0, after={("F", 0): 1}, memory=-0.5)
    reload_ = ps.NewOp("RELOAD", 0, after={("OFFLOAD", 0): 1, ("I", 1): 1}, before={("I", 0): 1}, memory=0.5)
    total = ps.NewOp("TOTAL", 0, after={("W", 0): 4}, on=(0, 1))
    schedule = ps.Program(ONE(2), 4, split=True, ops=[offload, reload_, total]).build()
    kinds = [op.kind for op in schedule.order[0]]
    assert (kinds.count("OFFLOAD"), kinds.count("RELOAD"), kinds.count("TOTAL")) == (4, 4, 1)
    assert kinds[-1] == "TOTAL"
    assert ps.Op("TOTAL", 0, 0) in schedule.order[1]
    first = {str(op): at for at, op in enumerate(schedule.order[0])}
    assert first["0F0"] < first["0OFFLOAD0"] < first["0RELOAD0"] < first["0I0"]
    assert round_trips(schedule)


def clipped(elsewhere: bool, split: bool = False) -> ps.Program:
    """Two stages whose gradients are clipped once after all four backwards, on their own rank or on the other one."""
    ops = [ps.NewOp("CLIP", s, after={("B", s): 4}, on=(1 - s,) if elsewhere else (), time=1) for s in range(2)]
    return ps.Program(ONE(2), 4, ops=ops, split=split)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_bug_an_op_after_the_backwards_ran_before_the_last_weight_gradients(elsewhere: bool) -> None:
    program = clipped(elsewhere)
    whole, split = program.build(), clipped(elsewhere, split=True).build()
    plan = ps.plan(program.all_costs, 2, 4, stages=whole.stage_graph, placement=whole.placement, time_limit=1)
    for schedule in (split, plan.schedule, ps.passes.separate_gradients(whole, program.all_costs)):
        timeline = ps.simulate(schedule, program.all_costs)
        clips = {timed.op.stage: timed.start for timed in timeline.ops if timed.op.kind == "CLIP"}
        ends = [(timed.end, timed.op) for timed in timeline.ops if timed.op.kind in ("B", "W")]
        assert len(ends) == 8
        assert not [op for end, op in ends if end > clips[op.stage]]
        assert round_trips(schedule)
    late = tuple(tuple(sorted(row, key=lambda op: op.kind == "W")) for row in split.order)
    if not elsewhere:
        with pytest.raises(ps.ScheduleError, match="CLIP0"):
            ps.check(replace(split, order=late))


def test_bug_the_time_that_the_costs_give_an_op_was_lost() -> None:
    costs = replace(ps.Costs.uniform(2, f=10, i=10, w=10), other={"EXCHANGE": (5.0, 0.25), ("NOTE", 0): 3.0})
    for time, memory, wanted in ((0.0, 0.0, (5.0, 0.25)), (2.0, 0.0, (2.0, 0.25)), (0.0, 0.5, (5.0, 0.5))):
        exchange = ps.NewOp("EXCHANGE", 1, {("F", 1): 2}, {("B", 1): 2}, time=time, memory=memory)
        made = ps.Program(ONE(2), 4, ops=[exchange], costs=costs).all_costs
        assert (made.duration("EXCHANGE", 1), made.memory_change("EXCHANGE", 1)) == wanted
        assert (made.duration("EXCHANGE", 0), made.duration("NOTE", 0)) == (5.0, 3.0)
    assert ps.Program(ONE(2), 4, costs=costs).all_costs == costs


def test_ops_without_groups_are_counted() -> None:
    start = ps.NewOp("START", 0, before={("F", 0): 4}, num_ops=1)
    tick = ps.NewOp("TICK", 1, num_ops=3)
    schedule = ps.Program(ONE(2), 4, ops=[start, tick]).build()
    assert schedule.order[0][0] == ps.Op("START", 0, 0)
    assert schedule.order[1][:3] == tuple(ps.Op("TICK", 1, index) for index in range(3))


# --- shared stages ------------------------------------------------------------------------------------------------


def test_a_cap_leaves_room_for_a_stage_that_another_rank_shares() -> None:
    """Rank 2 must keep room for what the shared stage 2 leads to on rank 0, or the two lock each other out."""
    placement = ps.Placement(((1, 2, 0, 0),), ((2, (0, 1, 2)),))
    with pytest.raises(
        ps.ScheduleError, match=r"rank 2 hosts stages .* needs 3 forwards there, but max_in_flight is 2"
    ):
        ps.Program(placement, 5, ps.Rules(max_in_flight=[5, 4, 2])).build()
    schedule = ps.Program(placement, 5, ps.Rules(max_in_flight=[5, 4, 3])).build()
    assert all(held <= cap for held, cap in zip(peak_in_flight(schedule), (5, 4, 3), strict=True))


def test_what_ranks_made_together_is_sent_by_the_first_that_the_placement_names() -> None:
    placement = ps.Placement(((2, 0, 1, 2),), ((0, (2, 1)),))
    links = ps.Links({(0, 1): 1.0})
    program = ps.Program(placement, 1, costs=ps.Costs.uniform(4, 0, 0, 0), links=links)
    # F0 goes from rank 2 to rank 0 at once; F1 to rank 1, B2 to rank 0 and B1 to rank 1 are late.
    assert ps.simulate(program.build(), program.all_costs, links=links).makespan == 3.0
