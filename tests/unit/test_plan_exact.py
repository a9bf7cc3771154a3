"""The search against the truth: on tiny problems all orders are tried; plan and bounds must agree with the best."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

import penstock as ps
from penstock.planning import exact, ramps
from penstock.planning.bounds import jackson_bound, ramp_bound, work_bound
from penstock.planning.destructive_bound import DestructiveBound
from penstock.planning.options import limits_of
from penstock.planning.problem import Problem, fits, pose
from penstock.planning.search import Search, time_of
from penstock.planning.starts import greedy
from penstock.schedule import Placement, circular, one_to_one, v_shape
from refutation import destructive_bound


@cache
def orders(num_microbatches: int) -> list[tuple[int, ...]]:
    """All orders of F, I and W (0, 1, 2) of one stage in which each I follows its F and each W its I."""
    found: list[tuple[int, ...]] = []

    def extend(order: tuple[int, ...], f: int, i: int, w: int) -> None:
        if w == num_microbatches:
            found.append(order)
        if f < num_microbatches:
            extend((*order, 0), f + 1, i, w)
        if i < f:
            extend((*order, 1), f, i + 1, w)
        if w < i:
            extend((*order, 2), f, i, w + 1)

    extend((), 0, 0, 0)
    return found


def problem_of(seed: int, num_ranks: int, num_microbatches: int, share: float) -> Problem:
    draw = np.random.default_rng(seed)
    f, i, w = (draw.integers(1, 12, num_ranks).astype(float).tolist() for _ in range(3))
    links = ps.Links({(0, 1): float(draw.integers(0, 20))})
    cap = float(draw.integers(1, num_microbatches + 1))
    return pose(
        ps.Costs(f, i, w), one_to_one(num_ranks), num_ranks, num_microbatches, links,
        [(1.0, share)] * num_ranks, [cap] * num_ranks, split=True,
    )  # fmt: skip


def best_of_all(problem: Problem) -> float:
    """The shortest makespan of all orders that fit and do not deadlock."""
    ranks = problem.queues.num_ranks
    num_microbatches = int(problem.queues.size[0])
    best = float("inf")
    for rows in itertools.product(orders(num_microbatches), repeat=ranks):
        row = np.array([3 * rank + kind for rank, order in enumerate(rows) for kind in order], np.int64)
        if fits(problem, row) and (value := time_of(problem, row)) >= 0:
            best = min(best, value)
    return best


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("seed", "num_ranks", "num"), [*((seed, 2, 3) for seed in range(6)), (0, 3, 2), (3, 3, 2)])
def test_bounds_and_greedy_enclose_the_best_of_all_orders(seed: int, num_ranks: int, num: int, share: float) -> None:
    problem = problem_of(seed, num_ranks, num, share)
    best = best_of_all(problem)
    assert jackson_bound(problem) <= work_bound(problem) <= best
    assert ramp_bound(problem) <= best
    assert ramp_bound(problem, work_bound(problem)) <= best
    assert work_bound(problem) <= destructive_bound(problem, 0.0, 2 * best) * (1 + 1e-6) <= best * (1 + 2e-6)
    search = Search(problem, work_bound(problem))
    greedy(search)
    assert search.value >= best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "num_microbatches", "times", "held", "cap", "paths_alone", "with_ramps", "best"),
    [
        pytest.param(v_shape(3), 4, (2, 2, 2), (1.0, 0.0), 4, 52, 58, 58, marks=pytest.mark.nightly),
        (circular(2, 4), 4, (2, 2, 2), (1.0, 0.0), 3, 50, 52, 52),
        (one_to_one(4), 6, (4, 2, 5), (2.0, 0.5), 4, 90, 90, 100),
    ],
)
def test_memory_keeps_a_rank_idle_at_both_ends(
    placement: Placement, num_microbatches: int, times: tuple[int, int, int], held: tuple[float, float], cap: int,
    paths_alone: float, with_ramps: float, best: int,
) -> None:  # fmt: skip
    """What has room for one of two stages alone was thought to have room for both; and of memory that is freed in
    halves, a third forward waits for two of the I and W before it, but bounds saw it wait for one I."""
    pytest.importorskip("ortools")
    from exact_solver import Instance, solve

    stages, ranks = placement.num_stages, max(placement.pipelines[0]) + 1
    f, i, w = times
    problem = pose(
        ps.Costs.uniform(stages, f=f, i=i, w=w), placement, ranks, num_microbatches, ps.Links(), [held] * stages,
        [float(cap)] * ranks, split=True,
    )  # fmt: skip
    amounts = [(int(amount),) * stages for amount in (held[0], held[0] * held[1])]
    by_kind = {kind: (ms,) * stages for kind, ms in zip("FIW", times, strict=True)}
    solved = solve(Instance(placement.pipelines, num_microbatches, by_kind, {}, *amounts, (cap,) * ranks))
    assert (solved.value, solved.proved) == (best, True)
    assert work_bound(problem) <= paths_alone
    assert ramp_bound(problem, work_bound(problem)) <= with_ramps * (1 + 1e-6)
    assert destructive_bound(problem, 0.0, 200.0) == pytest.approx(best, rel=2e-6)


def test_idle_time_is_asked_for_at_some_moments_where_a_rank_has_many() -> None:
    """With more than 256 moments on a rank every plan failed: the C core takes no array with gaps."""
    problem = problem_of(0, 2, 200, 0.5)
    assert work_bound(problem) <= ramp_bound(problem, work_bound(problem))


def test_a_rank_with_too_many_states_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(0, 2, 3, 0.5)
    known = work_bound(problem)
    for name in ("_MOST_STATES", "_MOST_STATES_UNCOMPILED"):
        monkeypatch.setattr(f"penstock.planning.destructive_bound.{name}", 3)
    assert destructive_bound(problem, known, 1000.0) == known


def test_a_bound_by_refutation_that_is_stopped_is_what_was_known() -> None:
    problem = problem_of(0, 2, 3, 0.5)
    search = DestructiveBound(problem, 1.0, 1000.0)
    search.go(np.ones(1, np.int64))
    assert search.bound == 1.0


@pytest.mark.parametrize("unlike", [0.0, 1e-3])
def test_the_least_makespan_is_asked_for_from_the_best_order_on(unlike: float) -> None:
    """In times with a common unit, of which 58 are the optimum above, and in times that are rounded to few steps."""
    pytest.importorskip("ortools")
    times = [2 + unlike * stage**0.5 for stage in range(6)]
    problem = pose(
        ps.Costs(times, times, times), v_shape(3), 3, 4, ps.Links(), [(1.0, 0.0)] * 6, [4.0] * 3, split=True
    )
    search = Search(problem, jackson_bound(problem), stop_at_gap=1e-6)
    greedy(search)
    assert search.value > 59
    exact.lessen(search, 30.0)
    assert fits(problem, search.row)
    assert 58 <= search.value < 58.2
    assert search.lower_bound == pytest.approx(search.value, rel=1e-3)


def test_idle_time_at_two_ends_that_may_overlap_is_no_bound() -> None:
    """By 8 ms idle for 6, in the last 8 ms for 6: of 10 ms in all, 2 of them are counted twice at least."""
    begin, idle = np.array([0.0, 8.0]), np.array([0.0, 6.0])
    assert ramps.with_both_ends(10.0, 4.0, begin, idle, begin, idle) == 10.0
    assert ramps.with_both_ends(16.0, 4.0, begin, idle, begin, idle) == 16.0
    assert ramps.with_both_ends(16.0, 5.0, begin, idle, begin, idle) == 17.0


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_exact_solving_ends_at_the_best_of_all_orders(seed: int, share: float) -> None:
    pytest.importorskip("ortools")
    problem = problem_of(seed, 2, 3, share)
    best = best_of_all(problem)
    search = Search(problem, jackson_bound(problem), stop_at_gap=1e-6)
    greedy(search)
    exact.lessen(search, search.seconds + 60.0)
    assert search.value == pytest.approx(best)
    assert search.closed
    assert search.lower_bound <= best * (1 + 1e-9)


def test_regression_a_rank_that_hosts_no_stage() -> None:
    """Its states were counted as those of one queue, and plans that came to refute times ended in numpy's error."""
    costs = ps.Costs([4.0, 3.0, 1.0], [4.0, 4.0, 3.0], [3.0, 1.0, 1.0], activation=[6.0, 2.0, 2.0])
    placement = Placement(((0, 0, 2),))
    limits = limits_of(costs, placement, 3, None, [11.0, 1.0, 7.0], split=True)
    problem = pose(costs, placement, 3, 4, ps.Links(), limits.held, limits.cap, split=True)
    assert destructive_bound(problem, 0.0, 200.0) == pytest.approx(83.0, rel=1e-5), "what the exact solver proves"


@pytest.mark.parametrize(("seconds", "probes"), [(exact.STOPPING + 0.9 * exact.PROBING, False), (30.0, True)])
def test_the_solver_probes_only_where_it_has_the_time(
    seconds: float, probes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of .3 s leaves CP-SAT some 30 ms, in which it proved 83 small problems with probing and 100 without."""
    pytest.importorskip("ortools")
    asked = []

    def solve(model: exact.OrderModel, seconds: float, seed: int, **given: bool) -> exact.ModelAnswer:
        asked.append(given["probes"])
        return exact.ModelAnswer(found=False, refuted=False, bound=0.0)

    monkeypatch.setattr(exact.OrderModel, "solve", solve)
    search = Search(problem_of(0, 2, 3, 0.0), 0.0)
    greedy(search)
    monkeypatch.setattr(Search, "seconds", 0.0)
    exact.lessen(search, seconds)
    assert set(asked) == {probes}


@pytest.mark.parametrize(("last_w", "objective"), [(0.0, "makespan"), (0.0, "span"), (1.0, "span")])
def test_regression_ops_of_no_length_in_two_pipelines(last_w: float, objective: str) -> None:
    """The solver's order of ops that start together broke the cap, and a span came out as more than it was."""
    costs = ps.Costs((0.0,) * 3, (0.0,) * 3, (0.0, 0.0, last_w), (), (1.0,) * 3, 0.0)
    links = ps.Links({(0, 1): 1.0})
    placement = ps.Placement(((0, 1, 2), (2, 1, 0)))
    plan = ps.plan(
        costs, 3, 2, links, placement=placement, split=False, objective=objective, time_limit=0.05, max_in_flight=1
    )
    ps.check(plan.schedule)
    assert plan.value == getattr(ps.simulate(plan.schedule, costs, links=links), objective)
