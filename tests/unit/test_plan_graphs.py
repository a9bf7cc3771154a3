"""Plans of stages that branch and join, and of stages and registered ops that several ranks run together."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import branches_runs
import gang_runs
import penstock as ps
from penstock.planning import exact
from penstock.planning.graph import search as searches
from penstock.planning.graph import sequence as sequences
from penstock.planning.graph.problem import pose_graph
from penstock.planning.graph.search import placements_of
from penstock.planning.metropolis import Cooling
from penstock.planning.options import limits_of
from tiers import others_nightly

TOWERS = ps.schedule.StageGraph(5, ((0, 1), (1, 4), (2, 3), (3, 4)))


@pytest.mark.parametrize("family", others_nightly(range(8), range(0, 8, 2)))
def test_bounds_and_plans_beside_the_exact_solver(family: int) -> None:
    pytest.importorskip("ortools", reason="needs the extra `exact`")
    from proof_cases import GRAPHS, draw_graph, judge_graph

    for seed in (1000, 1001, 1002):
        verdict = judge_graph(draw_graph(seed, GRAPHS[family]), 0.05, 10.0)
        assert not verdict.wrong, (seed, GRAPHS[family])
        assert verdict.solved.value is not None


def test_the_least_makespan_is_asked_for_within_caps() -> None:
    pytest.importorskip("ortools", reason="needs the extra `exact`")
    costs = ps.Costs([2, 3, 3, 4, 3], [2, 3, 4, 3, 3], [1, 2, 2, 3, 2])
    (placement, *_) = placements_of(costs, TOWERS, 3)
    limits = limits_of(costs, None, 3, 6, None, True)
    problem = pose_graph(costs, placement, 3, 8, ps.Links(), limits, True, TOWERS, counted=True)
    search = searches.begin(problem, [(problem.serial(), "serial")], (), 0.0, 0, 0.0, None, time.perf_counter())
    serial = search.value
    exact.lessen(search, 20.0)
    assert search.lower_bound <= search.value < 0.8 * serial
    assert search.how == "exact"
    assert problem.placed(search.sequence)[0] == search.value  # below 0 where a row is above its cap


@pytest.mark.parametrize("name", branches_runs.GRAPHS)
def test_a_plan_of_branches_runs_as_the_plain_loop(name: str) -> None:
    graph = branches_runs.GRAPHS[name]
    costs = ps.Costs.uniform(graph.num_stages, f=10, i=10, w=10)
    planned = ps.plan(costs, 3, branches_runs.NUM, stages=graph, max_in_flight=16, time_limit=0.2)
    assert planned.schedule.stage_graph == graph
    assert not branches_runs.wrong(name, exact=name in branches_runs.EVEN, schedule=planned.schedule)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plan_of_towers_and_gathers_is_run(asynchronous: bool) -> None:
    program = gang_runs.towers(asynchronous, split=True)
    planned = ps.plan(
        program.all_costs, 4, gang_runs.NUM, placement=program.placement, stages=program.stage_graph, time_limit=0.2
    )
    assert planned.makespan <= ps.simulate(program.build(), program.all_costs).makespan
    steps, timeline = gang_runs.train_towers(program, planned.schedule)
    assert not gang_runs.differences(gang_runs.plain_towers(), steps)
    assert timeline.executed() == planned.schedule


def test_own_ops_that_no_stage_graph_has_are_not_left_out_without_a_word() -> None:
    program = ps.Program(ps.placements.one_to_one(2), 4, ops=[ps.NewOp("LOOK", 1, {("F", 1): 2}, time=50.0)])
    with pytest.raises(ps.CostError, match="times of LOOK, and the plan would have no such ops: give stages= and"):
        ps.plan(program.all_costs, 2, 4)
    kept = ps.plan(program.all_costs, 2, 4, placement=program.placement, stages=program.stage_graph, time_limit=0.1)
    assert sum(op.kind == "LOOK" for row in kept.schedule.order for op in row) == 2
    assert kept.makespan > 100.0


def test_a_plan_of_shared_stages_is_run() -> None:
    library = ps.build("mllm", gang_runs.NUM_RANKS, gang_runs.NUM)
    costs = ps.Costs([2, 3, 3, 4, 3, 1], [2, 3, 4, 3, 3, 1], [1, 2, 2, 3, 2, 1])
    planned = ps.plan(
        costs, gang_runs.NUM_RANKS, gang_runs.NUM, placement=library.placement, max_in_flight=12, time_limit=0.3
    )
    plain = gang_runs.train_gpt(ps.build("gpipe", gang_runs.NUM_RANKS + 2, gang_runs.NUM), False, False)
    shared = gang_runs.train_gpt(planned.schedule, False, False)
    assert not gang_runs.differences(plain[0], shared[0], exact=True)
    assert plain[1] == shared[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_ranks", "num"), [(4, 8), (5, 6)])
def test_no_worse_than_distmm_in_its_memory(overlap: bool, num_ranks: int, num: int) -> None:
    library = ps.build("distmm", num_ranks, num, overlap=overlap)
    assert library.stage_graph is not None
    at = library.stage_graph.registered[0].stage
    costs = ps.Costs.uniform(num_ranks, f=10, i=10, w=10).with_other({("GATHER", at): (7.0, 0.0)})
    timed = ps.simulate(library, costs)
    planned = ps.plan(
        costs, num_ranks, num, placement=library.placement, stages=library.stage_graph,
        max_in_flight=timed.peak_activations, time_limit=0.01,
    )  # fmt: skip
    assert planned.lower_bound <= planned.makespan <= timed.makespan
    assert all(
        held <= most for held, most in zip(planned.timeline.peak_activations, timed.peak_activations, strict=True)
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("split", [None, False])
def test_no_worse_than_mllm_in_its_memory(num_ranks: int, split: bool | None) -> None:
    """B here takes less than I and W, so a plan that is left the choice is no worse than the library's whole one."""
    library = ps.build("mllm", num_ranks, 7)
    stages = num_ranks + 2
    costs = ps.Costs([1.0] * stages, [2.0] * stages, [2.0] * stages, b=[3.0] * stages)
    timed = ps.simulate(library, costs)
    planned = ps.plan(
        costs, num_ranks, 7, placement=library.placement, max_in_flight=timed.peak_activations, split=split,
        time_limit=0.01,
    )  # fmt: skip
    assert planned.lower_bound <= planned.makespan <= timed.makespan


def test_where_no_placement_is_given_the_best_of_several_is_taken() -> None:
    costs = ps.Costs.uniform(5, f=10, i=10, w=10)
    places = placements_of(costs, TOWERS, 2)
    chosen = ps.plan(costs, 2, 8, stages=TOWERS, time_limit=0.4)
    assert chosen.certificate.placement in places
    values = [ps.plan(costs, 2, 8, stages=TOWERS, placement=place, time_limit=0.1).makespan for place in places]
    assert chosen.makespan == min(values)
    for place in places:
        assert {rank for row in place.pipelines for rank in row} == {0, 1}


@pytest.mark.parametrize("seed", range(10))
def test_moves_keep_every_op_behind_what_it_needs(seed: int) -> None:
    """As the moves stand, uncompiled: what the walk ends with is a sequence within the caps, of the time it says."""
    source = random.Random(seed)
    costs = ps.Costs(*[[float(source.randint(1, 9)) for _ in range(5)] for _ in range(3)])
    placement = ps.Placement(((0, 1, 1, 0, 0),), shared=((4, (0, 1)),))
    limits = limits_of(costs, None, 2, 8, None, True)
    posed = pose_graph(costs, placement, 2, 4, ps.Links({(0, 1): 3.0}), limits, True, TOWERS, True)
    now, best = np.array(posed.serial()), np.array(posed.serial())
    before = posed.placed(now)[0]
    np.random.seed(seed)
    spaces = [posed.space() for _ in range(2)]
    cooling = Cooling(300, 5.0, 0.5, 0.0, np.zeros(1, np.int64))
    made, moved = sequences.walk(posed.network, posed.more, now, np.empty_like(now), *spaces, before, best, cooling)
    assert moved == 300
    assert made < before
    assert posed.placed(best)[0] == made
    assert posed.placed(now)[0] >= made
    ps.check(posed.schedule(best, "walked", 8))


def test_what_cannot_be_planned_is_refused() -> None:
    costs = ps.Costs.uniform(5)
    holding = ps.schedule.StageGraph(
        5, TOWERS.edges, registered=(ps.schedule.Registered("OFFLOAD", 0, 4, asynchronous=True, holds=-1.0),),
        needs=(ps.schedule.Needs(("F", 0), ("OFFLOAD", 0)),),
    )  # fmt: skip
    few = ps.schedule.StageGraph(
        5,
        TOWERS.edges,
        registered=(ps.schedule.Registered("GATHER", 0, 2),),
        needs=(ps.schedule.Needs(("F", 0), ("GATHER", 0), 3),),
    )
    paired = ps.schedule.StageGraph(
        5, TOWERS.edges, registered=(ps.schedule.Registered("GATHER", 0, 2),),
        needs=(ps.schedule.Needs(("F", 0), ("GATHER", 0), pairs=((3, 0),)),),
    )  # fmt: skip
    everyone = ps.Placement(((0, 0, 1, 1, 1),))
    for stages, options, message in (
        (holding, {}, "OFFLOAD of stage 0 is asynchronous and holds -1 activations"),
        (
            few,
            {},
            "2 ops of kind GATHER of stage 0 need 6 of kind F of stage 0, in groups of 1 and 3, but there",
        ),
        (paired, {}, "ops of kind GATHER of stage 0 are named one by one"),
        (TOWERS, {"objective": "span"}, "stages that branch are planned for the makespan of a frozen order"),
        (TOWERS, {"dispatch": "dynamic"}, "stages that branch are planned for the makespan of a frozen order"),
        (TOWERS, {"recompute": True}, "recompute=True with stages that branch"),
        (TOWERS, {"max_in_flight": 1}, "rank 1 holds 3 for one microbatch, all its stages counted, but may hold 1"),
        ("chain", {}, "stages is 'chain': give a ps.schedule.StageGraph"),
    ):
        with pytest.raises(ps.ScheduleError, match=message):
            ps.plan(costs, 2, 4, stages=stages, placement=everyone, time_limit=0.1, **options)  # type: ignore[arg-type]
    with pytest.raises(ps.ScheduleError, match="num_ranks is 0"):
        ps.plan(costs, 0, 4, stages=TOWERS)
    with pytest.raises(ps.CostError, match="the costs are for 4 stages, the stage graph has 5"):
        ps.plan(ps.Costs.uniform(4), 2, 4, stages=TOWERS)


def test_a_chain_said_as_a_graph_is_planned_as_a_chain() -> None:
    costs = ps.Costs.uniform(4, f=10, i=10, w=10)
    said = ps.plan(costs, 4, 12, ps.Links({(0, 1): 20.0}), stages=ps.schedule.StageGraph.chain(4))
    assert said.makespan == said.lower_bound == 410
    assert said.schedule.stage_graph is None
