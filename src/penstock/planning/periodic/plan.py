"""Plans placements with shared stages: bound, repetend, retiming, better ends.

    bound       repetend_bound: what no schedule can undercut
    rounds      repetend_rounds: simple steady states, without a solver
    repetend    modulo: steady states of the shortest period, each unrolled and retimed as it is found
    ends        repetend_ends: warm-up and cool-down, window by window

Each step stops when the bound is met or its share of the time is spent. It plans any chain of stages, also one
without shared stages; there `plan` searches better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.cost import Costs, Links
from penstock.engine.tolerance import EPSILON, is_within
from penstock.planning.limits import limits_of
from penstock.planning.periodic.bound import flow_bound
from penstock.planning.periodic.ends import shortened
from penstock.planning.periodic.flow import placed_flow
from penstock.planning.periodic.model import Flow, Instance, Repetend, fits, makespan, peaks, retimed
from penstock.planning.periodic.modulo import cp_sat, find_repetends, units_of
from penstock.planning.periodic.rounds import rounds
from penstock.planning.planner import Certificate, Plan
from penstock.planning.progress import Progress, certain
from penstock.schedule import Placement, ScheduleError, check
from penstock.simulation import simulate

_SHARE_OF_REPETENDS = 0.4
"""Of the time; the rest is for the ends."""
_MOST_COPIES = 3
"""Turns in a period, at most."""
_PERIOD_STEPS = 200
"""A period is shortened no further once the next shorter one is known to be less than this part away."""


def plan_shared(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    links: Links | None = None,
    *,
    placement: Placement,
    max_in_flight: float | Sequence[float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    time_limit: float = 10.0,
    split: bool = True,
    seed: int = 0,
    stop_at_gap: float = 1e-4,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The best schedule found for a placement with shared stages; arguments and result as of `plan`.

    Tessel's MLLM on four ranks (F, E, H and their backwards 1 ms, B 3 ms):

        everyone = (0, 1, 2, 3)
        placement = Placement(((0, 0, 1, 2, 3, 0),), shared=((0, everyone), (5, everyone)))
        costs = Costs(f=[1] * 6, i=[0] * 6, w=[0] * 6, b=[1, 3, 3, 3, 3, 1])
        plan_shared(costs, 4, 12, placement=placement, split=False).makespan       # 8 * 12 + 12, proved

    It needs the extra `exact`, unless the first simple steady state is proved good enough, as here.

    Raises:
        ScheduleError: the solver is needed and not installed, or a cap is below what one microbatch holds.
    """
    began = time.perf_counter()
    for stage, ranks in placement.shared:
        if max(ranks) >= num_ranks:
            raise ScheduleError(
                f"stage {stage} is shared by rank {max(ranks)}, but ranks go to {num_ranks - 1}", rule="placement"
            )
    links = Links() if links is None else links
    limits = limits_of(costs, placement, num_ranks, max_in_flight, memory_limit, split)
    placed = placed_flow(costs, placement, num_microbatches, links, limits, split)
    caps = list(limits.cap[: placed.flow.num_ranks])
    bound = flow_bound(placed.flow, placed.counts, caps)
    search = _Search(
        placed.flow,
        placed.counts,
        caps,
        bound.makespan,
        bound.makespan * (1 + stop_at_gap) + EPSILON,
        began,
        progress,
    )
    search.consider_serial()
    try:
        for repetend in rounds(placed.flow):
            search.consider_repetend(repetend)
        _repetends(search, bound.period, began + _SHARE_OF_REPETENDS * time_limit, seed)
        if search.makespan > search.good_enough:
            shortened(
                placed.flow,
                units_of(placed.flow),
                search.timed,
                caps,
                bound.makespan,
                search.good_enough,
                began + time_limit,
                found=lambda better: search.consider(better, "ends"),
                seed=seed,
            )
    except KeyboardInterrupt:
        pass  # the best so far is as good as ever
    schedule = placed.schedule(search.timed, num_ranks, limits.in_flight)
    check(schedule)
    timeline = simulate(schedule, costs, links=links)
    if not math.isclose(timeline.makespan, search.makespan, rel_tol=EPSILON, abs_tol=EPSILON):
        raise ScheduleError(
            f"the plan says {search.makespan!r} ms, its simulation {timeline.makespan!r} ms (rule: confirmed); "
            "this is a bug in penstock",
            rule="confirmed",
        )
    took = timeline.makespan
    proved = certain(bound.makespan, took, search.described)
    certificate = Certificate(placement, "split" if split else "whole")
    return Plan(schedule, took, took, proved, certificate, time.perf_counter() - began, search.how, timeline)


@dataclass
class _Search:
    """The best so far."""

    flow: Flow
    counts: Sequence[int]
    caps: list[float]
    lower_bound: float
    good_enough: float
    began: float
    progress: Callable[[Progress], None] | None
    timed: list[Instance] = field(default_factory=list)
    makespan: float = math.inf
    how: str = ""
    repetend: Repetend | None = None

    def consider_serial(self) -> None:
        """One turn after the other: long, but there, and what needs least memory."""
        turns = range(max(self.counts))
        sequence = [(b, turn) for turn in turns for b, count in enumerate(self.counts) if turn < count]
        for rank, (peak, cap) in enumerate(zip(peaks(self.flow, sequence), self.caps, strict=True)):
            if not is_within(peak, cap):
                raise ScheduleError(
                    f"rank {rank} holds {peak:g} for one microbatch, its shared stages counted, but may hold {cap:g} "
                    "(rule: memory); raise the limit or share the stages among more ranks",
                    rule="memory",
                    rank=rank,
                )
        self.consider(retimed(self.flow, sequence), "serial")

    def consider(self, timed: list[Instance], how: str) -> None:
        """Keeps what is better than the best so far."""
        value = makespan(self.flow, timed)
        if value < self.makespan:
            self.lower_bound = certain(self.lower_bound, value, self.described)
            self.timed, self.makespan, self.how = timed, value, how
            if self.progress is not None:
                self.progress(Progress(how, time.perf_counter() - self.began, value, self.lower_bound))

    def described(self) -> str:
        """The problem in words, for a report."""
        return f"{self.flow!r} run {list(self.counts)} times, caps {self.caps}"

    def consider_repetend(self, repetend: Repetend) -> bool:
        """The same for a steady state; says whether better ones are wanted."""
        sequence = repetend.sequence(self.counts)
        if fits(self.flow, sequence, self.caps):
            timed = retimed(self.flow, sequence)
            if repetend.flow == self.flow and makespan(self.flow, timed) < self.makespan:
                self.repetend = repetend
            self.consider(timed, "repetend")
        return self.makespan > self.good_enough


def _repetends(search: _Search, least_period: float, deadline: float, seed: int) -> None:
    """Steady states of the shortest period there is one for, or that one was found for.

    Without caps one turn a period is enough. With them, several turns that are not alike can take turns in a
    period that is shorter for each.
    """
    if search.makespan <= search.good_enough:
        return
    cp_sat()
    copies, period = 1, _shortest(search, search.flow, least_period, None, deadline, seed)
    while period is not None and copies < _MOST_COPIES and min(search.caps) < math.inf:
        copies += 1
        flow = search.flow.repeated(copies)
        shorter = _shortest(search, flow, copies * least_period, copies * period, deadline, seed)
        period = period if shorter is None else min(period, shorter / copies)


def _shortest(
    search: _Search, flow: Flow, least: float, known: float | None, deadline: float, seed: int
) -> float | None:
    """The shortest period (ms) found for `flow`: no shorter than `least`, and shorter than `known` where given."""
    units = units_of(flow)
    period = max(units.ceil(least), max(sum(units.durations[b] for b in row) for row in flow.on_rank))
    too_short, step = period - 1, max(1, period // 64)
    longest = units.ceil(flow.latency + sum(b.duration for b in flow.blocks))
    shortest = None if known is None else units.ceil(known)
    found = False
    if shortest is not None:
        period = (shortest + too_short) // 2
    while too_short < period <= longest:
        left = deadline - time.perf_counter()
        if left <= 0.01 or search.makespan <= search.good_enough:
            break
        seen = False
        hint = search.repetend if flow is search.flow else None

        def consider(repetend: Repetend) -> bool:
            nonlocal seen
            seen = True
            return search.consider_repetend(repetend)

        # A part of what is left, so that a period that can be neither met nor refuted does not eat it all.
        find_repetends(flow, units, period, search.caps, left / 3, consider, hint=hint, seed=seed)
        if seen:
            shortest, found = period, True
        else:
            too_short = period
        if shortest is None:
            period, step = period + step, 2 * step
        elif shortest - too_short > max(1, shortest // _PERIOD_STEPS):
            period = (shortest + too_short) // 2
        else:
            break
    return shortest * units.unit if found and shortest is not None else None
