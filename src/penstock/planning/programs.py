"""Searches the space of programs: every placement, rule and traversal, each with its gradients separated.

This is FlexPipe's search (sections 5.2, 6 and 7.1) over (placement, kinds, forward traversal, backward traversal).
The values are those of its Table 2, and the interval is the number of ranks if the placement is circular. Here the
compiled decision core simulates each point over the real costs and under the memory cap, with I before W in every
bubble. The point with the shortest makespan wins. Stages are made of equal parts of a model:

    eight parts, two ranks      0 1 2 3 4 5 6 7
    one-to-one                 [0 1 2 3|4 5 6 7]      on ranks 0 1
    v-shape                    [0 1|2 3|4 5|6 7]      on ranks 0 1 1 0

The space has more than the paper's: wave and combined placements; warm-ups of the zero-bubble kind; and, as
traversals, the order in which work became ready and the order of microbatches. If memory is short on a V,
there are also caps on each stage in proportion to how long its activations live, and the library's own
schedules for such memory.

Under a limit of bytes, what messages take is known only when a program has run. If the fastest one exceeds the limit
with them, its placement is searched again with that much less room for activations.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import Any

from penstock.cost import CostError, Costs, Links
from penstock.dispatch.queues import Lister
from penstock.engine.list_by_rules import EARLIEST, IN_ORDER
from penstock.engine.tolerance import EPSILON, is_within
from penstock.library.registry import buildable
from penstock.planning.bounds import least_ms
from penstock.planning.options import (
    MOST_AGAIN,
    names_options,
    per_rank,
    require_one_limit,
    require_ops,
    require_weights,
)
from penstock.program import Program, Rules, breadth_first, by_microbatch, depth_first, earliest_first, placements
from penstock.program.rules import Traversal
from penstock.schedule import Placement, Schedule, ScheduleError
from penstock.schedule.op import UPDATE
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Footprint, Timeline, footprint, room_for_activations, simulate
from penstock.simulation.memory_footprint import in_bytes
from penstock.unknown_names import refuse_unknown

LOOKED_AT = 4
"""Additional programs of a placement whose messages are counted before it is searched again."""
NUM_STAGE_CAPS = 4
"""Number of sets of caps on single stages that are tried under a memory limit."""
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


@dataclass(frozen=True)
class SpaceOptions:
    """The options of `search_space`, which says what they mean."""

    links: Links | None = None
    memory_limit: float | Sequence[float] | None = None
    total_limit: float | Sequence[float] | None = None
    shapes: Sequence[str] | None = None
    shared_ends: bool = False
    split: bool | Callable[[int], bool] = True
    forward_first: bool = False
    rules: RulesOf | None = None
    keep: int = 1
    below: float = inf


@refuse_unknown(ScheduleError)
@names_options(SpaceOptions)
def search_space(
    costs: Costs | Callable[[int], Costs], num_ranks: int, num_microbatches: int, **options: Any
) -> Outcome:
    """The best programs of each placement.

    Args:
        num_ranks: devices of the pipeline.
        num_microbatches: of a step.
        links: delays (ms); by default messages arrive at once.
        shared_ends: whether all ranks share the first and the last part.
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

    Raises:
        ScheduleError: a shape that is not there, limits that make no sense, or no point that can run under them.
        CostError: costs in a number of parts that does not divide among the ranks, uneven microbatches, costs of ops
            of your own, or costs that do not say what weights take, with a `total_limit`.

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
    asked = SpaceOptions(**options)
    memory_limit, total_limit, below = asked.memory_limit, asked.total_limit, asked.below
    require_one_limit(memory_limit=memory_limit, total_limit=total_limit)
    caps = None if memory_limit is None else per_rank("memory_limit", memory_limit, num_ranks)
    totals = None if total_limit is None else per_rank("total_limit", total_limit, num_ranks)
    chosen = _chosen(costs, num_ranks, asked.shapes, asked.shared_ends)
    left_out: dict[str, str] = {}
    costs_of = _costs_by_placement(costs, chosen, asked.shared_ends, left_out)
    spaces: list[_Space] = []
    for name, own in costs_of.items():
        room = caps
        if totals is not None:
            require_weights(own)
            try:
                room = room_for_activations(chosen[name], own, totals)
            except CostError as error:
                left_out[name] = str(error).partition(";")[0]
                continue
        first = Program(chosen[name], num_microbatches, Rules(), asked.split, own, asked.links, name=name)
        if least_ms(first) < below:
            spaces.append(_Space(name, first, room, totals, asked))
    found: list[Found] = []
    for space in spaces:
        best = space.search()
        found += best
        if not best and below == inf:
            left_out[space.name] = space.why_nothing()
    left_out = {name: left_out[name] for name in chosen if name in left_out}
    if not found and below == inf:
        raise _nothing(left_out, num_ranks, caps, totals)
    ranked = _numbered(sorted(found, key=lambda each: each.makespan))
    num_tried, num_stuck = (sum(getattr(space, count) for space in spaces) for count in ("num_tried", "num_stuck"))
    return Outcome(tuple(ranked), num_tried, num_stuck, tuple(left_out.items()))


def _nothing(
    left_out: dict[str, str], num_ranks: int, caps: Sequence[float] | None, totals: Sequence[float] | None
) -> ScheduleError:
    """The reason that the first of the placements gives."""
    (name, why), *others = left_out.items()
    within, do = "", "give rules that let ranks hold more"
    if caps is not None:
        within, do = f" within a memory of {_numbers(caps)}", "raise the limit, in the unit of the costs' activations"
    elif totals is not None:
        within, do = f" within {in_bytes(max(totals), 4)} per rank, all counted", "raise it, or take more ranks"
    likewise = f", and nothing runs on {len(others)} other placement{'s' * (len(others) > 1)}" if others else ""
    return ScheduleError(
        f"no program over {num_ranks} ranks can run{within}: {name}: {why}{likewise}; {do}", rule="memory"
    )


def placements_of(num_ranks: int, num_parts: int, shared_ends: bool = False) -> dict[str, Placement]:
    """The placements by name for a model of `num_parts` equal parts, if its parts can be divided among their stages.

    one-to-one, circular (2 or more stages per rank), v-shape, wave, and each of them in both directions.
    """
    names = [name for name in placements.NAMES if num_parts // num_ranks % _stages_a_rank(name) == 0]
    plain = {name: placements.named(name, num_ranks) for name in (names if num_ranks > 1 else names[:1])}
    if shared_ends:
        plain = {name: placements.shared_ends(placement) for name, placement in plain.items()}
    return plain


def _stages_a_rank(name: str) -> int:
    return placements.STAGES_PER_RANK[name.removesuffix(placements.BOTH_WAYS)]


def _chosen(
    costs: Costs | Callable[[int], Costs], num_ranks: int, names: Sequence[str] | None, shared_ends: bool
) -> dict[str, Placement]:
    """The placements to try, by name.

    Raises:
        ScheduleError: a name that is no placement, or none for this number of ranks and parts.
        CostError: parts that do not divide among the ranks.
    """
    num_parts = max(placements.STAGES_PER_RANK.values()) * num_ranks
    if isinstance(costs, Costs):
        num_parts = costs.num_stages - (2 if shared_ends else 0)
        if num_parts < num_ranks or num_parts % num_ranks:
            raise CostError(
                f"the costs are for {num_parts} parts{' between the ends' if shared_ends else ''}, which do not "
                f"divide among {num_ranks} ranks; give a multiple of {num_ranks}"
            )
    layouts = placements_of(num_ranks, num_parts, shared_ends)
    for name in names or ():
        placements.named(name, max(2, num_ranks))
        if name not in layouts and num_ranks == 1:
            raise ScheduleError(
                f"{name} on 1 rank runs as one-to-one does; name that, or give more ranks", rule="options"
            )
        if name not in layouts:
            each = _stages_a_rank(name)
            raise ScheduleError(
                f"{name} has {each} stages per rank, of equally many parts each, and there are "
                f"{num_parts // num_ranks} parts per rank; give a multiple of {each * num_ranks} parts, or name "
                f"others: {', '.join(layouts)}",
                rule="options",
            )
    return {name: placement for name, placement in layouts.items() if not names or name in names}


def _costs_by_placement(
    costs: Costs | Callable[[int], Costs], chosen: dict[str, Placement], shared_ends: bool, left_out: dict[str, str]
) -> dict[str, Costs]:
    """By the name of each placement, the costs of its stages.

    Args:
        left_out: out, by name, why a model can't be cut for a placement.

    Raises:
        CostError: uneven costs, costs of a user's own ops, or a model that can be cut for none of the placements.
    """
    found: dict[str, Costs] = {}
    for name, placement in chosen.items():
        num_stages = placement.num_stages
        try:
            given = costs if isinstance(costs, Costs) else costs(num_stages)
            if given.factors:
                raise CostError(
                    "search_space needs microbatches that all cost the same; leave `uneven` out, and order the "
                    "microbatches of the result with ps.planning.order_microbatches"
                )
            require_ops(given, None)
            found[name] = fold(given, num_stages, shared_ends) if isinstance(costs, Costs) else given
        except CostError as error:
            if isinstance(costs, Costs):
                raise
            left_out[name] = str(error)  # a model of fewer layers
    if not found:
        raise CostError(next(iter(left_out.values())))
    return found


def fold(costs: Costs, num_stages: int, shared_ends: bool = False) -> Costs:
    """Costs of `num_stages` stages, each made of equally many consecutive parts. Shared ends stay as they are.

    Raises CostError if the parts can't be divided evenly.
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
    rows = (
        "f", "i", "w", "b", "activation", "update_bytes", "take_over", "weight_bytes", "gradient_bytes",
        "optimizer_bytes",
    )  # fmt: skip
    first, last = costs.message_bytes[:outer], costs.message_bytes[len(costs.message_bytes) - outer :]
    changed: dict[str, Any] = {row: folded(getattr(costs, row)) for row in rows}
    return replace(costs, **changed, message_bytes=[*first, *sent, *last], other=others)


def rules_of(
    name: str,
    placement: Placement,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | Sequence[float] | None,
    costs: Costs,
    forward_first: bool,
) -> Iterator[Rules]:
    """The rules to try on one placement; the costs are those of its stages."""
    alone = len(placement.stages_of(0)) == 1
    plain: list[tuple[Traversal, Traversal]] = [(breadth_first(), breadth_first())]
    if not alone:
        traversals = [breadth_first(), depth_first()]
        if name.startswith("circular"):
            traversals += [breadth_first(num_ranks), depth_first(num_ranks)]
        plain = list(product(traversals, traversals))
        plain += [(earliest_first(), earliest_first()), (by_microbatch(), by_microbatch())]
    warmups: list[list[int] | None] = [None]
    if placement.num_pipelines == 1 and not placement.shared:  # those of ZB-H2 and (with several stages a rank) ZB-V
        warmups.append([min(num_microbatches, 2 * (num_ranks - rank) - 1) for rank in range(num_ranks)])
    kinds = ["backward-first", "interleaved", *(["forward-first"] if forward_first else [])]
    for kind, (forward, backward), warmup in product(kinds, plain, warmups):
        yield Rules(kind, forward=forward, backward=backward, warmup=warmup, memory_limit=memory_limit)
    if memory_limit is None or alone or placement.num_pipelines > 1 or placement.shared:
        return
    room = per_rank("memory_limit", memory_limit, num_ranks)
    stage_caps = _stage_caps(placement, num_ranks, num_microbatches, room, costs)
    for limits, kind, backward in product(stage_caps, kinds, (earliest_first(), by_microbatch())):
        yield Rules(kind, forward=depth_first(), backward=backward, max_in_flight=limits)


def _stage_caps(
    placement: Placement, num_ranks: int, num_microbatches: int, room: Sequence[float], costs: Costs
) -> Iterator[dict[int, float]]:
    """In-flight limits by stage, in proportion to the life of its activations: from its F down to the loss and back
    up to its W. They are the largest that fit under the limit on every rank, and some that leave room.
    """
    ranks = range(num_ranks)
    rate = max(sum(costs.f[s] + costs.i[s] + costs.w[s] for s in placement.stages_of(r)) for r in ranks)
    life = [sum(costs.f[s:]) + sum(costs.i[s:]) + costs.w[s] for s in range(placement.num_stages)]
    seen: list[dict[int, float]] = []
    for step in range(40, 0, -1):
        share = step / 20
        caps = {s: float(min(num_microbatches, max(1, ceil(share * ms / (rate or 1))))) for s, ms in enumerate(life)}
        if any(sum(caps[s] * costs.activation[s] for s in placement.stages_of(r)) > room[r] for r in ranks):
            continue
        if caps not in seen:
            seen.append(caps)
            yield caps
        if len(seen) == NUM_STAGE_CAPS:
            return


@dataclass
class _Space:
    """The programs of one placement.

    Attributes:
        first: one of them, with rules that say nothing.
        room: for activations on each rank; None for no limit.
        totals: bytes that each rank may hold in all; None where messages do not count.
        excess: by rank the most bytes of messages in programs that held too much.
        num_tried, num_stuck: programs that were simulated, and those of them that deadlocked.
    """

    name: str
    first: Program
    room: tuple[float, ...] | None
    totals: tuple[float, ...] | None
    asked: SpaceOptions
    excess: list[float] = field(default_factory=list)
    num_tried: int = 0
    num_stuck: int = 0

    def rules_under(self, room: Sequence[float] | None) -> Iterator[Rules]:
        """The rules to try, with limits that keep to caps of activations."""
        limit = room if room is None or len(set(room)) > 1 else room[0]
        placement, count = self.first.placement, self.first.num_microbatches
        if self.asked.rules is not None:
            return (replace(each, memory_limit=limit) for each in self.asked.rules(self.name, placement, count))
        num_ranks, costs, forward_first = self.first.num_ranks, self.first.all_costs, self.asked.forward_first
        return rules_of(self.name, placement, num_ranks, count, limit, costs, forward_first)

    def search(self) -> list[Found]:
        """The best programs within the limits, the fastest first."""
        best: list[Found] = []
        room, keep = self.room, self.asked.keep
        for _ in range(1 + MOST_AGAIN):
            ranked = self._run(room)
            for each in ranked if self.totals is None else ranked[: LOOKED_AT + keep]:
                if len(best) == keep and each.makespan >= best[-1].makespan:
                    break
                if self._fits(each):
                    _keep(best, each, keep)
            if not ranked or self._fits(ranked[0]):
                break
            assert self.room is not None
            over = [rank.messages for rank in ranked[0].footprint.ranks]
            self.excess = list(map(max, self.excess or over, over))
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
        stages, pipelines = range(placement.num_stages), range(placement.num_pipelines)
        needed = [
            max(sum(costs.activation[s] for s in stages if rank in placement.hosts(p, s)) for p in pipelines)
            for rank in range(len(room))
        ]
        rank = max(range(len(room)), key=lambda r: needed[r] - room[r])
        each = "" if placement.num_pipelines == 1 else ", and one in each direction more"
        if self.totals is None:
            return f"one microbatch takes {needed[rank]:g} on rank {rank}{each}"
        left = f"beside weights, gradients and optimizer state it has {in_bytes(room[rank], 4)}"
        return f"one microbatch takes {in_bytes(needed[rank], 4)} on rank {rank}{each}; {left}"

    def _fits(self, found: Found) -> bool:
        return self.totals is None or all(map(is_within, found.footprint.totals, self.totals))

    def _run(self, room: Sequence[float] | None) -> list[Found]:
        """All programs that are shorter than asked under caps of activations, the fastest first."""
        graph = self.first.queues()
        lister = Lister(graph)
        found: list[Found] = []
        for rules in self.rules_under(room):
            program = replace(self.first, rules=rules)
            self.num_tried += 1
            try:
                listed = lister.list_by_rules(program.tables(graph))
            except ScheduleError:  # a cap below what one microbatch needs
                self.num_stuck += 1
                continue
            if not listed.complete:
                self.num_stuck += 1
            elif listed.makespan < self.asked.below:
                found.append(Found(self.name, program, listed.makespan))
        in_halves = self.first.split is True and not self.first.placement.shared
        shortest = min((each.makespan for each in found), default=inf)
        if self.name == V and room is not None and in_halves and shortest > least_ms(self.first) * (1 + EPSILON):
            found += self._constructed(room)
        return sorted(found, key=lambda each: each.makespan)

    def _constructed(self, room: Sequence[float]) -> Iterator[Found]:
        """The library's schedules that hold no more than the caps."""
        for _, schedule in buildable(CONSTRUCTED, self.first.num_ranks, self.first.num_microbatches):
            self.num_tried += 1
            ran = simulate(schedule, self.first.all_costs, links=self.first.links)
            if all(map(is_within, ran.peak_activations, room)) and ran.makespan < self.asked.below:
                yield Found(V, self.first, ran.makespan, schedule)


def _numbered(found: Iterable[Found]) -> Iterator[Found]:
    """The same, with numbers for those whose names would be equal."""
    seen: Counter[str] = Counter()
    for each in found:
        seen[each.name] += 1
        yield replace(each, number=seen[each.name])


def _keep(best: list[Found], found: Found, keep: int) -> None:
    """Puts a point among the best of its placement. Of equal ones, the first is kept."""
    if all(found.makespan != other.makespan for other in best):
        insort(best, found, key=lambda each: each.makespan)
        del best[keep:]


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
