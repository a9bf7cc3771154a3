"""`plan`: the best schedule for given costs, links and memory, with a proof of how good it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from penstock.cost import CostError, Costs, Links
from penstock.plan.limits import limits_of
from penstock.plan.progress import Progress, gap
from penstock.schedule import Placement, Schedule, ScheduleError, check, one_to_one
from penstock.simulate import simulate


@dataclass(frozen=True)
class Plan:
    """A schedule and how good it is.

    Attributes:
        schedule: checked, and confirmed by simulation.
        makespan: ms.
        lower_bound: no schedule within the limits ends sooner (ms).
        seconds: spent.
        how: the step that found it: "greedy", "justified", "local search" or "exact"; "serial", "repetend" or
            "ends" where stages are shared.
    """

    schedule: Schedule
    makespan: float
    lower_bound: float
    seconds: float
    how: str

    @property
    def gap(self) -> float:
        """`makespan / lower_bound - 1`: the plan is at most this far from the best there is."""
        return gap(self.makespan, self.lower_bound)


def plan(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    links: Links | None = None,
    *,
    max_in_flight: float | Sequence[float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    time_limit: float = 10.0,
    placement: Placement | None = None,
    split: bool = True,
    seed: int = 0,
    stop_at_gap: float = 1e-4,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Searches the best schedule, and stops when it is proved or the time is spent."""
    began = time.perf_counter()
    links = Links() if links is None else links
    placement = _placement(costs, num_ranks, num_microbatches, placement)
    links.check_ranks(num_ranks)
    if not isinstance(time_limit, Real) or isinstance(time_limit, bool) or not float(time_limit) > 0:
        raise ScheduleError(f"time_limit is {time_limit!r}: give seconds above 0", rule="options")
    if placement.shared:
        from penstock.plan.repetend_plan import plan_shared

        return plan_shared(
            costs,
            num_ranks,
            num_microbatches,
            links,
            placement=placement,
            max_in_flight=max_in_flight,
            memory_limit=memory_limit,
            time_limit=time_limit,
            split=split,
            seed=seed,
            stop_at_gap=stop_at_gap,
            progress=progress,
        )
    limits = limits_of(costs, placement, num_ranks, max_in_flight, memory_limit, split)
    from penstock.plan.bounds import jackson_bound  # here, so that `import penstock` stays light
    from penstock.plan.problem import pose
    from penstock.plan.search import Search
    from penstock.plan.steps import run

    problem = pose(costs, placement, num_ranks, num_microbatches, links, limits.held, limits.cap, split)
    search = Search(problem, jackson_bound(problem), seed, stop_at_gap, on_progress=progress, began=began)
    run(search, float(time_limit))
    schedule = problem.schedule(search.row, "plan", limits.in_flight)
    check(schedule)
    timeline = simulate(schedule, costs, links=links)
    if not math.isclose(timeline.makespan, search.value, rel_tol=1e-9, abs_tol=1e-9):
        raise AssertionError(f"the plan takes {search.value} ms, its simulation {timeline.makespan}")
    return Plan(schedule, timeline.makespan, search.lower_bound, time.perf_counter() - began, search.how)


def _placement(costs: Costs, num_ranks: int, num_microbatches: int, placement: Placement | None) -> Placement:
    for name, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name} is {count!r}: give a whole number of at least 1", rule="options")
    if placement is None:
        if costs.num_stages != num_ranks:
            raise CostError(
                f"the costs are for {costs.num_stages} stages, one a rank is {num_ranks}; "
                "say with `placement` where they go"
            )
        return one_to_one(num_ranks)
    if placement.num_stages != costs.num_stages:
        raise CostError(f"the costs are for {costs.num_stages} stages, the placement for {placement.num_stages}")
    for pipeline, hosts in enumerate(placement.pipelines):
        if max(hosts) >= num_ranks:
            raise ScheduleError(
                f"pipeline {pipeline} places a stage on rank {max(hosts)}, but ranks go to {num_ranks - 1}",
                rule="placement",
            )
    return placement
