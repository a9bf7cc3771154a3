"""Plans that decide which activations wait in host memory: beside an exact solver, under every kind of cap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.draw import to_svg
from penstock.planning import strategy
from penstock.planning.joint.away import sent_away
from penstock.planning.joint.bounds import lower_bound
from penstock.planning.joint.problem import JointProblem, pose_joint
from penstock.planning.options import OpForms, in_turn, limits_of
from penstock.planning.problem import Orders, pose
from penstock.schedule import Op, one_to_one
from proof_cases import OFFLOADED, draw_free, in_host_memory, judge
from tiers import others_nightly

COSTS = replace(ps.Costs.uniform(4, f=10, i=10, w=10), other={"OFFLOAD": 5.0, "RELOAD": 5.0})
LATE = ps.Links({(2, 3): 40.0})


def test_what_waits_in_host_memory_shortens_a_plan_that_keeps_to_both_caps(tmp_path: Path) -> None:
    """Three activations per rank are too few for a link that is 40 ms late: without host memory 750 ms is best."""
    plain = ps.plan(COSTS, 4, 12, LATE, max_in_flight=3, time_limit=20.0)
    assert (plain.makespan, plain.lower_bound) == (750, 750)
    plan = ps.plan(COSTS, 4, 12, LATE, max_in_flight=3, offload=9, time_limit=2.0)
    assert plan.lower_bound <= plan.makespan < 650
    ps.check(plan.schedule)
    timeline = ps.simulate(plan.schedule, COSTS, links=LATE)
    assert timeline.makespan == plan.makespan
    assert max(timeline.peak_activations) <= 3
    assert 0 < max(in_host_memory(timeline, r, [1.0] * 4) for r in range(4)) <= 9
    kinds = Counter(op.kind for row in plan.schedule.order for op in row)
    assert kinds["OFFLOAD"] == kinds["RELOAD"] > 0
    assert plan.certificate.offload == "any"
    assert str(plan.certificate).endswith("each activation in host memory or not")
    ps.save(plan.schedule, tmp_path / "offloaded.json")
    assert ps.load(tmp_path / "offloaded.json") == plan.schedule == ps.parse(str(plan.schedule))
    assert "OFFLOAD" in to_svg(timeline)


@pytest.mark.parametrize(
    ("limits", "offload"),
    [
        ({"max_in_flight": [4, 3, 3, 2]}, [3, 2, 1, 4]),
        ({"memory_limit": [7.0, 4.0, 3.0, 5.0]}, 4.0),
        ({"memory_limit": 6.0}, True),
    ],
)
def test_caps_in_any_unit_and_per_rank_hold_however_the_plan_is_run(
    limits: dict[str, object], offload: object
) -> None:
    """A schedule knows no limit in bytes: what waits for room is said op by op, and holds when all of it is late."""
    costs = replace(COSTS, activation=[2, 1, 1, 2.5])
    plan = ps.plan(costs, 4, 8, LATE, **limits, offload=offload, time_limit=0.5)  # type: ignore[arg-type]
    ((name, cap),) = limits.items()
    caps = cap if isinstance(cap, list) else [cap] * 4
    counted = replace(costs, activation=(), freed_by_input=0.0) if name == "max_in_flight" else costs
    slow = counted.with_other({("OFFLOAD", s): 31.0 for s in range(4)} | {("RELOAD", 1): 17.0})
    for each in (counted, slow):
        timeline = ps.simulate(plan.schedule, each, links=LATE)
        assert all(peak <= most + 1e-9 for peak, most in zip(timeline.peak_activations, caps, strict=True))
        host = offload if isinstance(offload, list) else [float("inf") if offload is True else offload] * 4
        for r in range(4):
            assert in_host_memory(timeline, r, counted.activation) <= host[r]
    assert ps.parse(str(plan.schedule)) == plan.schedule


@pytest.mark.slow
def test_what_may_wait_in_host_memory_leaves_room_for_stages_that_do_not_fit_together() -> None:
    """One microbatch of both stages of a rank is too much for its cap."""
    where = ps.placements.v_shape(2)
    with pytest.raises(ps.ScheduleError, match="no schedule fits"):
        ps.plan(COSTS, 2, 3, placement=where, max_in_flight=1, time_limit=0.1)
    with pytest.raises(ps.ScheduleError, match="no schedule fits"):
        ps.plan(COSTS, 2, 3, placement=where, max_in_flight=1, offload=0.5, time_limit=0.1)
    for seed in range(3):
        plan = ps.plan(COSTS, 2, 3, placement=where, max_in_flight=1, offload=1, time_limit=0.5, seed=seed)
        assert max(ps.simulate(plan.schedule, COSTS).peak_activations) == 1
        assert plan.lower_bound <= plan.makespan


def test_several_pipelines_send_away_what_is_theirs() -> None:
    """The ops of a stage's copies run where the copy of their microbatch is."""
    both = ps.Placement(((0, 1), (1, 0)))
    costs = replace(ps.Costs.uniform(2, f=4, i=4, w=4), other={"OFFLOAD": 1.0, "RELOAD": 1.0})
    plan = ps.plan(costs, 2, 8, ps.Links(default=20.0), placement=both, max_in_flight=2, offload=4, time_limit=1.0)
    away = [(r, op) for r, row in enumerate(plan.schedule.order) for op in row if op.kind == "OFFLOAD"]
    assert away
    assert all(r == plan.schedule.rank_of(op.stage, op.microbatch) for r, op in away)
    assert ps.parse(str(plan.schedule)) == plan.schedule


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"objective": "span"}, "planned for the makespan of a frozen order"),
        ({"dispatch": "hinted"}, "planned for the makespan of a frozen order"),
        ({"placement": ps.Placement(((0, 0, 1, 0),), shared=((0, (0, 1)), (3, (0, 1))))}, "with shared stages"),
        ({"offload": -1}, "offload of rank 0 is -1: give a number above 0"),
        ({"offload": [1, 2, 3]}, "offload has 3 entries"),
        ({"offload": "yes"}, "offload"),
    ],
)
def test_what_is_not_planned_with_offload_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ps.ScheduleError, match=words):
        ps.plan(COSTS, 2 if "placement" in given else 4, 4, max_in_flight=4, **({"offload": 1} | given))  # type: ignore[arg-type]


def test_costs_must_say_how_long_the_way_takes() -> None:
    """A kind that costs do not name takes no time: all would go to host memory for nothing."""
    with pytest.raises(ps.CostError, match="do not say how long RELOAD of stage 1 takes"):
        ps.plan(
            ps.Costs.uniform(2).with_other({("OFFLOAD", 0): 1.0, ("OFFLOAD", 1): 1.0, ("RELOAD", 0): 1.0}), 2, 4,
            max_in_flight=2, offload=True,
        )  # fmt: skip
    with pytest.raises(ps.CostError, match="offload=True"):
        ps.plan(replace(COSTS, uneven=[1, 2, 3, 1]), 4, 4, max_in_flight=2, offload=True)


def test_without_a_limit_nothing_goes_to_host_memory() -> None:
    """Leaving out what only holds less is no worse: the proof covers it."""
    plan = ps.plan(COSTS, 4, 6, offload=True, time_limit=0.3)
    assert not any(op.kind == "OFFLOAD" for row in plan.schedule.order for op in row)
    assert plan.certificate.offload == "any"


@pytest.mark.parametrize("seed", others_nightly([1, 6, 9, 10, 13, 16, 17, 19, 22, 23, 29], [1, 9, 10, 13, 17, 22]))
def test_a_small_problem_with_host_memory_agrees_with_the_exact_solver(seed: int) -> None:
    """Some of those of benchmarks/proofs --offload. The bounds of 9, 13 and 17, in which backwards may be whole too,
    were those of halves alone."""
    pytest.importorskip("ortools")
    verdict = judge(draw_free(seed, OFFLOADED[seed % len(OFFLOADED)]), time_limit=0.15)
    assert verdict.wrong == []
    assert verdict.solved.proved


HALF = """
schedule half: 1 rank, 1 stage, 3 microbatches
pipeline 0: stages on ranks 0
edges none
kind OFFLOAD of stage 0: 1 op, asynchronous, holds -1, of microbatch 1
kind RELOAD of stage 0: 1 op, asynchronous, holds 1, of microbatch 1
needs 1 F of stage 0 before 1 OFFLOAD of stage 0
needs 1 OFFLOAD of stage 0 before 1 RELOAD of stage 0
needs 1 RELOAD of stage 0 before 1 B of stage 0
needs OFFLOAD of stage 0 before F of stage 0: 1>2
rank 0 | F0 F1 OFFLOAD1 F2 B0 RELOAD1 B1 B2
"""


def test_ops_of_some_microbatches_bind_these_alone_and_a_pair_makes_one_op_wait() -> None:
    schedule = ps.parse(HALF)
    ps.check(schedule, max_in_flight=2)
    costs = replace(ps.Costs.uniform(1, f=10, i=5, w=5), other={"OFFLOAD": 25.0, "RELOAD": 5.0})
    timeline = ps.simulate(schedule, costs)
    start = {timed.op: timed.start for timed in timeline.ops}
    assert (start[Op("F", 0, 2)], start[Op("B", 0, 0)], start[Op("B", 0, 1)]) == (45, 55, 70)
    assert timeline.peak_activations == (2,)
    with pytest.raises(ps.ScheduleError, match="would hold 3 stage activations"):
        ps.check(ps.parse(HALF.replace("needs OFFLOAD of stage 0 before F of stage 0: 1>2\n", "")), max_in_flight=2)
    again = ps.passes.repeat_windows(schedule, 2)
    assert again.graph.registered_of["OFFLOAD", 0].microbatches == (1, 4)
    assert ps.simulate(again, costs).peak_activations == (2,)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("holds 1, of microbatch 1", "holds 1, of microbatch 2", "its kind has ops of microbatches 2"),
        ("holds 1, of microbatch 1", "holds 1, of microbatch 7", "its kind has ops of microbatches 7"),
        (
            "1 op, asynchronous, holds -1, of microbatch 1",
            "2 ops, asynchronous, holds -1, of microbatches 1 2",
            "OFFLOAD2",
        ),
        ("1 op, asynchronous, holds -1, of", "2 ops, asynchronous, holds -1, of", "give as many microbatches as ops"),
        (": 1>2", ": 0>2", "a need names op 0 of OFFLOAD of stage 0"),
        (": 1>2", ": 1>3", "a need names op 3 of F of stage 0"),
        ("needs 1 F of stage 0 before 1 O", "needs 3 F of stage 0 before 1 O", "only some microbatches have one"),
    ],
)
def test_ops_of_some_microbatches_that_make_no_sense_are_refused(old: str, new: str, words: str) -> None:
    assert old in HALF
    with pytest.raises(ps.ScheduleError, match=words):
        ps.check(ps.parse(HALF.replace(old, new)))


NO_ROOM = 8.0
"""Of both memories of each rank, where the last link of eight is 60 ms late."""


def _late_link(freed_by_input: float, offload: float = NO_ROOM) -> JointProblem:
    """Eight ranks, 32 microbatches, the last link late, and activations of which I frees so much."""
    costs = replace(
        ps.Costs.uniform(8, 10.0, 10.0, 10.0, freed_by_input=freed_by_input), other={"OFFLOAD": 5.0, "RELOAD": 5.0}
    )
    limits = limits_of(costs, one_to_one(8), 8, None, NO_ROOM, True, 1.0, offload)
    forms = OpForms(again=False, whole=False, split=True, away=True)
    return pose_joint(costs, one_to_one(8), 8, [32], ps.Links({(6, 7): 60.0}), limits, forms)


def test_what_waits_for_its_weight_gradient_takes_room_that_host_memory_does_not_give() -> None:
    """Between I and W an activation is on its rank: 24 W stand before the last I of rank 7: 1150 ms at least."""
    problem = _late_link(0.0)
    assert lower_bound(problem) == 1150.0
    assert lower_bound(_late_link(0.5)) == 1090.0


def test_an_order_that_fills_both_memories_is_made_to_fit() -> None:
    """Without host memory 1390 ms is best, with 16 activations on each rank 1090: what goes away comes between."""
    problem = _late_link(0.5)
    made = list(sent_away(problem, _plain(problem, problem.total_cap)))
    assert made
    assert min(_timed(problem, orders) for orders in made) < 1390


def _plain(problem: JointProblem, cap: Sequence[float]) -> Orders:
    """The first order for other caps, of which nothing is away."""
    counts = [problem.microbatch_pipeline.count(p) for p in range(problem.placement.num_pipelines)]
    each = pose(
        problem.costs, problem.placement, problem.num_ranks, len(problem.microbatch_pipeline), problem.links,
        problem.limits.held, cap, True, counts,
    )  # fmt: skip
    search = strategy.begin(each, "makespan", 0, 0.0, None, 0.0)
    return problem.read(each.schedule(search.row, "plan"))


def _timed(problem: JointProblem, orders: Orders) -> float:
    """The makespan of orders, which must keep to the caps."""
    assert problem.fits(orders)
    return problem.timed(orders)


@pytest.mark.parametrize("family", OFFLOADED)
def test_whatever_is_sent_away_keeps_to_both_caps(family: str) -> None:
    """Of all library orders, and of the first order for both memories together."""
    found = 0
    for seed in range(40):
        given = draw_free(seed, family).arguments()
        costs, placement, num = given["costs"], given["placement"], given["num_microbatches"]
        again = "recompute" in family
        limits = limits_of(
            costs, placement, given["num_ranks"], given.get("max_in_flight"), given.get("memory_limit"), True,
            costs.kept if again else 1.0, given["offload"],
        )  # fmt: skip
        counts = in_turn(num, placement.num_pipelines)
        forms = OpForms(again, "mixed" in family, True, away=True)
        problem = pose_joint(costs, placement, given["num_ranks"], counts, given["links"], limits, forms)
        plain = _plain(problem, problem.total_cap)
        for orders in sent_away(problem, plain):
            assert _timed(problem, orders) >= lower_bound(problem) * (1 - 1e-9)
            found += 1
    assert found > 40
