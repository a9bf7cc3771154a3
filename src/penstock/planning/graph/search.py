"""The search of any stages: starts, local search, and, where CP-SAT is there, the exact order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from penstock.cost import CostError, Costs, Links
from penstock.dispatch.queues import Lister, rows_of
from penstock.engine.memory import peaks_in_sequence
from penstock.engine.network import Array
from penstock.library import SCHEDULES
from penstock.planning import exact, order_model
from penstock.planning.annealing import Annealer, annealed
from penstock.planning.graph import sequence as sequences
from penstock.planning.graph.bounds import lower_bound, op_arrays
from penstock.planning.graph.problem import GraphProblem
from penstock.planning.metropolis import Cooling
from penstock.planning.op_arrays import OpArrays
from penstock.planning.options import Limits
from penstock.planning.progress import Incumbent, Progress
from penstock.program import Program, Rules, breadth_first, by_microbatch, depth_first, earliest_first
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.placement import num_ranks_of

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
            self.sequence = self.problem.sorted_by_start(sequence, start)
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
        if order_model.available() and search.problem.num_ops <= exact.MOST_OPS_IF_SEVERAL:
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
    options: dict[str, dict[str, Any]] = {}
    if stages is None:
        options["mllm"] = {}
    elif stages.registered:
        first, *more = stages.registered
        ends = [stage for stage in range(stages.num_stages) if not stages.targets[stage]]
        every, rest = divmod(len(graph.microbatch_pipeline), first.num_ops)
        if not more and not rest:
            branches = [end - start for start, end in pairwise([-1, *ends])]
            options["distmm"] = {"branches": branches, "gather_every": every, "overlap": first.asynchronous}
    for name, option in options.items():
        try:
            schedule = SCHEDULES[name](graph.num_ranks, len(graph.microbatch_pipeline), **option)  # plans are checked
        except ScheduleError:
            continue
        if schedule.placement != graph.placement or (schedule.stage_graph or None) != stages:
            continue
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
