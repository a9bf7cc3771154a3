"""Searches the space of programs: every placement, rule and traversal, each with its gradients separated.

This is FlexPipe's search (sections 5.2, 6 and 7.1) over (placement, kinds, forward traversal, backward traversal).
The values are those of its Table 2, and the interval is the number of ranks if the placement is circular. Here the
compiled decision core simulates each point over the real costs and under the memory cap, with I before W in every
bubble. The point with the shortest makespan wins.

The space has more than the paper's: wave and combined placements; warm-ups of the zero-bubble kind; and, as
traversals, the order in which work became ready and the order of microbatches. If memory is short on a V,
there are also caps on each stage in proportion to how long its activations live, and the library's own
schedules for such memory.

A limit of bytes counts all that a rank holds. Weights, gradients and the optimizer's state follow from the placement,
and the rest of the limit is the cap for activations. How much messages take is known only when a program has run. If
the fastest program exceeds the limit with them, the placement is searched again with that much less room.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf

from penstock.cost import CostError, Costs, Links
from penstock.dispatch.queues import QueueGraph
from penstock.engine.list_by_rules import EARLIEST, IN_ORDER
from penstock.engine.memory import peaks
from penstock.engine.tolerance import is_within
from penstock.library import build
from penstock.planning.options import MOST_AGAIN, per_rank, require_one_limit, require_weights
from penstock.planning.program_space import check_names, fold, least_of, parts_of, placements_of, rules_of, work_of
from penstock.program import Program, Rules, placements
from penstock.program.rules import Traversal
from penstock.schedule import Placement, Schedule, ScheduleError
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Footprint, Timeline, footprint, room_for_activations, simulate
from penstock.simulation.lister import Lister, rows_of
from penstock.simulation.memory_footprint import in_bytes

COMPILE_ABOVE = 100_000
"""Ops of a whole search from which on it pays to load compiled code."""
LOOKED_AT = 4
"""Additional programs of a placement whose messages are counted before it is searched again."""
V = "v-shape"
SHOWN = 8
"""Most numbers that a name shows completely."""
CONSTRUCTED = ("zb-v", "v-half", "v-min")
"""Library schedules of the V that hold less than any schedule that rules alone find."""

RulesOf = Callable[[str, Placement, int], Iterable[Rules]]
"""Gives the rules to try on a placement, from its name, the placement and the number of microbatches."""


@dataclass(frozen=True)
class Found:
    """One point of the space.

    Attributes:
        placement: its name.
        program: what to build. If `constructed` is given, only its placement and costs count.
        constructed: the library schedule that this is, or None.
        makespan: ms.
        number: distinguishes programs of one placement whose names would be the same; 1 for the first.

    Examples:
        >>> import penstock as ps
        >>> outcome = ps.planning.search_space(ps.Costs.uniform(4), num_ranks=2, num_microbatches=4)
        >>> outcome.best.placement in {each.placement for each in outcome.found}
        True
    """

    placement: str
    program: Program
    makespan: float
    constructed: Schedule | None = None
    number: int = 1

    __repr__ = short_repr

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, built and checked."""
        return self.constructed or self.program.build()

    @property
    def name(self) -> str:
        """Its name: the placement and the rules, or the library's name. It is unique in an outcome."""
        if self.constructed is not None:
            return self.constructed.name
        rules = self.program.rules
        assert isinstance(rules, Rules)
        words = [self.placement, rules.kinds, f"F {_words(rules.forward)}", f"B {_words(rules.backward)}"]
        if rules.warmup is not None:
            words.append(f"warm-up {_numbers(rules.warmup)}")
        if isinstance(rules.max_in_flight, Mapping):
            words.append(f"in flight by stage {_numbers(rules.max_in_flight.values())}")
        elif rules.max_in_flight is not None and not callable(rules.max_in_flight):
            words.append(f"in flight {_numbers(rules.max_in_flight)}")
        return ", ".join(words) + (f" (no. {self.number})" if self.number > 1 else "")

    @property
    def timeline(self) -> Timeline:
        """When each op runs, simulated under the costs and links of the search."""
        return simulate(self.schedule, self.program.all_costs, links=self.program.links)

    @property
    def bubble_ratio(self) -> float:
        """`1 - sum(busy) / (num_ranks * makespan)` of the simulated schedule."""
        return self.timeline.bubble_ratio

    @cached_property
    def footprint(self) -> Footprint:
        """What each rank holds in all, in bytes. Raises CostError if the costs do not say what weights take."""
        return footprint(self.schedule, self.program.all_costs, self.program.links)


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        found: the best of each placement, the shortest makespan first; empty if no program is shorter than asked.
        num_tried: points that were simulated.
        num_stuck: how many of them deadlocked, for example under a cap that their traversal cannot keep.
        left_out: placements for which nothing was found, by name, each with the reason.

    Examples:
        >>> import penstock as ps
        >>> outcome = ps.planning.search_space(ps.Costs.uniform(4), num_ranks=2, num_microbatches=4)
        >>> outcome.best.makespan == min(each.makespan for each in outcome.found), outcome.num_tried > 0
        (True, True)
    """

    found: tuple[Found, ...]
    num_tried: int
    num_stuck: int
    left_out: tuple[tuple[str, str], ...] = ()

    __repr__ = short_repr

    @property
    def best(self) -> Found:
        """The shortest makespan of all."""
        return self.found[0]


def search_space(
    costs: Costs | Callable[[int], Costs],
    num_ranks: int,
    num_microbatches: int,
    *,
    links: Links | None = None,
    memory_limit: float | Sequence[float] | None = None,
    total_limit: float | Sequence[float] | None = None,
    shapes: Sequence[str] | None = None,
    shared_ends: bool = False,
    split: bool | Callable[[int], bool] = True,
    forward_first: bool = False,
    rules: RulesOf | None = None,
    keep: int = 1,
    below: float = inf,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """The best programs of each placement.

    Args:
        num_ranks: devices of the pipeline.
        num_microbatches: of a step.
        links: delays (ms); by default messages arrive at once.
        shared_ends: whether all ranks share the first and the last part.
        split: whether backwards are split into I and W.
        costs: of the model in `k * num_ranks` equal parts, from which stages are made by adding consecutive
            ones: a placement with v stages a rank needs k to be a multiple of v. With `shared_ends` one part
            more at either end: what is shared by all ranks (embedding and head). Or a function of the number of
            stages, for a model that is cut for each placement.
        memory_limit: most activations that a rank may hold, in the unit of the costs' activations: one number, or one
            for each rank.
        total_limit: most bytes that a rank may hold in all, as `ps.footprint` counts them: weights, gradients, the
            optimizer's state, activations and messages. One number, or one for each rank.
        shapes: names of placements to try (see `placements_of`); all by default.
        split: whether backwards are I and W; or of which stages, by number.
        forward_first: also try forward-first rules (the paper does so only when asked).
        rules: the rules to try on a placement, from its name, itself and the number of microbatches; `rules_of` by
            default. They keep to the limit besides.
        keep: how many programs of each placement; of those that take equally long only the first.
        below: only programs that take less (ms). Placements with a rank that works longer are not tried.
        progress: called with points done and points in all.

    Raises:
        ScheduleError: a shape that is not there, limits that make no sense, or no point that can run under them.
        CostError: costs in a number of parts that does not divide among the ranks, uneven microbatches, or costs that
            do not say what weights take, with a `total_limit`.

    Examples:
        >>> import penstock as ps
        >>> outcome = ps.planning.search_space(ps.Costs.uniform(8), num_ranks=4, num_microbatches=8)
        >>> outcome.best.makespan
        49.0
        >>> model = lambda num_stages: ps.cost.costs_preset("gpt2-7b", num_stages=num_stages)
        >>> outcome = ps.planning.search_space(model, 4, 8, total_limit=38 * 2**30, shapes=["v-shape"])
        >>> outcome.best.footprint.peak <= 38 * 2**30
        True
    """
    require_one_limit(memory_limit=memory_limit, total_limit=total_limit)
    caps = None if memory_limit is None else per_rank("memory_limit", memory_limit, num_ranks)
    totals = None if total_limit is None else per_rank("total_limit", total_limit, num_ranks)
    if isinstance(costs, Costs):
        num_parts = parts_of(costs, num_ranks, shared_ends)
    else:
        num_parts = max(placements.STAGES_PER_RANK.values()) * num_ranks
    layouts = placements_of(num_ranks, num_parts, shared_ends)
    check_names(shapes or (), layouts, num_ranks, num_parts)
    spaces: list[_Space] = []
    left_out: dict[str, str] = {}
    chosen = {name: placement for name, placement in layouts.items() if not shapes or name in shapes}
    uncut: list[CostError] = []
    for name, placement in chosen.items():
        try:
            own = _costs_of(costs, placement.num_stages, shared_ends)
        except CostError as error:
            if isinstance(costs, Costs):
                raise
            left_out[name] = str(error)  # a model of fewer layers
            uncut.append(error)
            continue
        room = caps
        if totals is not None:
            require_weights(own)
            try:
                room = room_for_activations(placement, own, totals)
            except CostError as error:
                left_out[name] = str(error).partition(";")[0]
                continue
        first = Program(placement, num_microbatches, Rules(), split, own, links, name=name)
        if below < inf and work_of(first) >= below:
            continue
        spaces.append(_Space(name, first, room, totals, rules, forward_first))
    if len(uncut) == len(chosen):
        raise uncut[0]
    counts = _Counts(sum(sum(1 for _ in space.rules_under(space.room)) for space in spaces), progress)
    found: list[Found] = []
    for space in spaces:
        best = space.search(keep, below, counts)
        found += best
        if not best and below == inf:
            left_out[space.name] = space.why_nothing()
    left_out = {name: left_out[name] for name in chosen if name in left_out}
    if not found and below == inf:
        raise _nothing(left_out, num_ranks, caps, totals)
    ranked = _numbered(sorted(found, key=lambda each: each.makespan))
    return Outcome(tuple(ranked), counts.tried, counts.stuck, tuple(left_out.items()))


def _nothing(
    left_out: dict[str, str], num_ranks: int, caps: Sequence[float] | None, totals: Sequence[float] | None
) -> ScheduleError:
    """The reason that the first of the placements gives."""
    (name, why), *others = left_out.items()
    likewise = f", and nothing runs on {len(others)} other placement{'s' * (len(others) > 1)}" if others else ""
    if caps is not None:
        limit, do = f" within a memory of {_numbers(caps)}", "raise the limit, in the unit of the costs' activations"
    elif totals is not None:
        sizes = dict.fromkeys(in_bytes(each, 4) for each in totals)
        limit, do = f" within {', '.join(sizes)} per rank, all counted", "raise the limit, or take more ranks"
    else:
        limit, do = "", "give rules that let ranks hold more"
    return ScheduleError(
        f"no program over {num_ranks} ranks can run{limit}: {name}: {why}{likewise}; {do}", rule="memory"
    )


def _costs_of(costs: Costs | Callable[[int], Costs], num_stages: int, shared_ends: bool) -> Costs:
    """Costs of the stages of a placement. Raises CostError for uneven ones, and if the model can't be
    cut in this way.
    """
    given = costs if isinstance(costs, Costs) else costs(num_stages)
    if given.factors:
        raise CostError(
            "search_space needs microbatches that all cost the same; leave `uneven` out, and order the microbatches "
            "of the result with ps.planning.order_microbatches"
        )
    return fold(costs, num_stages, shared_ends) if isinstance(costs, Costs) else given


@dataclass
class _Counts:
    """Counts points that have been simulated. tried: of all, as far as is known."""

    tried: int
    progress: Callable[[int, int], None] | None
    done: int = 0
    stuck: int = 0

    def ran(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.tried)


@dataclass
class _Space:
    """The programs of one placement.

    Attributes:
        first: one of them, with rules that say nothing.
        room: for activations on each rank; None for no limit.
        totals: bytes that each rank may hold in all; None where messages do not count.
        given: the rules to try, if these are not the usual ones.
        excess: by rank the most bytes of messages in programs that held too much.
    """

    name: str
    first: Program
    room: tuple[float, ...] | None
    totals: tuple[float, ...] | None
    given: RulesOf | None
    forward_first: bool
    excess: list[float] = field(default_factory=list)

    def rules_under(self, room: Sequence[float] | None) -> Iterator[Rules]:
        """The rules to try, with limits that keep to caps of activations."""
        limit = room if room is None or len(set(room)) > 1 else room[0]
        placement, count = self.first.placement, self.first.num_microbatches
        if self.given is not None:
            return (replace(each, memory_limit=limit) for each in self.given(self.name, placement, count))
        num_ranks = self.first.num_ranks
        return rules_of(self.name, placement, num_ranks, count, limit, self.first.all_costs, self.forward_first)

    def search(self, keep: int, below: float, counts: _Counts) -> list[Found]:
        """The best programs within the limits, the fastest first."""
        best: list[Found] = []
        if self.totals is None:
            for each in self._run(self.room, below, counts):
                _keep(best, each, keep)
            return best
        assert self.room is not None
        room = self.room
        self.excess = [0.0] * len(room)
        for again in range(1 + MOST_AGAIN):
            if again:
                counts.tried += sum(1 for _ in self.rules_under(room))
            ranked = self._run(room, below, counts)
            for each in ranked[: LOOKED_AT + keep]:
                if len(best) == keep and each.makespan >= best[-1].makespan:
                    break
                if self._fits(each):
                    _keep(best, each, keep)
            if not ranked or self._fits(ranked[0]):
                break
            over = ranked[0].footprint.ranks
            self.excess = [max(seen, rank.messages) for seen, rank in zip(self.excess, over, strict=True)]
            room = tuple(most - taken for most, taken in zip(self.room, self.excess, strict=True))
            if min(room) <= 0:
                break
        return best

    def why_nothing(self) -> str:
        """Why the placement has no program within the limits."""
        placement, costs, room = self.first.placement, self.first.all_costs, self.room
        if room is None:
            return "under each of the rules some rank can't go on"
        if any(self.excess):
            rank = max(range(len(room)), key=lambda r: self.excess[r])
            return (
                f"activations and messages of rank {rank} take more than {in_bytes(room[rank], 4)}, which is what "
                "its weights, gradients and optimizer state leave"
            )
        pipelines = range(placement.num_pipelines)
        needed = [
            max(
                sum(costs.activation[s] for s in range(placement.num_stages) if rank in placement.hosts(p, s))
                for p in pipelines
            )
            for rank in range(len(room))
        ]
        rank = max(range(len(room)), key=lambda r: needed[r] - room[r])
        each = "" if placement.num_pipelines == 1 else ", and one in each direction more"
        if self.totals is None:
            return f"one microbatch takes {needed[rank]:g} on rank {rank}{each}"
        return (
            f"one microbatch takes {in_bytes(needed[rank], 4)} on rank {rank}{each}, where weights, gradients and "
            f"optimizer state leave {in_bytes(room[rank], 4)}"
        )

    def _fits(self, found: Found) -> bool:
        assert self.totals is not None
        return all(held <= most for held, most in zip(found.footprint.totals, self.totals, strict=True))

    def _run(self, room: Sequence[float] | None, below: float, counts: _Counts) -> list[Found]:
        """All programs that are shorter than `below` under caps of activations, the fastest first."""
        programs = [replace(self.first, rules=each) for each in self.rules_under(room)]
        graph = self.first.queues()
        lister = Lister(graph, compile=True if graph.num_ops * counts.tried > COMPILE_ABOVE else None)
        found: list[Found] = []
        for program in programs:
            counts.done += 1
            try:
                listed = lister.list_by_rules(program.tables(graph))
            except ScheduleError:  # a cap below what one microbatch needs
                counts.stuck += 1
                continue
            if not listed.complete:
                counts.stuck += 1
            elif listed.makespan < below:
                found.append(Found(self.name, program, listed.makespan))
            counts.ran()
        found.sort(key=lambda each: each.makespan)
        in_halves = self.first.split is True and not self.first.placement.shared
        beatable = not found or found[0].makespan > least_of(self.first)
        if self.name == V and room is not None and in_halves and beatable:
            found += self._constructed(graph, room, below, counts)
            found.sort(key=lambda each: each.makespan)
        return found

    def _constructed(
        self, graph: QueueGraph, room: Sequence[float], below: float, counts: _Counts
    ) -> Iterator[Found]:
        """The library's schedules that hold no more than the caps."""
        lister = Lister(graph)
        for name in CONSTRUCTED:
            try:
                schedule = build(name, self.first.num_ranks, self.first.num_microbatches)
            except ScheduleError:  # too few microbatches for it
                continue
            counts.tried += 1
            rows = rows_of(graph, schedule)
            if not all(is_within(peak, cap) for peak, cap in zip(_peaks(graph, rows), room, strict=True)):
                continue
            makespan = lister.time_rows(rows).makespan
            if makespan < below:
                yield Found(V, self.first, makespan, schedule)


def _numbered(found: Iterable[Found]) -> Iterator[Found]:
    """The same, with numbers for those whose names would be equal."""
    seen: Counter[str] = Counter()
    for each in found:
        seen[each.name] += 1
        yield each if seen[each.name] == 1 else replace(each, number=seen[each.name])


def _keep(best: list[Found], found: Found, keep: int) -> None:
    """Puts a point among the best of its placement. Of equal ones, the first is kept."""
    if all(found.makespan != other.makespan for other in best):
        insort(best, found, key=lambda each: each.makespan)
        del best[keep:]


def _peaks(graph: QueueGraph, rows: list[list[int]]) -> Sequence[float]:
    """Most memory that each rank holds."""
    changes = [queue.memory for queue in graph.tables.queues]
    first = list(accumulate(map(len, rows), initial=0))
    return peaks([changes[q] for row in rows for q in row], first)


def _numbers(values: float | Iterable[float]) -> str:
    """Numbers in a name: one if all are equal; of many, the first two and the last."""
    each = [f"{value:g}" for value in (values if isinstance(values, Iterable) else [values])]
    if len(set(each)) == 1:
        return each[0]
    return ",".join(each if len(each) <= SHOWN else [*each[:2], "..", each[-1]])


def _words(traversal: Traversal) -> str:
    if traversal.pick == IN_ORDER:
        words = "depth-first" if traversal.deepest_first else "breadth-first"
        return f"{words} by {traversal.interval}" if traversal.interval else words
    return "earliest-first" if traversal.pick == EARLIEST else "by microbatch"
