"""The time limit of a plan: every phase counts, loops come to their end, and Python begins nothing large.

The clocks here are numbers that tests move; no test takes the time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import penstock as ps
from in_python import in_python
from penstock.engine.list_by_values import ListSpace
from penstock.planning import annealing, building_blocks, exact, forward_backward, row_walk, strategy
from penstock.planning.annealing import Threads, annealed
from penstock.planning.bounds import jackson_bound
from penstock.planning.building_blocks import BlockSearch
from penstock.planning.graph import sequence
from penstock.planning.graph.problem import pose_graph
from penstock.planning.graph.search import SequenceWalk
from penstock.planning.graph.search import begin as begin_graph
from penstock.planning.joint import search as joint
from penstock.planning.joint.problem import pose_joint
from penstock.planning.metropolis import Cooling
from penstock.planning.options import Limits, OpForms
from penstock.planning.problem import Problem, pose
from penstock.planning.search import PerturbationSearch, Search, Trials, Walk, time_of
from penstock.planning.starts import greedy
from penstock.schedule import one_to_one

pytestmark = pytest.mark.unit

COSTS = ps.Costs(f=[100, 91, 108, 95], i=[97, 120, 111, 93], w=[84, 70, 102, 90])


class Clock:
    """A clock that goes on by so much at every look, and by what tests add."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step, self.num_looks = 0.0, step, 0

    def __call__(self) -> float:
        self.num_looks += 1
        self.now += self.step
        return self.now


def tight(num_microbatches: int = 12) -> Problem:
    return pose(COSTS, ps.placements.one_to_one(4), 4, num_microbatches, ps.Links({(1, 2): 150.0}),
                [(1.0, 0.0)] * 4, [3.0] * 4, split=True)  # fmt: skip


def begun(problem: Problem, until: float, clock: Callable[[], float]) -> Search:
    search = Search(problem, jackson_bound(problem), began=0.0, until=until, clock=clock)
    greedy(search)
    return search


@pytest.fixture
def without_library() -> Iterator[None]:
    with in_python():
        yield


class StopAfter:
    """A flag that is 0 the first few times it is looked at, and counts the looks."""

    def __init__(self, num_looks: int) -> None:
        self.num_looks, self.looked = num_looks, 0

    def __getitem__(self, index: int) -> int:
        self.looked += 1
        return int(self.looked > self.num_looks)


@pytest.mark.parametrize("num_looks", [0, 1, 2, 7])
def test_trials_look_whether_to_stop_after_every_listing(monkeypatch: pytest.MonkeyPatch, num_looks: int) -> None:
    listings = 0
    list_ops = forward_backward.list_ops

    def counted(*args: Any) -> float:
        nonlocal listings
        listings += 1
        return list_ops(*args)

    monkeypatch.setattr(forward_backward, "list_ops", counted)
    problem = tight()
    search = begun(problem, 1.0, Clock())
    space, row, stop = ListSpace.of(problem.queues), search.row.copy(), StopAfter(num_looks)
    best = forward_backward.trials(
        problem.queues, problem.queues.turned(), np.stack([problem.priority_class] * 2), 100.0, search.value, row,
        space, Cooling(1000, 1.0, 1.0, 0.0, stop),
    )  # fmt: skip
    assert listings <= num_looks
    assert num_looks < stop.looked <= num_looks + 2
    assert best <= search.value


@pytest.mark.parametrize("num_looks", [0, 1, 2, 7])
def test_shaking_looks_whether_to_stop_after_every_listing(monkeypatch: pytest.MonkeyPatch, num_looks: int) -> None:
    listings = 0
    list_ops = forward_backward.list_ops

    def counted(*args: Any) -> float:
        nonlocal listings
        listings += 1
        return list_ops(*args)

    monkeypatch.setattr(forward_backward, "list_ops", counted)
    problem = tight()
    search = begun(problem, 1.0, Clock())
    shaking = PerturbationSearch(problem, 0)
    shaking._module = forward_backward
    shaking.begin(search, 1.0)
    shaking.moves_a_second = 1e6
    shaking.go(1.0, 0.0, 1.0, 0.0, StopAfter(num_looks))
    assert listings <= num_looks
    shaking.bring(search)
    assert time_of(problem, search.row) == search.value


def test_a_walk_ends_where_it_is_stopped() -> None:
    problem = tight()
    walk = Walk(problem, 0)
    walk._module = row_walk
    walk.begin(begun(problem, 1.0, Clock()), 1.0)
    walk.moves_a_second = 1e6
    stop = StopAfter(5)
    walk.go(1.0, 0.0, 1.0, 0.0, stop)
    assert stop.looked <= 5 + 3  # the walk's own looks beside those of the loop
    walk.moves_a_second = 1e6
    walk.go(1.0, 0.0, 1.0, 0.0, StopAfter(0))
    assert not walk.stuck  # it could not have moved


def test_threads_are_stopped_when_the_time_is_over() -> None:
    with Threads(2) as threads:
        seen = threading.Event()

        def until_stopped() -> None:
            while threads.stop[0] == 0:
                pass
            seen.set()

        threads.run([until_stopped, until_stopped], 0.0)
        assert seen.is_set()


def test_threads_are_stopped_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.planning.annealing.wait", interrupted)
    with Threads(1) as threads:

        def until_stopped() -> None:
            while threads.stop[0] == 0:
                pass

        with pytest.raises(KeyboardInterrupt):
            threads.run([until_stopped], 1e6)


@pytest.mark.usefixtures("without_library")
def test_trials_in_python_leave_the_users_random_numbers_alone() -> None:
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    with Threads(4) as threads:
        assert threads.num == 1
        threads.run([partial(forward_backward.seed, 1)], 1.0)
    assert np.random.random() == expected


@pytest.mark.parametrize("spent", [1.0, 50.0])
def test_nothing_is_searched_where_the_first_order_took_the_time(
    monkeypatch: pytest.MonkeyPatch, spent: float
) -> None:
    clock = Clock()
    search = begun(tight(), 1.0, clock)
    clock.now = spent
    before = search.row
    for name in ("work_bound", "named"):
        monkeypatch.setattr(strategy, name, lambda *_: pytest.fail("the time was over"))
    monkeypatch.setattr(Trials, "go", lambda *_: pytest.fail("the time was over"))
    monkeypatch.setattr(Walk, "go", lambda *_: pytest.fail("the time was over"))
    monkeypatch.setattr(exact, "OrderModel", lambda *_: pytest.fail("the time was over"))
    strategy.run(search)
    assert search.row is before


@pytest.mark.slow
def test_a_search_ends_within_a_few_looks_at_its_clock_after_the_time() -> None:
    clock = Clock(step=0.01)
    search = begun(tight(40), 1.0, clock)  # 480 ops
    search.stop_at_gap = 0.0
    strategy.run(search)
    assert search.closed or clock.now <= 1.0 + 0.01 * 40


def test_what_a_proof_takes_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first order of a large problem is proved at once: what that takes is left for the last proof."""
    module = sys.modules["penstock.planning.planner"]
    clock, seen = Clock(), []
    monkeypatch.setattr("time.perf_counter", clock)
    checked = ps.check

    def check(schedule: ps.Schedule) -> None:
        clock.now += 3.0
        checked(schedule)

    monkeypatch.setattr(module, "check", check)
    monkeypatch.setattr(strategy, "run", lambda search: seen.append((search.until, search.seconds)))
    ps.plan(ps.Costs.uniform(16), 16, 128, max_in_flight=3, time_limit=20.0)
    ((until, seconds),) = seen
    assert seconds == 3.0
    assert until <= 20.0 - 3.0


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("placement", [one_to_one(4), ps.placements.v_shape(4)], ids=["one-to-one", "V"])
def test_a_large_plan_in_python_is_made_in_step(monkeypatch: pytest.MonkeyPatch, placement: ps.Placement) -> None:
    monkeypatch.setattr(annealing, "MOST_UNCOMPILED", 100)
    costs = ps.Costs.uniform(placement.num_stages, f=90.0, i=110.0, w=80.0)
    p = ps.plan(costs, 4, 24, ps.Links({(1, 2): 50.0}), placement=placement, max_in_flight=6, time_limit=0.2)
    assert p.how == "in step"
    assert p.lower_bound <= p.value
    ps.check(p.schedule)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_small_plan_is_searched_in_python(objective: Any) -> None:
    p = ps.plan(COSTS, 4, 12, ps.Links({(1, 2): 150.0}), max_in_flight=3, objective=objective, time_limit=0.3)
    assert p.lower_bound <= p.value
    ps.check(p.schedule)


class Begun(Exception):
    """A step that is slow without the library began."""


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(
    ("step", "module", "function"),
    [
        (Trials, forward_backward, "trials"),
        (PerturbationSearch, forward_backward, "shaken"),
        (Walk, row_walk, "anneal"),
        (BlockSearch, building_blocks, "walk"),
        (joint.JointWalk, row_walk, "anneal"),
        (SequenceWalk, sequence, "walk"),
    ],
)
def test_no_step_of_a_large_problem_begins_in_python(
    monkeypatch: pytest.MonkeyPatch, step: Any, module: ModuleType, function: str
) -> None:
    """128 ranks with 1024 microbatches took 14.5 s of 10: a trial in Python seldom looks at the clock."""
    search: Any
    limits = Limits((3.0,) * 4, ((1.0, 0.0),) * 4)
    if step is joint.JointWalk:
        forms = OpForms(again=False, whole=True, split=True)
        search = joint.begin(pose_joint(COSTS, one_to_one(4), 4, [12], ps.Links(), limits, forms), 0, 0.0, None, 0.0)
    elif step is SequenceWalk:
        graph = pose_graph(COSTS, one_to_one(4), 4, 12, ps.Links(), limits, True)
        search = begin_graph(graph, [(graph.serial(), "serial")], [], 0.0, 0, 0.0, None, 0.0)
    else:
        search = begun(tight(), np.inf, Clock())
    search.clock, search.began, search.lower_bound = time.perf_counter, time.perf_counter(), 0.0
    monkeypatch.setattr(annealing, "MOST_UNCOMPILED", 100)

    def begins(*_: Any) -> None:
        raise Begun(f"{function} runs without the library")

    monkeypatch.setattr(module, function, begins)

    annealed(search, step, search.seconds + 0.1)
    monkeypatch.setattr(annealing, "MOST_UNCOMPILED", 10_000)
    with pytest.raises(Begun):
        annealed(search, step, search.seconds + 60.0)
