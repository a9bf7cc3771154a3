"""Plans stages that branch and join, and stages and registered ops that several ranks run together.

    starts       the library's schedule, rules, one turn after the other
    bound        what no schedule can undercut
    walked       local search over one sequence of all ops
    exact        the shortest order of all ops, and a bound

Each step stops when the bound is met or its share of the time is spent. The last needs CP-SAT (extra `exact`);
without it its time goes to local search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from typing import Any

import numpy as np

from penstock.cost import CostError, Costs, Links
from penstock.cost.cut import partition
from penstock.dispatch.queues import Lister, depths, rows_of
from penstock.engine.memory import peaks_in_sequence
from penstock.engine.network import Array
from penstock.library import SCHEDULES
from penstock.planning import exact
from penstock.planning.annealing import Annealer, Incumbent, annealed
from penstock.planning.bounds import OpArrays
from penstock.planning.graph import sequence as sequences
from penstock.planning.graph.bounds import lower_bound, op_arrays
from penstock.planning.graph.problem import GraphProblem, pose_graph
from penstock.planning.metropolis import Cooling
from penstock.planning.options import Limits, PlanRequest, limits_of
from penstock.planning.result import Certificate, Plan, Progress, certain, confirmed
from penstock.program import Program, Rules, breadth_first, by_microbatch, depth_first, earliest_first
from penstock.schedule import Placement, Schedule, ScheduleError, StageGraph, check
from penstock.schedule.placement import num_ranks_of
from penstock.simulation import simulate

_WALKED_SHARE, _EXACT_SHARE = 0.2, 0.8
"""Shares of the time left that a step takes; what is left after them goes to local search again."""
_LIMIT = {True: "max_in_flight", False: "memory_limit"}
"""The option of `Rules` for limits that count activations, and for others."""


@dataclass
class GraphSearch(Incumbent[GraphProblem]):
    """The state of a search.

    Attributes:
        sequence: the best so far, ops by their starts.
    """

    sequence: Array = None

    def take(self, sequence: Any, how: str) -> None:
        """Keeps a sequence of queue ids if it is the best so far and within the caps.

        Raises:
            ScheduleError: its value is below the bound, so that one of the two is wrong.
        """
        value, start = self.problem.placed(sequence)
        if self.improves(value, how):
            # The same rows, in which ops start one after the other.
            self.sequence = np.asarray(sequence)[np.argsort(start[self.problem.ops_of(sequence)], kind="stable")]
            self.report(how)

    def op_arrays(self) -> OpArrays:
        return op_arrays(self.problem)

    def start(self) -> Array:
        """When each op of the best so far starts (ms)."""
        return self.problem.placed(self.sequence)[1]

    def take_start(self, start: Array, how: str) -> None:
        """Keeps the sequence in which ops start at some moments, if it runs within the caps and is the best so far.

        Of ops that start together those of no length go first, in the order they have now.
        """
        network = self.problem.network
        of_place = self.problem.ops_of(self.sequence)
        takes_time = np.repeat(network.duration, network.size)[of_place] > 0
        self.take(self.sequence[np.lexsort((takes_time, start[of_place]))], how)


def begin(
    problem: GraphProblem,
    starts: Iterable[tuple[Any, str]],
    more_starts: Iterable[tuple[Any, str]],
    until: float,
    seed: int,
    stop_at_gap: float,
    on_progress: Callable[[Progress], None] | None,
    began: float,
) -> GraphSearch:
    """A search with its first orders and its bound.

    Args:
        starts: sequences of queue ids, and the names of what made them; those above the caps are left out.
        more_starts: the same, which are made only as long as there is time and a gap.
        until: seconds, since it began, from which none of these is made any more.

    Raises:
        ScheduleError: none of them is within the caps.
    """
    search = GraphSearch(problem, 0.0, seed, stop_at_gap, None, began)
    for sequence, how in starts:
        search.take(sequence, how)
    bounded = search.sequence is not None
    if bounded:
        search.improve_bound(lower_bound(problem, search.value))
    for sequence, how in () if search.closed else more_starts:
        search.take(sequence, how)
        if search.closed or (search.sequence is not None and search.seconds > until):
            break
    if search.sequence is None:
        held = _peaks(problem, problem.serial())
        r = int(np.argmax(held - problem.cap))
        raise ScheduleError(
            f"rank {r} holds {held[r]:g} for one microbatch, all its stages counted, but may hold {problem.cap[r]:g} "
            "(rule: memory); raise the limit, or place fewer stages there or share them among more ranks",
            rule="memory",
            rank=r,
        )
    search.on_progress = on_progress
    if not bounded:
        search.improve_bound(lower_bound(problem, search.value))
    return search


def run(search: GraphSearch) -> bool:
    """Searches on until the gap is closed or the time of the search is over.

    Returns whether it came to that end: an interrupt from the keyboard ends it too, and what was found till then
    stands.
    """
    try:
        search.report(search.how)
        annealed(search, SequenceWalk, search.seconds + _WALKED_SHARE * search.left)
        if exact.available() and search.problem.num_ops <= exact.MOST_OPS_IF_SEVERAL:
            exact.lessen(search, search.seconds + _EXACT_SHARE * search.left)
        annealed(search, SequenceWalk, search.until)
    except KeyboardInterrupt:
        return False
    return True


def _peaks(problem: GraphProblem, sequence: Sequence[int]) -> Array:
    """Most that each row holds."""
    ops = ((problem.graph.hosts(q), problem.takes[q], problem.gives[q]) for q in sequence)
    return np.array(peaks_in_sequence(ops, len(problem.cap)))


def library_starts(problem: GraphProblem, split: bool) -> Iterator[tuple[list[int], str]]:
    """The library's schedules of these stages and ranks: a plan is no worse than one that is within the caps."""
    graph, stages = problem.graph, problem.graph.stage_graph
    name, option = "mllm", dict[str, Any]()
    if stages is not None:
        if not stages.registered:
            return
        first, *more = stages.registered
        ends = [stage for stage in range(stages.num_stages) if not stages.targets[stage]]
        every, rest = divmod(len(graph.microbatch_pipeline), first.num_ops)
        if more or rest:
            return
        branches = [end - start for start, end in pairwise([-1, *ends])]
        name, option = "distmm", {"branches": branches, "gather_every": every, "overlap": first.asynchronous}
    with suppress(ScheduleError):
        schedule = SCHEDULES[name](graph.num_ranks, len(graph.microbatch_pipeline), **option)  # plans are checked
        if schedule.placement == graph.placement and schedule.stage_graph == stages:
            sequence = _sequence_of(problem, split_backwards(schedule) if split else schedule)
            if sequence is not None:
                yield sequence, name


def split_backwards(schedule: Schedule) -> Schedule:
    """Every B as I with its W right behind it, which takes as long where B takes no less than both."""
    rows = tuple(
        tuple(
            each
            for op in row
            for each in ((op._replace(kind="I"), op._replace(kind="W")) if op.kind == "B" else (op,))
        )
        for row in schedule.order
    )
    return replace(schedule, order=rows)


def _sequence_of(problem: GraphProblem, schedule: Schedule) -> list[int] | None:
    try:
        return problem.lined_up(rows_of(problem.graph, schedule))
    except ValueError:
        return None


def rule_starts(
    problem: GraphProblem, costs: Costs, links: Links, limits: Limits, split: bool, counted: bool
) -> Iterator[tuple[list[int], str]]:
    """Orders by simple rules, under the caps."""
    graph = problem.graph
    number = len(graph.microbatch_pipeline)
    most: Any = None if min(limits.cap) == float("inf") else list(limits.cap[: num_ranks_of(graph.placement)])
    for kinds, traversal in product(
        ("backward-first", "forward-first", "interleaved"),
        (breadth_first(), depth_first(), earliest_first(), by_microbatch()),
    ):
        rules = Rules(kinds, forward=traversal, backward=traversal, **{_LIMIT[counted]: most})
        try:
            program = Program(graph.placement, number, rules, split, costs, links, graph.stage_graph)
            lowered = program.queues()
            listed = Lister(lowered).list_by_rules(program.tables(lowered))
        except (ScheduleError, CostError):
            return  # limits that leave no room for rules, or ranks that host nothing
        if listed.complete and lowered.labels == graph.labels:
            rows = listed.copy_rows()
            idle: list[list[int]] = [[] for _ in range(graph.num_ranks - lowered.num_ranks)]
            rows = [*rows[: lowered.num_ranks], *idle, *rows[lowered.num_ranks :]]
            if (sequence := problem.lined_up(rows)) is not None:
                yield sequence, "rules"


class SequenceWalk(Annealer[GraphSearch]):
    """One thread's walk. Temperatures are shares of the mean duration of an op."""

    MODULE, MOVES, HOT, COLD = sequences, (20_000.0, 5e6), 0.6, 0.05

    def __init__(self, problem: GraphProblem, seed: int) -> None:
        super().__init__(problem, seed)
        self._problem = problem
        self._space, self._trial_space = problem.space(), problem.space()
        self._now, self._trial, self.best_sequence = np.empty((3, problem.num_ops), np.int64)
        self.best = float("inf")

    @property
    def unit(self) -> float:
        return self._problem.scale

    def begin(self, search: GraphSearch, until: float) -> None:
        self._now[:] = self.best_sequence[:] = search.sequence
        self.best = search.value

    def move(self, cooling: Cooling, done: float) -> int:
        problem = self._problem
        self.best, moved = self._module.walk(
            problem.network, problem.more, self._now, self._trial, self._space, self._trial_space,
            self.best, self.best_sequence, cooling,
        )  # fmt: skip
        return int(moved)

    def bring(self, search: GraphSearch) -> None:
        if self.best < search.value:
            search.take(self.best_sequence, "local search")


_CHOOSING_SHARE = 0.3
"""Of the time, for trying placements where none is given."""
_STARTS_SHARE = 0.2
"""Of the time, for first orders besides the first."""
_PROOF_SECONDS_AN_OP = 4e-5


def plan_graph(request: PlanRequest) -> Plan:
    """The best schedule found.

    Tessel's MLLM on four ranks (F, E, H and their backwards 1 ms, B 3 ms):

        everyone = (0, 1, 2, 3)
        placement = Placement(((0, 0, 1, 2, 3, 0),), shared=((0, everyone), (5, everyone)))
        costs = Costs(f=[1] * 6, i=[0] * 6, w=[0] * 6, b=[1, 3, 3, 3, 3, 1])
        ps.plan(costs, 4, 12, placement=placement, split=False).makespan       # 8 * 12 + 12, proved

    Where `split` is left open, backwards are all split or all whole, whichever turns out shorter.

    Raises:
        ScheduleError: a cap below what one microbatch holds, or ops that plans do not take.
    """
    began, time_limit = time.perf_counter(), float(request.time_limit)
    costs, num_ranks, links, split = request.costs, request.num_ranks, request.links, request.split
    forms = [split] if split is not None else [True]
    if split is None and any(costs.b[s] < costs.i[s] + costs.w[s] for s in range(costs.num_stages)):
        forms.append(False)
    counted = request.max_in_flight is not None

    def limits(form: bool) -> Limits:
        return limits_of(costs, None, num_ranks, request.max_in_flight, request.memory_limit, form)

    def begin_on(where: Placement, form: bool) -> GraphSearch:
        posed = pose_graph(
            costs, where, num_ranks, request.num_microbatches, links, limits(form), form, request.stages, counted
        )
        starts = chain([(posed.serial(), "serial")], library_starts(posed, form))
        by_rules = rule_starts(posed, costs, links, limits(form), form, counted)
        until = time.perf_counter() - began + _STARTS_SHARE * time_limit
        return begin(posed, starts, by_rules, until, request.seed, request.stop_at_gap, request.progress, began)

    placement = request.placement
    if placement is None:
        assert request.stages is not None
        deadline = began + _CHOOSING_SHARE * time_limit
        placement = _chosen(
            placements_of(costs, request.stages, num_ranks), lambda where: begin_on(where, forms[0]), deadline
        )
    found: list[tuple[float, int, GraphSearch]] = []
    for number, each in enumerate(forms):
        search = begin_on(placement, each)
        spared = _PROOF_SECONDS_AN_OP * search.problem.num_ops
        search.until = search.seconds + (time_limit - spared - search.seconds) / (len(forms) - number)
        interrupted = not run(search)
        found.append((search.value, number, search))
        if interrupted:
            break
    _, number, search = min(found, key=lambda one: one[:2])
    form = forms[number]
    schedule = search.problem.schedule(search.sequence, "plan", limits(form).in_flight)
    check(schedule)
    timeline = simulate(schedule, costs, links=links)
    took = confirmed("makespan", search.value, timeline)
    certificate = Certificate(placement, "split" if form else "whole", stages=request.stages)
    proved, seconds = certain(search.lower_bound, took), time.perf_counter() - began
    return Plan(schedule, took, took, proved, certificate, seconds, search.how, timeline, None, interrupted)


def _chosen(places: Sequence[Placement], begin: Callable[[Placement], GraphSearch], deadline: float) -> Placement:
    """Of several placements that whose first orders are shortest after a moment of search.

    Raises:
        ScheduleError: none leaves room within the limits.
    """
    found: list[tuple[float, int, Placement]] = []
    refused: ScheduleError | None = None
    for number, where in enumerate(places):
        left = deadline - time.perf_counter()
        if found and left <= 0:
            break
        try:
            search = begin(where)
        except ScheduleError as error:
            refused = error
            continue
        search.on_progress = None
        until = search.seconds + max(0.0, deadline - time.perf_counter()) / (len(places) - number)
        annealed(search, SequenceWalk, until)
        found.append((search.value, number, where))
    if not found:
        assert refused is not None
        raise refused
    return min(found)[2]


def placements_of(costs: Costs, stages: StageGraph, num_ranks: int) -> list[Placement]:
    """Placements worth trying, each rank with at least one stage where there are as many.

    Four rules: stages in the order of their depth, cut into parts of about the same work; the same by number, so
    that each branch lies on ranks of its own; dealt to the ranks in turn, by depth; and each stage, the longest
    first, on the rank with least work so far.
    """
    num_stages = stages.num_stages
    work = [costs.f[s] + min(costs.b[s], costs.i[s] + costs.w[s]) for s in range(num_stages)]
    depth = depths(stages)
    by_depth = sorted(range(num_stages), key=lambda s: (depth[s], s))
    rows = [
        _cut(by_depth, work, num_ranks),
        _cut(list(range(num_stages)), work, num_ranks),
        [by_depth.index(stage) % num_ranks for stage in range(num_stages)],
        _packed(work, num_ranks),
    ]
    found: list[Placement] = []
    for row in rows:
        if (placement := Placement((tuple(row),))) not in found:
            found.append(placement)
    return found


def _cut(order: list[int], work: list[float], num_ranks: int) -> list[int]:
    """Stages in an order, cut into parts of about the same work."""
    row = [0] * len(order)
    for rank, part in enumerate(partition([work[stage] for stage in order], min(num_ranks, len(order)))):
        for place in part:
            row[order[place]] = rank
    return row


def _packed(work: list[float], num_ranks: int) -> list[int]:
    row, load = [0] * len(work), [0.0] * num_ranks
    for stage in sorted(range(len(work)), key=lambda s: -work[s]):
        row[stage] = min(range(num_ranks), key=lambda r: (load[r], r))
        load[row[stage]] += work[stage]
    return row
