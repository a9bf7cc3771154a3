"""Planning placements with shared stages: bounds against exact optima, caps, errors."""

import random

import pytest

import penstock as ps
from experiments.flexpipe.flow import Block, BlockDependency, Flow
from penstock.planning import exact
from penstock.planning import plan as planner
from penstock.planning.graph.bounds import idle_bound
from penstock.planning.graph.problem import pose_graph
from penstock.planning.options import limits_of
from penstock.planning.result import Progress
from tiers import others_nightly

pytest.importorskip("ortools", reason="needs the extra `exact`")


def shared_ends(num_ranks: int) -> ps.Placement:
    everyone = tuple(range(num_ranks))
    return ps.Placement(((0, *everyone, 0),), shared=((0, everyone), (num_ranks + 1, everyone)))


def tessel_costs(num_ranks: int) -> ps.Costs:
    """F, E, H and their backwards take 1, B takes 3; embedding and head keep nothing."""
    p = num_ranks
    return ps.Costs(
        f=[1] * (p + 2), i=[0] * (p + 2), w=[0] * (p + 2), b=[1, *[3] * p, 1], activation=[0, *[1] * p, 0]
    )


def random_costs(num_stages: int, seed: int) -> ps.Costs:
    draw = random.Random(seed)
    times = [[draw.randint(4, 9) for _ in range(num_stages)] for _ in "fiw"]
    return ps.Costs(*times, freed_by_input=0.5)


def random_flow(seed: int) -> Flow:
    """Up to seven blocks over two or three ranks, some shared, on a chain with a branch here and there."""
    draw = random.Random(seed)
    num_ranks = draw.randint(2, 3)
    blocks: list[Block] = []
    for index in range(draw.randint(3, 7)):
        size = draw.choice([1, 1, 1, 2, num_ranks])
        ranks = tuple(sorted(draw.sample(range(num_ranks), size)))
        needs = {index - 1, draw.randrange(index)} if index and draw.random() < 0.3 else {index - 1} - {-1}
        if index > 1 and draw.random() < 0.2:
            needs = {draw.randrange(index)}
        delays = [draw.choice([0, 0, 2]) for _ in needs]
        blocks.append(
            Block(
                f"b{index}",
                ranks,
                draw.randint(1, 4),
                tuple(BlockDependency(n, d) for n, d in zip(sorted(needs), delays)),
            )
        )
    return Flow(
        (*blocks, Block("end", tuple(range(num_ranks))[:1], 1, tuple(BlockDependency(b) for b in range(len(blocks)))))
    )


def optimum(flow: Flow, num_turns: int) -> float:
    """The least makespan, by CP-SAT on every op, without any of the bound's ideas."""
    from exact_solver import Task, solve_tasks

    tasks, num_blocks = [], len(flow.blocks)
    for turn in range(num_turns):
        for b, block in enumerate(flow.blocks):
            needs = [(turn * num_blocks + need.block, int(need.delay)) for need in block.needs]
            needs += [((turn - 1) * num_blocks, 0)] if turn > 0 and b == 0 else []  # turns are alike
            tasks.append(Task(block.ranks, int(block.duration), tuple(needs)))
    solved = solve_tasks(tasks, [None] * flow.num_ranks, 20.0)
    assert solved.proved
    assert solved.value is not None
    return solved.value


def bound_of(flow: Flow, num_turns: int) -> float:
    blocks = flow.blocks
    needs = [[(need.block, need.delay) for need in block.needs] for block in blocks]
    size = [num_turns] * len(blocks)
    return idle_bound([block.ranks for block in blocks], [block.duration for block in blocks], size, needs)


@pytest.mark.parametrize("num_ranks", others_nightly([2, 3, 4, 8, 16], [2, 3, 4, 8]))
def test_tessels_totals_are_met_and_proved(num_ranks: int) -> None:
    num_microbatches = 3 * num_ranks
    costs = tessel_costs(num_ranks)
    plan = ps.plan(costs, num_ranks, num_microbatches, placement=shared_ends(num_ranks), split=False)
    assert plan.makespan == plan.lower_bound == 8 * num_microbatches + 4 * (num_ranks - 1)
    assert ps.simulate(plan.schedule, costs).makespan == plan.makespan
    assert ps.parse(str(plan.schedule)) == plan.schedule


@pytest.mark.parametrize("seed", range(40))
def test_bound_is_never_above_the_optimum(seed: int) -> None:
    flow = random_flow(seed)
    for num_turns in (1, 3):
        assert bound_of(flow, num_turns) <= optimum(flow, num_turns), flow


def test_waiting_and_barriers_fill_all_the_time() -> None:
    """Ops of both ranks, and between them a way to the other rank and back: the bound is the least makespan."""
    everyone = (0, 1)
    blocks = (
        Block("E", everyone, 2),
        Block("F", (0,), 1, (BlockDependency(0),)),
        Block("B", (1,), 3, (BlockDependency(1, 2.0),)),
        Block("e", everyone, 2, (BlockDependency(2),)),
    )
    flow = Flow(blocks)
    assert bound_of(flow, 1) == optimum(flow, 1) == 2 + 1 + 2 + 3 + 2
    assert bound_of(flow, 3) <= optimum(flow, 3)
    assert bound_of(flow, 3) > 3 * (2 + 3 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2, 4])
@pytest.mark.parametrize("split", [False, True])
def test_caps_are_kept(limit: int, split: bool) -> None:
    costs, placement = random_costs(5, limit), shared_ends(3)
    plan = ps.plan(costs, 3, 8, placement=placement, split=split, memory_limit=3 * limit, time_limit=0.3)
    assert max(ps.simulate(plan.schedule, costs).peak_activations) <= 3 * limit
    counted = ps.plan(costs, 3, 8, placement=placement, split=split, max_in_flight=3 * limit, time_limit=0.3)
    ps.check(counted.schedule, max_in_flight=3 * limit)
    assert counted.schedule.max_in_flight == 3 * limit
    assert counted.schedule.splits_backward() is split


@pytest.mark.slow
def test_plans_with_late_links_stages_shared_by_some_and_two_pipelines() -> None:
    links = ps.Links({(0, 1): 3.0, (2, 3): 1.5})
    for placement, num_microbatches in (
        (ps.Placement(((0, 0, 1, 2, 3, 2),), shared=((0, (0, 1)), (5, (2, 3)))), 6),
        (ps.Placement(((0, 1, 2, 3, 0), (3, 2, 1, 0, 0)), shared=((4, (0, 1, 2, 3)),)), 5),
        (ps.Placement(((0, 1, 2, 3),)), 6),
    ):
        costs = random_costs(placement.num_stages, 1)
        plan = ps.plan(costs, 4, num_microbatches, links, placement=placement, time_limit=1)
        assert ps.simulate(plan.schedule, costs, links=links).makespan == pytest.approx(plan.makespan)
        assert plan.lower_bound <= plan.makespan
        assert plan.gap < 0.5
        serial = num_microbatches * sum(costs.f) + num_microbatches * sum(costs.i)
        assert plan.makespan < serial


def test_ops_that_take_no_time_find_their_place() -> None:
    costs = ps.Costs(f=[1, 0, 2, 0, 1], i=[0, 3, 0, 1, 0], w=[0, 0, 1, 0, 0])
    placement = shared_ends(3)
    plan = ps.plan(costs, 3, 2, placement=placement, time_limit=2)
    limits = limits_of(costs, placement, 3, None, None, split=True)
    problem = pose_graph(costs, placement, 3, 2, ps.Links(), limits, split=True)
    queues = list(dict.fromkeys(problem.serial()))
    blocks = [
        Block(
            f"b{q}",
            tuple(problem.graph.hosts(q)),
            float(problem.network.duration[q]),
            tuple(BlockDependency(queues.index(source), late) for source, late, *_ in problem.needs(q)),
        )
        for q in queues
    ]
    assert plan.makespan == optimum(Flow(tuple(blocks)), 2)


@pytest.mark.parametrize("nth", [2, 3, 5])
def test_an_interrupt_keeps_the_best_so_far(nth: int) -> None:
    seen: list[Progress] = []

    def interrupt(step: Progress) -> None:
        seen.append(step)
        if len(seen) == nth:
            raise KeyboardInterrupt

    plan = ps.plan(random_costs(6, 1), 4, 12, placement=shared_ends(4), progress=interrupt, time_limit=20)
    assert len(seen) == nth
    assert plan.makespan == seen[-1].value


def test_without_the_solver_local_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of shared stages that simple steady states did not prove was refused."""
    monkeypatch.setattr(exact, "available", lambda: False)
    found = ps.plan(random_costs(4, 0), 2, 4, placement=shared_ends(2), time_limit=0.2)
    ps.check(found.schedule)
    assert found.how not in ("exact", "")
    proved = ps.plan(tessel_costs(4), 4, 12, placement=shared_ends(4), split=False)
    assert proved.makespan == proved.lower_bound


def test_plan_takes_placements_with_shared_stages() -> None:
    plan = planner(tessel_costs(4), 4, 5, placement=shared_ends(4), split=False)
    assert plan.makespan == plan.lower_bound == 8 * 5 + 12
    assert plan.how == "mllm"
    with pytest.raises(ps.ScheduleError, match="stage 0 is shared by rank 3, but ranks go to 2"):
        planner(tessel_costs(4), 3, 5, placement=ps.Placement(((0, 0, 1, 2, 2, 0),), shared=((0, (0, 3)),)))


def test_a_cap_below_one_microbatch_is_an_error() -> None:
    with pytest.raises(ps.ScheduleError, match="raise") as caught:
        ps.plan(random_costs(4, 0), 2, 4, placement=shared_ends(2), max_in_flight=2)
    assert caught.value.rule == "memory"
