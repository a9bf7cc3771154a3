"""Searches the layouts of branches side by side: how many devices each branch has, and how it is placed on them.

Each tower of a model (such as CLIP) is a branch. A branch has several possible layouts: over more or fewer ranks, in
more or fewer replicas, with smaller or larger microbatches, with one or more stages per rank. A layout of the whole
model has one for each branch, which together take all devices:

    ways of `audio`     least 180 ms, 16 devices     least 190 ms, 32 devices     ...
    ways of `text`      least  90 ms,  8 devices     least 200 ms, 24 devices     ...
    layouts             190 ms (32 + 8)     200 ms (16 + 24)     ...      by the larger of their bounds

Layouts are simulated in the order of their lower bounds, the smallest first. The search ends at the first whose bound
is no less than the best time so far. So it finds the same as if it tried all of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np

from penstock.cost import CostError, Costs, Links
from penstock.dispatch.queues import Lister
from penstock.planning.bounds import quick_bound
from penstock.program import Branch, NewOp, Program
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.placement import num_ranks_of
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Timeline, simulate

__all__ = ["BranchLayout", "FoundLayout", "rank_branches", "search_branches"]

OpsOf = Callable[[Mapping[str, "BranchLayout"]], Sequence[NewOp]]
"""Gives the ops besides those of the branches, for the chosen layouts of the branches."""

AlsoOf = Callable[[Mapping[str, "BranchLayout"]], Mapping[str, "BranchLayout"]]
"""Gives the branches that run on the ranks of others, for the chosen layouts."""


@dataclass(frozen=True)
class BranchLayout:
    """One way in which a branch may lie.

    Attributes:
        branch: placement, microbatches and rules of one replica of it.
        costs: of its stages.
        num_devices: how many it takes: its ranks in all replicas. A branch on ranks of others, which its `ranks`
            name, takes none.
        links: between its ranks, counted from 0.
        tail: ms that each of its ranks works after its last op, for reducing gradients and the update.
        state: bytes or activation units that each of its ranks holds besides activations.

    Raises:
        CostError: costs for another number of stages.
        ScheduleError: fewer devices than ranks.

    Examples:
        >>> import penstock as ps
        >>> from penstock.planning import BranchLayout
        >>> way = BranchLayout(ps.Branch(ps.placements.one_to_one(2), 4), ps.Costs.uniform(2), num_devices=2)
        >>> way.least_ms(split=False), way.least_ms(split=True)
        (15.0, 13.0)
    """

    branch: Branch
    costs: Costs
    num_devices: int
    links: Links = field(default_factory=Links)
    tail: float = 0.0
    state: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        self.costs.require_stages(self.branch.placement.num_stages, "the branch has")
        if self.num_devices < self.num_ranks and not (self.branch.ranks and self.num_devices == 0):
            raise ScheduleError(
                f"a branch over {self.num_ranks} ranks has {self.num_devices} devices; give each rank one at least",
                rule="placement",
            )

    @property
    def num_ranks(self) -> int:
        """Of one replica."""
        return len({rank for ranks in self.branch.placement.pipelines for rank in ranks})

    def least_ms(self, split: bool) -> float:
        """No schedule takes less: a rank waits for a first forward, and does its work. Where backwards are whole, its
        last op is a backward of its lowest stage, and those of the stages before that come after it.
        """
        costs, n = self.costs, self.branch.num_microbatches
        placement = self.branch.placement
        work = [f + (i + w if split else b) for f, i, w, b in zip(costs.f, costs.i, costs.w, costs.b, strict=True)]
        bound = quick_bound(np.array([[n]]), placement, num_ranks_of(placement), costs.f if split else work, work)
        return float(bound[0]) + self.tail


@dataclass(frozen=True)
class FoundLayout:
    """The best layout of branches.

    Attributes:
        ways: by branch.
        program: of one replica of each.
        schedule: what it makes, checked.
        timeline: the schedule, simulated.
        step_ms: from the first op until every rank has done what comes after its last one.
        peaks: what each rank holds at most.
        num_tried: layouts run through time.

    Examples:
        >>> import penstock as ps
        >>> from penstock.planning import BranchLayout, search_branches
        >>> def ways(layer_ms, num_layers):
        ...     for ranks in (1, 2, 3, 4):
        ...         ms = layer_ms * num_layers / ranks
        ...         branch = ps.Branch(ps.placements.one_to_one(ranks), num_microbatches=8)
        ...         yield BranchLayout(branch, ps.Costs.uniform(ranks, f=ms, i=ms, w=ms), num_devices=ranks)
        >>> towers = {"audio": list(ways(2, 12)), "text": list(ways(1, 12))}
        >>> found = search_branches(towers, num_devices=6, split=True)
        >>> {name: way.num_ranks for name, way in found.ways.items()}, found.step_ms
        ({'audio': 4, 'text': 2}, 162.0)
    """

    ways: Mapping[str, BranchLayout]
    program: Program
    schedule: Schedule
    timeline: Timeline
    step_ms: float
    peaks: tuple[float, ...]
    num_tried: int

    __repr__ = short_repr


def search_branches(
    ways: Mapping[str, Sequence[BranchLayout]], num_devices: int, **options: Any
) -> FoundLayout | None:
    """The layout of branches whose step is shortest: a way for each, which together take all devices.

    Args:
        ways: by branch, in the order in which branches get their ranks; branches may feed others.
        num_devices: of all branches.
        options: of `rank_branches`.

    Returns:
        None where no layout takes all devices, fits, and stays below.

    Raises:
        ScheduleError: no branches.

    Examples:
        >>> import penstock as ps
        >>> from penstock.planning import BranchLayout, search_branches
        >>> def ways(work):
        ...     for p in (1, 2, 3):
        ...         branch = ps.Branch(ps.placements.one_to_one(p), 4)
        ...         yield BranchLayout(branch, ps.Costs.uniform(p, f=work / p, i=work / p, w=work / p), p)
        >>> found = search_branches({"audio": list(ways(6)), "text": list(ways(2))}, 4)
        >>> [way.num_ranks for way in found.ways.values()], found.step_ms
        ([3, 1], 36.0)

    References:
        FlexPipe, sections 6 and 7.2: towers of several modalities, each with ranks and microbatches of its own.
    """
    found = rank_branches(ways, num_devices, 1, **options)
    return found[0] if found else None


def rank_branches(
    ways: Mapping[str, Sequence[BranchLayout]],
    num_devices: int,
    num_best: int,
    *,
    split: bool = False,
    ops: OpsOf = lambda chosen: (),
    also: AlsoOf = lambda chosen: {},
    memory_limit: float | None = None,
    below: float = inf,
    most_tried: int | None = None,
) -> list[FoundLayout]:
    """The layouts of branches with the shortest steps, the shortest first.

    Args:
        ways: by branch, in the order in which branches get their ranks; branches may feed others.
        num_devices: of all branches.
        num_best: layouts to return at most.
        split: whether backwards are halved.
        ops: what else runs, such as a gather of the outputs of all branches.
        also: branches on ranks of the others, such as one that all of them feed; they take no devices.
        memory_limit: bytes or activation units that a rank may hold, `state` included.
        below: ms that the steps must stay under.
        most_tried: layouts to run through time at most; by default as many as it takes to be sure.

    Returns:
        None of those left out has a shorter step, unless `most_tried` ended the search.

    Raises:
        ScheduleError: no branches.

    Examples:
        >>> import penstock as ps
        >>> from penstock.planning import BranchLayout, rank_branches
        >>> ways = [BranchLayout(ps.Branch(ps.placements.one_to_one(p), 4), ps.Costs.uniform(p), p) for p in (1, 2)]
        >>> [layout.step_ms for layout in rank_branches({"audio": ways, "text": ways}, 3, 2)]
        [15.0, 15.0]
    """
    if not ways:
        raise ScheduleError("a search of no branches: give at least one", rule="stages")
    best: list[FoundLayout] = []
    tried = 0
    for bound, chosen in _ascending(ways, num_devices, split):
        if bound >= below or (most_tried is not None and tried >= most_tried):
            break
        tried += 1
        more = dict(also(chosen))
        every = {**chosen, **more}
        program = Program.of_branches(
            {name: way.branch for name, way in every.items()},
            split=split,
            costs=joined_costs([way.costs for way in every.values()]),
            links=_joined_links(list(chosen.values())),
            ops=ops(chosen),
            name="branches",
        )
        graph = program.queues()
        try:
            lister = Lister(graph)
            makespan = lister.list_by_rules(program.tables(graph)).makespan
        except ScheduleError:  # a cap below what one microbatch needs
            continue
        found = _built(chosen, more, program, memory_limit, below) if makespan < below else None
        if found is not None:
            insort(best, found, key=lambda each: each.step_ms)
            del best[num_best:]
            if len(best) == num_best:
                below = best[-1].step_ms
    return [replace(each, num_tried=tried) for each in best]


def _ascending(
    ways: Mapping[str, Sequence[BranchLayout]], num_devices: int, split: bool
) -> Iterator[tuple[float, dict[str, BranchLayout]]]:
    """Layouts that take all devices, by the largest bound of their ways, the smallest first."""
    order = [(way.least_ms(split), name, way) for name, those in ways.items() for way in those]
    seen: dict[str, dict[int, list[BranchLayout]]] = {name: {} for name in ways}
    for bound, name, way in sorted(order, key=lambda each: each[0]):
        others = [other for other in ways if other != name]
        for chosen in _fill(seen, others, num_devices - way.num_devices):
            yield bound, {each: way if each == name else chosen[each] for each in ways}
        seen[name].setdefault(way.num_devices, []).append(way)


def _fill(
    seen: Mapping[str, Mapping[int, Sequence[BranchLayout]]], names: Sequence[str], num_devices: int
) -> Iterator[dict[str, BranchLayout]]:
    """Layouts of some branches that take so many devices."""
    if not names:
        if num_devices == 0:
            yield {}
        return
    first, *rest = names
    for count, those in seen[first].items():
        for chosen in _fill(seen, rest, num_devices - count) if count <= num_devices else ():
            for way in those:
                yield {first: way, **chosen}


def _built(
    chosen: Mapping[str, BranchLayout],
    also: Mapping[str, BranchLayout],
    program: Program,
    memory_limit: float | None,
    below: float,
) -> FoundLayout | None:
    """The layout with its schedule, checked; None if it does not fit, or takes too long with its tails."""
    schedule = program.build()
    timeline = simulate(schedule, program.all_costs, links=program.links)
    of_ranks = [way for way in chosen.values() for _ in range(way.num_ranks)]
    tails, state = [way.tail for way in of_ranks], [way.state for way in of_ranks]
    for way in also.values():
        for rank in way.branch.ranks or ():
            tails[rank] += way.tail
            state[rank] += way.state
    step = max(row[-1].end + tail for row, tail in zip(timeline.rows, tails, strict=True))
    peaks = tuple(held + own for held, own in zip(timeline.peak_activations, state, strict=True))
    if step >= below or (memory_limit is not None and max(peaks) > memory_limit):
        return None
    return FoundLayout(dict(chosen), program, schedule, timeline, step, peaks, 0)


def joined_costs(costs: Sequence[Costs]) -> Costs:
    """The costs of several branches, with stages numbered branch by branch.

    Raises CostError if I frees another share of activations in one than in another.
    """
    freed = {each.freed_by_input for each in costs}
    if len(freed) > 1:
        raise CostError(
            f"I frees {min(freed):g} of the activations in one branch and {max(freed):g} in another; give all "
            "branches costs with one freed_by_input"
        )
    rows = ["f", "i", "w", "activation", "message_bytes"]
    rows += ["weight_bytes"] if all(each.weight_bytes for each in costs) else []
    joined: dict[str, Any] = {row: [size for each in costs for size in getattr(each, row)] for row in rows}
    whole = [each.duration("B", stage) for each in costs for stage in range(each.num_stages)]
    return Costs(**joined, b=whole, freed_by_input=freed.pop())


def _joined_links(ways: Sequence[BranchLayout]) -> Links:
    """Links between all ranks, numbered branch by branch; between branches those of `Links()`."""
    firsts = accumulate((way.num_ranks for way in ways), initial=0)
    delays: dict[tuple[int, int], float] = {}
    for way, first in zip(ways, firsts, strict=False):
        pairs = ((a, b) for a in range(way.num_ranks) for b in range(way.num_ranks) if a != b)
        delays |= {(first + a, first + b): way.links.delay(a, b) for a, b in pairs}
    return Links(delays)
