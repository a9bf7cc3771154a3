"""Searching the space of programs: every placement, rule and traversal, each with its gradients separated.

This is FlexPipe's search (sections 5.2, 6 and 7.1): (placement, kinds, forward traversal, backward traversal),
the values from its Table 2, the interval equal to the number of ranks where the placement is circular. Here
each point is run through time by the compiled decision core over the real costs and under the memory cap,
with I before W in every bubble, and the one with the shortest makespan wins.

Beyond the paper: wave and combined placements; warm-ups of the zero-bubble kind; the order in which work became
ready, or in which microbatches come, as traversals; where memory is short on a V, caps on each stage in
proportion to how long its activations live, and the library's own constructions for such memory.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, inf

from penstock.cost import CostError, Costs, Links
from penstock.dispatch.queues import QueueGraph
from penstock.engine.list_by_rules import EARLIEST, IN_ORDER
from penstock.engine.memory import peaks
from penstock.engine.tolerance import is_within
from penstock.library import build
from penstock.program import Program, Rules, breadth_first, by_microbatch, depth_first, earliest_first, placements
from penstock.program.rules import Traversal
from penstock.schedule import Placement, Schedule, ScheduleError
from penstock.schedule.op import UPDATE
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Timeline, simulate
from penstock.simulation.lister import Lister, rows_of

COMPILE_ABOVE = 100_000
"""Ops of a whole search above which loading compiled code pays for itself."""
V = "v-shape"
NUM_STAGE_CAPS = 4
CONSTRUCTED = ("zb-v", "v-half", "v-min")
"""Library schedules of the V that hold less than rules alone find a way to."""

RulesOf = Callable[[str, Placement, int], Iterable[Rules]]
"""Rules to try on a placement: from its name, itself, and the number of microbatches."""


@dataclass(frozen=True)
class Found:
    """One point of the space.

    Attributes:
        placement: its name.
        program: what to build; where `constructed` is there, only its placement and costs count.
        constructed: the library schedule that this is, or None.
        makespan: ms.

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

    __repr__ = short_repr

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, built and checked."""
        return self.constructed or self.program.build()

    @property
    def name(self) -> str:
        """What to call it: the placement and the rules, or the library's name."""
        if self.constructed is not None:
            return self.constructed.name
        rules = self.program.rules
        assert isinstance(rules, Rules)
        return f"{self.placement}, {rules.kinds}, F {_words(rules.forward)}, B {_words(rules.backward)}"

    @property
    def timeline(self) -> Timeline:
        """When each op runs, simulated under the costs and links of the search."""
        return simulate(self.schedule, self.program.all_costs, links=self.program.links)

    @property
    def bubble_ratio(self) -> float:
        """`1 - sum(busy) / (num_ranks * makespan)` of the simulated schedule."""
        return self.timeline.bubble_ratio


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        found: the best of each placement, the shortest makespan first; none where none takes less than was asked.
        num_tried: points that were run.
        num_stuck: those among them in which no rank could go on, as under a cap that its traversal cannot meet.

    Examples:
        >>> import penstock as ps
        >>> outcome = ps.planning.search_space(ps.Costs.uniform(4), num_ranks=2, num_microbatches=4)
        >>> outcome.best.makespan == min(each.makespan for each in outcome.found), outcome.num_tried > 0
        (True, True)
    """

    found: tuple[Found, ...]
    num_tried: int
    num_stuck: int

    __repr__ = short_repr

    @property
    def best(self) -> Found:
        """The shortest makespan of all."""
        return self.found[0]


def search_space(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    *,
    links: Links | None = None,
    memory_limit: float | None = None,
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
        links: delays (ms); messages arrive at once where not given.
        shared_ends: whether all ranks share the first and the last part.
        split: whether backwards are split into I and W.
        costs: of the model in `k * num_ranks` equal parts, from which stages are made by adding consecutive
            ones: a placement with v stages a rank needs k to be a multiple of v. With `shared_ends` one part
            more at either end: what is shared by all ranks (embedding and head).
        memory_limit: most memory a rank may hold, in the unit of the costs' activations.
        shapes: names of placements to try (see `placements_of`); all by default.
        split: whether backwards are I and W; or of which stages, by number.
        forward_first: also try forward-first rules (the paper does so only when asked).
        rules: the rules to try on a placement, from its name, itself and the number of microbatches; `rules_of` by
            default. They keep to `memory_limit` besides.
        keep: how many programs of each placement; of those that take equally long only the first.
        below: only programs that take less (ms). Placements with a rank that works longer are not tried.
        progress: called with points done and points in all.

    Raises:
        ScheduleError: a shape that is not there, or no point that can run under the limit.
        CostError: costs in a number of parts that does not divide among the ranks, or uneven microbatches.

    Examples:
        >>> import penstock as ps
        >>> outcome = ps.planning.search_space(ps.Costs.uniform(8), num_ranks=4, num_microbatches=8)
        >>> outcome.best.makespan
        49.0
    """
    if costs.factors:
        raise CostError(
            "search_space needs microbatches that all cost the same; leave `uneven` out, and order the microbatches "
            "of the result with ps.planning.order_microbatches"
        )
    num_parts = _parts(costs, num_ranks, shared_ends)
    layouts = placements_of(num_ranks, num_parts, shared_ends)
    _check_names(shapes or (), layouts, num_ranks, num_parts)
    points: list[tuple[str, list[Program]]] = []
    for name, placement in layouts.items():
        if shapes is not None and name not in shapes:
            continue
        folded = fold(costs, placement.num_stages, shared_ends)
        first = Program(placement, num_microbatches, Rules(), split, folded, links, name=name)
        if below < inf and work_of(first) >= below:
            continue
        if rules is None:
            given = rules_of(name, placement, num_ranks, num_microbatches, memory_limit, costs, forward_first)
        else:
            own = rules(name, placement, num_microbatches)
            given = (replace(each, memory_limit=memory_limit) for each in own)
        points.append((name, [replace(first, rules=each) for each in given]))
    tried = sum(len(programs) for _, programs in points)
    best: dict[str, list[Found]] = {}
    stuck = done = 0
    for name, programs in points:
        graph = programs[0].queues()
        lister = Lister(graph, compile=True if graph.num_ops * tried > COMPILE_ABOVE else None)
        for program in programs:
            done += 1
            try:
                listed = lister.list_by_rules(program.tables(graph))
            except ScheduleError:  # a cap below what one microbatch needs
                stuck += 1
                continue
            if not listed.complete:
                stuck += 1
            elif listed.makespan < below:
                _keep(best.setdefault(name, []), Found(name, program, listed.makespan), keep)
            if progress is not None:
                progress(done, tried)
    if V in layouts and (shapes is None or V in shapes) and split and memory_limit is not None and not shared_ends:
        program = Program(layouts[V], num_microbatches, Rules(), split, fold(costs, 2 * num_ranks), links, name=V)
        if V not in best or best[V][0].makespan > _least(program):
            tried += _try_constructed(program, memory_limit, best, below, keep)
    if not best and below < inf:
        return Outcome((), tried, stuck)
    if not best:
        alone = max(fold(costs, num_ranks + 2 * shared_ends, shared_ends).activation)
        raise ScheduleError(
            f"no program over {num_ranks} ranks can run within a memory of {memory_limit:g}: one microbatch takes "
            f"{alone:g} on a rank, and one in each direction twice as much; raise the limit, in the unit of the "
            "parts' activations",
            rule="memory",
        )
    every = [found for of_placement in best.values() for found in of_placement]
    return Outcome(tuple(sorted(every, key=lambda found: found.makespan)), tried, stuck)


def _keep(best: list[Found], found: Found, keep: int) -> None:
    """Puts a point among the best of its placement; of equal ones the first stays."""
    if all(found.makespan != other.makespan for other in best):
        insort(best, found, key=lambda each: each.makespan)
        del best[keep:]


def work_of(program: Program) -> float:
    """No schedule of a program ends sooner: the work of the rank that has most of it (ms)."""
    costs, placement = program.all_costs, program.placement
    busy = [0.0] * program.num_ranks
    for pipeline in range(placement.num_pipelines):
        count = len(range(pipeline, program.num_microbatches, placement.num_pipelines))
        for stage in range(program.num_stages):
            backward = min(costs.i[stage] + costs.w[stage], costs.duration("B", stage))
            for rank in placement.hosts(pipeline, stage):
                busy[rank] += count * (costs.f[stage] + backward)
    return max(busy)


def placements_of(num_ranks: int, num_parts: int, shared_ends: bool = False) -> dict[str, Placement]:
    """The placements by name over a model of `num_parts` equal parts, as far as they divide it.

    one-to-one, circular (2 or more stages per rank), v-shape, wave, and each of them in both directions.
    """
    a_rank = num_parts // num_ranks
    names = [
        name
        for name in placements.NAMES
        if a_rank % placements.STAGES_PER_RANK[name.removesuffix(placements.BOTH_WAYS)] == 0
    ]
    plain = {name: placements.named(name, num_ranks) for name in (names if num_ranks > 1 else names[:1])}
    if shared_ends:
        plain = {name: placements.shared_ends(placement) for name, placement in plain.items()}
    return plain


def _check_names(names: Sequence[str], layouts: dict[str, Placement], num_ranks: int, num_parts: int) -> None:
    """Raises ScheduleError for a name of no placement, or of one that these ranks and parts don't give."""
    for name in names:
        placements.named(name, max(2, num_ranks))
        if name in layouts:
            continue
        if num_ranks == 1:
            raise ScheduleError(
                f"{name} on 1 rank runs as one-to-one does; name that, or give more ranks", rule="options"
            )
        each = placements.STAGES_PER_RANK[name.removesuffix(placements.BOTH_WAYS)]
        raise ScheduleError(
            f"{name} has {each} stages per rank, of equally many parts each, and there are "
            f"{num_parts // num_ranks} parts per rank; give a multiple of {each * num_ranks} parts, or name others: {', '.join(layouts)}",
            rule="options",
        )


def rules_of(
    name: str,
    placement: Placement,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | None,
    costs: Costs,
    forward_first: bool,
) -> Iterator[Rules]:
    """The rules to try on one placement."""
    alone = len(placement.stages_of(0)) == 1
    plain: list[tuple[Traversal, Traversal]] = [(breadth_first(), breadth_first())]
    if not alone:
        forwards = [breadth_first(), depth_first()]
        backwards = [breadth_first(), depth_first()]
        if name.startswith("circular"):
            forwards += [breadth_first(num_ranks), depth_first(num_ranks)]
            backwards += [breadth_first(num_ranks), depth_first(num_ranks)]
        plain = [(f, b) for f in forwards for b in backwards]
        plain += [(earliest_first(), earliest_first()), (by_microbatch(), by_microbatch())]
    kinds = ["backward-first", "interleaved", *(["forward-first"] if forward_first else [])]
    for kind in kinds:
        for forward, backward in plain:
            for warmup in _warmups(placement, num_ranks, num_microbatches):
                yield Rules(kind, forward=forward, backward=backward, warmup=warmup, memory_limit=memory_limit)
    if memory_limit is None or alone or placement.num_pipelines > 1 or placement.shared:
        return
    for limits in _stage_caps(
        placement, num_ranks, num_microbatches, memory_limit, fold(costs, placement.num_stages)
    ):
        for kind in kinds:
            for pair in ((depth_first(), earliest_first()), (depth_first(), by_microbatch())):
                yield Rules(kind, forward=pair[0], backward=pair[1], max_in_flight=limits)


def _stage_caps(
    placement: Placement, num_ranks: int, num_microbatches: int, memory_limit: float, costs: Costs
) -> Iterator[dict[int, float]]:
    """In-flight limits by stage, in proportion to the life of its activations: from its F down to the loss and
    back up to its W. The largest that fit under the limit on every rank, and some that leave room."""
    ranks = range(num_ranks)
    rate = max(sum(costs.f[s] + costs.i[s] + costs.w[s] for s in placement.stages_of(r)) for r in ranks)
    life = [sum(costs.f[s:]) + sum(costs.i[s:]) + costs.w[s] for s in range(placement.num_stages)]
    seen: list[dict[int, float]] = []
    for step in range(40, 0, -1):
        share = step / 20
        caps = {
            s: float(min(num_microbatches, max(1, ceil(share * life[s] / (rate or 1))))) for s in range(len(life))
        }
        if max(sum(caps[s] * costs.activation[s] for s in placement.stages_of(r)) for r in ranks) > memory_limit:
            continue
        if caps not in seen:
            seen.append(caps)
            yield caps
        if len(seen) == NUM_STAGE_CAPS:
            return


def _least(program: Program) -> float:
    """No schedule of one pipeline ends sooner: a rank's own work after the first forward has come to it (ms)."""
    costs, placement = program.all_costs, program.placement
    return max(
        sum(costs.f[: stages[0]])
        + program.num_microbatches * sum(costs.f[s] + costs.i[s] + costs.w[s] for s in stages)
        for stages in (placement.stages_of(rank) for rank in range(program.num_ranks))
    )


def _try_constructed(
    program: Program, memory_limit: float, best: dict[str, list[Found]], below: float, keep: int
) -> int:
    """Puts the best of the library's constructions into `best` where it beats what is there; returns how many ran."""
    graph = program.queues()
    lister = Lister(graph)
    tried = 0
    for name in CONSTRUCTED:
        try:
            schedule = build(name, program.num_ranks, program.num_microbatches)
        except ScheduleError:  # too few microbatches for it
            continue
        tried += 1
        rows = rows_of(graph, schedule)
        if not is_within(_peak(graph, rows), memory_limit):
            continue
        makespan = lister.time_rows(rows).makespan
        if makespan < below:
            _keep(best.setdefault(V, []), Found(V, program, makespan, schedule), keep)
    return tried


def _peak(graph: QueueGraph, rows: list[list[int]]) -> float:
    """Most memory that any rank holds."""
    changes = [queue.memory for queue in graph.tables.queues]
    first = list(accumulate(map(len, rows), initial=0))
    return max(peaks([changes[q] for row in rows for q in row], first))


def _words(traversal: Traversal) -> str:
    if traversal.pick == IN_ORDER:
        words = "depth-first" if traversal.deepest_first else "breadth-first"
        return f"{words} by {traversal.interval}" if traversal.interval else words
    return "earliest-first" if traversal.pick == EARLIEST else "by microbatch"


def _warmups(placement: Placement, num_ranks: int, num_microbatches: int) -> list[list[int] | None]:
    """No warm-up counts, and where one pipeline runs, those of ZB-H2 and (with several stages per rank) ZB-V."""
    if placement.num_pipelines > 1 or placement.shared:
        return [None]
    return [None, [min(num_microbatches, 2 * (num_ranks - rank) - 1) for rank in range(num_ranks)]]


def fold(costs: Costs, num_stages: int, shared_ends: bool = False) -> Costs:
    """Costs of `num_stages` stages, each of as many consecutive parts; shared ends stay as they are.

    Raises CostError where the parts do not divide.
    """
    inner, outer = (num_stages - 2, 1) if shared_ends else (num_stages, 0)
    parts = costs.num_stages - 2 * outer
    if inner < 1 or parts % inner:
        raise CostError(
            f"costs of {parts} parts do not fold into {inner} stages; give a number of parts that {inner} divides"
        )
    each = parts // inner

    def folded(values: Sequence[float]) -> list[float]:
        body = values[outer : len(values) - outer]
        sums = [sum(body[s * each : (s + 1) * each]) for s in range(inner)]
        return [*values[:outer], *sums, *values[len(values) - outer :]] if values else []

    def stage_of(part: int) -> int:
        return part if part < outer else min(outer + (part - outer) // each, num_stages - 1)

    others: dict[str | tuple[str, int], tuple[float, float]] = {}
    for kind, part, ms, memory in costs.other_entries:
        if kind == UPDATE:  # a stage's update is its parts' together
            continue
        key = kind if part is None else (kind, stage_of(part))
        before = others.get(key, (0.0, 0.0))
        others[key] = before[0] + ms, before[1] + memory
    for part in range(costs.num_stages):
        if (ms := costs.duration(UPDATE, part)) > 0:
            key = UPDATE, stage_of(part)
            others[key] = others.get(key, (0.0, 0.0))[0] + ms, 0.0

    sent = [costs.message_bytes[outer + (s + 1) * each - 1] for s in range(inner)]
    return replace(
        costs,
        f=folded(costs.f),
        i=folded(costs.i),
        w=folded(costs.w),
        b=folded(costs.b),
        activation=folded(costs.activation),
        message_bytes=[*costs.message_bytes[:outer], *sent, *costs.message_bytes[len(costs.message_bytes) - outer :]],
        update_bytes=folded(costs.update_bytes),
        take_over=folded(costs.take_over),
        weight_bytes=folded(costs.weight_bytes),
        gradient_bytes=folded(costs.gradient_bytes),
        optimizer_bytes=folded(costs.optimizer_bytes),
        other=others,
    )


def _parts(costs: Costs, num_ranks: int, shared_ends: bool) -> int:
    parts = costs.num_stages - (2 if shared_ends else 0)
    if parts < num_ranks or parts % num_ranks:
        raise CostError(
            f"the costs are for {parts} parts{' between the ends' if shared_ends else ''}, which do not divide among "
            f"{num_ranks} ranks; give a multiple of {num_ranks}"
        )
    return parts
