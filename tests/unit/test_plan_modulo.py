"""Planning placements with shared stages: bounds against exact optima, caps, errors."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

import penstock as ps
from experiments.flexpipe.tessel import peaks
from penstock.planning import order_model
from penstock.planning import plan as planner
from penstock.planning.graph.flow import Block, BlockDependency, Flow
from penstock.planning.graph.flow_bound import flow_bound, follows
from penstock.planning.graph.problem import pose_graph
from penstock.planning.options import limits_of
from penstock.planning.progress import Progress
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


def optimum(flow: Flow, num_turns: int, caps: Sequence[float] | None = None) -> float:
    """The least makespan, by CP-SAT on every op, without any of the bound's ideas."""
    from exact_solver import Task, solve_tasks

    tasks, num_blocks = [], len(flow.blocks)
    for turn in range(num_turns):
        for b, block in enumerate(flow.blocks):
            needs = [(turn * num_blocks + need.block, int(need.delay)) for need in block.needs]
            needs += [((turn - 1) * num_blocks, 0)] if turn > 0 and b == 0 else []  # turns are alike
            held = int(block.acquires), int(block.releases)
            tasks.append(Task(block.ranks, int(block.duration), tuple(needs), *held))
    solved = solve_tasks(tasks, [None] * flow.num_ranks if caps is None else [int(cap) for cap in caps], 20.0)
    assert solved.proved
    assert solved.value is not None
    return solved.value


@pytest.mark.parametrize("num_ranks", others_nightly([2, 3, 4, 8, 16], [2, 3, 4, 8]))
def test_tessels_totals_are_met_and_proved(num_ranks: int) -> None:
    num_microbatches = 3 * num_ranks
    costs = tessel_costs(num_ranks)
    plan = ps.plan(costs, num_ranks, num_microbatches, placement=shared_ends(num_ranks), split=False)
    assert plan.makespan == plan.lower_bound == 8 * num_microbatches + 4 * (num_ranks - 1)
    assert ps.simulate(plan.schedule, costs).makespan == plan.makespan
    assert ps.parse(str(plan.schedule)) == plan.schedule


def with_memory(flow: Flow, seed: int) -> Flow:
    """The flow with up to two activations, each held from one block to another of the same ranks that follows it."""
    draw = random.Random(seed)
    blocks, after = list(flow.blocks), follows(flow)
    pairs = [(a, b) for a in range(len(blocks)) for b in sorted(after[a] - {a}) if blocks[a].ranks == blocks[b].ranks]
    for a, b in draw.sample(pairs, min(2, len(pairs))):
        if not any(blocks[x].acquires or blocks[x].releases for x in (a, b)):
            held = draw.randint(1, 2)
            blocks[a], blocks[b] = replace(blocks[a], acquires=held), replace(blocks[b], releases=held)
    return Flow(tuple(blocks))


@pytest.mark.parametrize("seed", range(40))
def test_bound_is_never_above_the_optimum(seed: int) -> None:
    flow = random_flow(seed)
    for num_turns in (1, 3):
        bound = flow_bound(flow, [num_turns] * len(flow.blocks))
        assert bound.makespan <= optimum(flow, num_turns), (flow, bound)
    flow = with_memory(flow, seed)
    caps = [4.0, *[float(2 + seed % 3)] * (flow.num_ranks - 1)]
    if all(peak <= cap for peak, cap in zip(peaks(flow, [(b, 0) for b in range(len(flow.blocks))]), caps)):
        bound = flow_bound(flow, [3] * len(flow.blocks), caps)
        assert bound.makespan <= optimum(flow, 3, caps), (flow, caps, bound)


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_bound_under_a_cap_is_never_above_the_optimum(cap: int) -> None:
    chain = ((0, 1), (0,), (1,), (0, 1), (1,), (0,), (0, 1))
    kept = {1: (1, 0), 2: (1, 0), 4: (0, 1), 5: (0, 1)}
    blocks = [
        Block(str(b), ranks, 1 + b % 3, (BlockDependency(b - 1),) if b else (), *kept.get(b, (0, 0)))
        for b, ranks in enumerate(chain)
    ]
    flow = Flow(tuple(blocks))
    bound = flow_bound(flow, [3] * len(blocks), [cap] * 2)
    best = optimum(flow, 3, [cap] * 2)
    assert bound.makespan <= best
    if cap == 1:
        assert bound.makespan == best  # one turn after the other: barriers and round trips fill all the time


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
    flow = pose_graph(costs, placement, 3, 2, ps.Links(), limits, split=True).flow.flow
    assert plan.makespan == optimum(flow, 2)


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
    monkeypatch.setattr(order_model, "available", lambda: False)
    found = ps.plan(random_costs(4, 0), 2, 4, placement=shared_ends(2), time_limit=0.2)
    ps.check(found.schedule)
    assert found.how not in ("ends", "")
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
    with pytest.raises(ps.ScheduleError, match=r"may hold 0\.5 activations, but one b0 keeps 1"):
        flow_bound(Flow((Block("b0", (0,), 1, (), 1, 1),)), [3], [0.5])
