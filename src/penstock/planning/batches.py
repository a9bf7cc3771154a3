"""What a step trains on, planned from lengths alone: sequences -> bins -> replicas -> order.

    lengths   900 40 300 80 500 120 ...
    packing   [900] [500 40] [300 120 80] ...        bins of whole sequences: microbatches
    replicas  each with as many bins, the busiest hardly busier than the mean
    order     short at both ends, or what else is fastest by simulation

Candidates are ways of packing: as the sequences arrive; to even shares of the work; and to shares that are small at
both ends of the step. Of each the bins are assigned to the replicas so that none is much busier than the others, and
ordered for the schedule. What is fastest by simulation is taken. Arrival, run frozen, is among the candidates, so
that by prediction no plan is slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.cost import CostError
from penstock.cost.by_length import CostsByLength
from penstock.cost.links import Links
from penstock.dispatch import Dispatch
from penstock.engine.tolerance import EPSILON, is_within, slack
from penstock.planning.microbatch_order import DISPATCHES, OrderCandidate, OrderSearch
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.columns import Array
from penstock.schedule.short_repr import short_repr
from penstock.simulation.lowered import given_caps

ARRIVAL, IN_TURN, EVEN = "arrival", "in turn", "even"
TAPERS = ((0.5, 0.6), (1.0, 0.4), (2.0, 0.25))
"""Ramps, in bins for each rank of the pipeline, and the share of the first bin: of each a packing is tried."""
TRIED = 2
"""Of how many replicas, the busiest, packings are compared."""
MOST_SWAPS = 200
ENOUGH = 1e-4
"""Where the busiest group is above the mean by no more than this share of it, swapping ends."""

Bins = list[list[int]]
"""Of each bin the numbers of its sequences, ascending."""
Lengths = Sequence[int] | Mapping[str, Sequence[int | Sequence[int]]]
"""Of samples: tokens each; or by tower tokens each, or of each the lengths of its parts, like images."""


@dataclass(frozen=True)
class BatchPlan:
    """A batch as it is to run.

    Attributes:
        microbatches: of each replica its microbatches in the order in which they run, and of each the numbers of its
            sequences, ascending.
        packing: where the bins come from: "arrival" (as it arrived, and run frozen), "in turn", "even", or
            "tapered ...".
        rules: where the order of each replica comes from, as in `OrderedMicrobatches`.
        dispatches: the dispatch under which each replica runs best.
        makespan: predicted, of the replica that takes longest (ms).
        arrival: that of the batch as it arrived, frozen (ms).
        busiest: the work of the replica that has most, over the mean.
        peak: the most that any rank holds, in the unit of the costs.
        cap: the most that a rank may hold.
        seconds: spent.

    Examples:
        >>> import penstock as ps
        >>> line = ps.cost.LengthLine(per_token=0.01)
        >>> costs = ps.cost.CostsByLength(f=[line] * 2, i=[line] * 2, w=[line] * 2)
        >>> planned = ps.planning.plan_batch([900, 100, 500, 500], ps.build("1f1b", 2, 4), costs)
        >>> len(planned.microbatches[0]), planned.makespan <= planned.arrival
        (4, True)
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    packing: str
    rules: tuple[str, ...]
    dispatches: tuple[Dispatch, ...]
    makespan: float
    arrival: float
    busiest: float
    peak: float
    cap: float
    seconds: float = field(compare=False)

    __repr__ = short_repr

    @property
    def gain(self) -> float:
        """`arrival / makespan - 1`: how much faster it is predicted to be."""
        return self.arrival / self.makespan - 1 if self.makespan else 0.0


def plan_batch(
    lengths: Lengths,
    schedule: Schedule,
    costs: CostsByLength,
    *,
    num_replicas: int = 1,
    links: Links | None = None,
    token_limit: float | None = None,
    memory_limit: float | None = None,
    noise: float = 0.0,
    dispatches: Sequence[Dispatch | str] = DISPATCHES,
    moves: float = 0.0,
) -> BatchPlan:
    """The packing, assignment and order of a step's sequences that is predicted to be fastest.

    Where there are as many sequences as microbatches, each is one, and only assignment and order are planned. Where
    the costs are those of several towers, each microbatch gets an even share of every tower's work.

        lengths = {"images": [[196, 196], [], [196]], "text": [540, 900, 310]}         of three samples

    Args:
        lengths: of the sequences in the order in which they arrive, tokens each. Of several towers by name, in each a
            sample has its tokens, 0 for none, or the lengths of its parts, of which none sees another.
        schedule: of one replica; all run the same.
        costs: of each stage, by length.
        num_replicas: how many replicas share the batch.
        links: delays (ms); messages arrive at once where not given.
        token_limit: most tokens of a microbatch, in the tower of the last stage.
        memory_limit: most that any rank may hold, in the unit of `costs.activation`; by default the most that a rank
            holds where the batch runs as it arrived.
        noise: the gain that a prediction must exceed, 0.05 for 5%; else the batch stays as it arrived.
        dispatches: what is tried.
        moves: seconds for moving microbatches of each replica from where the rules have put them.

    Raises:
        PackingError: fewer sequences than microbatches, lengths below 1, or no packing that keeps the limit.
        ScheduleError: what `order_microbatches` refuses, or no order tried holds the memory limit.
        CostError: costs for another number of stages, or of other towers than the lengths.

    Examples:
        >>> import penstock as ps
        >>> line = ps.cost.LengthLine(per_token=0.01)
        >>> costs = ps.cost.CostsByLength(f=[line] * 2, i=[line] * 2, w=[line] * 2)
        >>> planned = ps.planning.plan_batch([900, 100, 500, 500, 200, 300], ps.build("1f1b", 2, 3), costs)
        >>> sorted(number for one in planned.microbatches[0] for number in one), planned.makespan <= planned.arrival
        ([0, 1, 2, 3, 4, 5], True)
    """
    began = time.perf_counter()
    if num_replicas < 1:
        raise ScheduleError(f"{num_replicas} replicas; give at least 1", rule="options")
    num_bins = schedule.num_microbatches * num_replicas
    tokens, sums = _read(lengths, costs, num_bins)
    batch = _Batch(schedule, costs, links, sums)
    arrived = batch.as_arrived(tokens, num_bins)
    cap = arrived.peak if memory_limit is None else float(memory_limit)
    given_caps(cap, schedule.num_ranks)
    options = {"memory_limit": cap, "dispatches": dispatches}
    packings = _packings(tokens, costs.work_by_tower(sums), schedule, num_replicas, token_limit)
    chosen, refused = batch.fastest(packings, num_replicas, moves, options)
    most_tokens = max(int(tokens[list(own)].sum()) for bins in arrived.microbatches for own in bins)
    fits = (token_limit is None or most_tokens <= token_limit) and is_within(arrived.peak, cap)
    if chosen is None and not fits:
        raise refused or PackingError(
            f"{len(tokens)} sequences with {tokens.sum()} tokens find no room in {num_bins} microbatches "
            f"of at most {token_limit:g}; raise the limit, or give more microbatches"
        )
    best = chosen or arrived
    if fits and arrived.makespan - best.makespan <= max(noise * best.makespan, slack(best.makespan)):
        best = arrived
    return replace(best, arrival=arrived.makespan, cap=cap, seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class _Batch:
    """A schedule, and what the lengths of a batch cost in it.

    Attributes:
        sums: of each sample, what it adds to the sums of lengths of its bin.
    """

    schedule: Schedule
    costs: CostsByLength
    links: Links | None
    sums: Array

    def as_arrived(self, tokens: Array, num_bins: int) -> BatchPlan:
        """The batch as it arrived, run frozen."""
        bins, size = pack_in_turn(tokens, num_bins), self.schedule.num_microbatches
        in_turn = [bins[k : k + size] for k in range(0, num_bins, size)]
        return self.plan(ARRIVAL, in_turn, [self.search(bins).arrival for bins in in_turn])

    def fastest(
        self, packings: Iterable[tuple[str, Bins]], num_replicas: int, moves: float, options: dict[str, Any]
    ) -> tuple[BatchPlan | None, ScheduleError | None]:
        """The packing that is fastest by its busiest replicas, if any is in the limits; and the first refusal of one.

        Args:
            moves: seconds for moving microbatches of each replica.
            options: of `OrderSearch`.
        """

        def ordered(packed: list[Bins], seconds: float) -> list[OrderCandidate]:
            return [self.search(bins, **options).best(seconds=seconds) for bins in packed]

        found: list[tuple[float, str, list[Bins]]] = []
        refused: ScheduleError | None = None
        for name, bins in packings:
            packed = self.assigned(bins, num_replicas)
            busiest = sorted(packed, key=self.work_of, reverse=True)[:TRIED]
            try:
                found.append((max(each.makespan for each in ordered(busiest, 0.0)), name, packed))
            except ScheduleError as error:
                refused = refused or error
        for _, name, packed in sorted(found, key=lambda each: each[0]):
            try:  # of the replicas that were not tried one may hold more than the cap
                return self.plan(name, packed, ordered(packed, moves)), refused
            except ScheduleError as error:
                refused = refused or error
        return None, refused

    def plan(self, packing: str, packed: list[Bins], orders: list[OrderCandidate]) -> BatchPlan:
        """The plan of a packing, the bins of each replica in an order, as if it had arrived so."""
        loads = np.array([self.work_of(bins) for bins in packed])
        makespan = max(each.makespan for each in orders)
        return BatchPlan(
            microbatches=tuple(
                tuple(tuple(bins[m]) for m in each.order.tolist()) for bins, each in zip(packed, orders, strict=True)
            ),
            packing=packing,
            rules=tuple(each.rule for each in orders),
            dispatches=tuple(each.dispatch for each in orders),
            makespan=makespan,
            arrival=makespan,
            busiest=float(loads.max() / loads.mean()),
            peak=max(each.peak for each in orders),
            cap=np.inf,
            seconds=0.0,
        )

    def of_bins(self, bins: Bins) -> Array:
        found = np.array([self.sums[own].sum(axis=0) for own in bins])
        found[:, ::3] = 1.0
        return found

    def assigned(self, bins: Bins, num_replicas: int) -> list[Bins]:
        """The bins of each replica, such that all have as much work."""
        if num_replicas == 1:
            return [bins]
        groups = assign_evenly(self.costs.work(self.of_bins(bins)), num_replicas)
        return [[bins[k] for k in group] for group in groups]

    def work_of(self, bins: Bins) -> float:
        return float(self.costs.work(self.of_bins(bins)).sum())

    def search(self, bins: Bins, **options: Any) -> OrderSearch:
        return OrderSearch(self.schedule, self.costs.of_sums(self.of_bins(bins)), self.links, **options)


def _read(lengths: Lengths, costs: CostsByLength, num_bins: int) -> tuple[Array, Array]:
    """The tokens of each sample, (n,), and what its lengths add to a bin's sums, (n, 3 T).

    Raises:
        PackingError, CostError: as `plan_batch` says.
    """
    if not isinstance(lengths, Mapping):
        tokens = as_lengths(lengths, num_bins)
        sums = costs.sums([[length] for length in tokens])
    else:
        parts = {name: [_parts(each) for each in own] for name, own in lengths.items()}
        sums = costs.sums(parts)
        tokens = as_lengths([sum(own) for own in parts[costs.towers[-1]]], num_bins)
    sums[:, ::3] = 0.0  # what an op takes whatever its lengths comes once in a bin
    return tokens, sums


def _parts(lengths: int | Sequence[int]) -> Sequence[int]:
    """Of one sample in one tower."""
    if isinstance(lengths, Sequence | np.ndarray):
        return lengths
    if isinstance(lengths, bool) or not isinstance(lengths, int | np.integer) or lengths < 0:
        raise CostError(f"the length of a sample is {lengths!r}: give a whole number, or the lengths of its parts")
    return [int(lengths)] if lengths else []


def _packings(
    tokens: Array, work: Array, schedule: Schedule, num_replicas: int, token_limit: float | None
) -> Iterator[tuple[str, Bins]]:
    """Ways of packing that keep the limit. Where each sequence is a microbatch there is one."""
    num = schedule.num_microbatches
    in_turn = pack_in_turn(tokens, num * num_replicas)
    if token_limit is None or max(int(tokens[own].sum()) for own in in_turn) <= token_limit:
        yield IN_TURN, in_turn
    if len(tokens) == num * num_replicas:
        return
    shares = {EVEN: np.ones(num)}
    for ramp, ends in TAPERS:
        shares[f"tapered over {ramp:g} bins a rank from {ends:g}"] = tapered_shares(
            num, ramp * schedule.num_ranks, ends
        )
    for name, each in shares.items():
        try:
            yield name, pack_to_shares(tokens, work, np.tile(each, num_replicas), token_limit)
        except PackingError:
            continue


class PackingError(ScheduleError):
    """Sequences that do not go into so many bins.

    Examples:
        >>> import penstock as ps
        >>> line = ps.cost.LengthLine(per_token=0.01)
        >>> costs = ps.cost.CostsByLength(f=[line] * 2, i=[line] * 2, w=[line] * 2)
        >>> try:
        ...     ps.planning.plan_batch([900, 100], ps.build("1f1b", 2, 4), costs)
        ... except ps.planning.PackingError as error:
        ...     print(error)
        2 sequences can't fill 4 microbatches with at least one each; give more, or fewer microbatches
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, rule="packing")


def pack_in_turn(lengths: Sequence[int] | Array, num_bins: int) -> Bins:
    """Consecutive sequences, so that bins end as near to even shares of the tokens as whole sequences let them.

    Raises:
        PackingError: fewer sequences than bins, or lengths below 1.
    """
    tokens = as_lengths(lengths, num_bins)
    ends = np.cumsum(tokens)
    middle = ends - tokens / 2
    bin_of = np.minimum((middle * num_bins / ends[-1]).astype(np.int64), num_bins - 1)
    # Each bin has a sequence at least: its number may exceed neither what comes before it nor leave too few behind.
    number = np.arange(num_bins)
    first = np.maximum.accumulate(np.searchsorted(bin_of, number) - number) + number
    first = np.minimum(first, len(tokens) - num_bins + number)
    return [part.tolist() for part in np.split(np.arange(len(tokens)), first[1:])]


def pack_to_shares(
    lengths: Sequence[int] | Array,
    work: Sequence[float] | Array,
    shares: Sequence[float] | Array,
    token_limit: float | None = None,
) -> Bins:
    """The sequence with most work first, each into the bin that lacks most of its share, as long as it has room.

        work 8 5 4 3, shares 1 1:  [8 3] [5 4]           shares 1 3:  [4] [8 5 3]

    Args:
        work: ms of each sequence, or a row of them with one for each tower: then the bin is taken in which the tower
            that gets fullest by it lacks most. shares: of the work, by bin; their sum is the whole.
        token_limit: most tokens of a bin; none where not given.

    Raises:
        PackingError: fewer sequences than bins, lengths below 1, or the longest first finds no room under the limit.
    """
    wanted = np.asarray(shares, np.float64)
    tokens, ms = as_lengths(lengths, len(wanted)), np.asarray(work, np.float64)
    if ms.ndim == 1:
        ms = ms[:, None]
    is_work = ms.ndim == 2 and len(ms) == len(tokens) and ms.shape[1] and np.isfinite(ms).all() and (ms >= 0).all()
    if not is_work or not (wanted > 0).all():
        raise PackingError("give the work of each sequence, at least 0, and the share of each bin, above 0")
    lacking = wanted[:, None] * (ms.sum(axis=0) / wanted.sum())  # bins, towers
    room = np.full(len(wanted), np.inf if token_limit is None else float(token_limit) * (1 + EPSILON))
    bins: Bins = [[] for _ in wanted]
    for sequence in np.argsort(-ms.max(axis=1), kind="stable").tolist():
        length, own = tokens[sequence], ms[sequence]
        left = lacking[:, 0] if len(own) == 1 else (lacking - own)[:, own > 0].min(axis=1, initial=np.inf)
        k = int(np.argmax(np.where(room >= length, left, -np.inf)))
        if room[k] < length:
            raise PackingError(
                f"a sequence of {length} tokens finds no bin with room under the limit of {token_limit:g}: "
                f"{len(tokens)} sequences have {tokens.sum()} tokens, and there are {len(wanted)} bins; raise it"
            )
        bins[k].append(sequence)
        room[k] -= length
        lacking[k] -= own
    for empty in (own for own in bins if not own):
        largest = max(bins, key=len)
        empty.append(largest.pop())  # which came last: the least of them
    return [sorted(own) for own in bins]


def tapered_shares(num_bins: int, ramp: float, ends: float) -> Array:
    """Shares that rise over the first bins of a pipeline's step and fall over the last, the mean 1.

    Small ones at both ends fill and drain the pipeline fast: over even ones of 1f1b, 8 ranks and 32 microbatches, a
    step takes 1.153 in place of 1.219 of the work.

    Args:
        ramp: bins over which they rise. ends: the first one's share of those in the middle.
    """
    place = np.arange(num_bins)
    rising = np.minimum(place, num_bins - 1 - place) / max(ramp, 1.0)
    shares = np.minimum(1.0, ends + (1 - ends) * rising)
    return shares / shares.mean()


def as_lengths(lengths: Sequence[int] | Array, num_bins: int) -> Array:
    """Raises PackingError."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or (tokens < 1).any():
        raise PackingError("give one length per sequence, a whole number above 0")
    if num_bins < 1 or len(tokens) < num_bins:
        raise PackingError(
            f"{len(tokens)} sequences can't fill {num_bins} microbatches with at least one each; give more, or fewer "
            "microbatches"
        )
    return tokens


def assign_evenly(work: Sequence[float] | Array, num_groups: int) -> list[list[int]]:
    """Items into groups of equally many, their sums of work as even as swaps make them.

        work 9 8 3 2 in 2 groups:  [9 2] [8 3]

    The longest come first, each to the group with least work that has room. Then the busiest group swaps one item for
    one of another group, by which the busier of the two becomes least busy; until no swap helps.

    Args:
        work: of each item, in any unit.
        num_groups: how many groups.

    Raises:
        ScheduleError: work that is no row of numbers of at least 0, or that does not divide by the groups.

    Examples:
        >>> import penstock as ps
        >>> ps.planning.assign_evenly([9, 8, 3, 2], 2)
        [[0, 3], [1, 2]]
    """
    items = np.asarray(work, np.float64)
    if items.ndim != 1 or not np.isfinite(items).all() or (items < 0).any():
        raise ScheduleError("the work to assign must be a row of numbers of at least 0", rule="options")
    if num_groups < 1 or len(items) % num_groups or not len(items):
        raise ScheduleError(
            f"{len(items)} items can't be assigned to {num_groups} groups of the same size; give a multiple "
            "of that number",
            rule="options",
        )
    groups = _longest_first(items, num_groups, len(items) // num_groups)
    _swap(items, groups)
    return [sorted(group) for group in groups.tolist()]


def _longest_first(items: Array, num_groups: int, size: int) -> Array:
    groups = np.zeros((num_groups, size), np.int64)
    counts, sums = np.zeros(num_groups, np.int64), np.zeros(num_groups)
    for item in np.argsort(-items, kind="stable"):
        group = int(np.argmin(sums))
        groups[group, counts[group]] = item
        counts[group] += 1
        sums[group] = sums[group] + items[item] if counts[group] < size else np.inf
    return groups


def _swap(items: Array, groups: Array) -> None:
    """Makes the busiest group less busy, swap by swap."""
    held = items[groups]  # groups, size
    sums = held.sum(axis=1)
    enough = sums.mean() * (1 + ENOUGH)
    for _ in range(MOST_SWAPS):
        most = int(np.argmax(sums))
        if sums[most] <= enough:
            return
        change = held[most][:, None, None] - held[None]  # own item, group, its item
        busier = np.maximum(sums[most] - change, sums[None, :, None] + change)
        busier[:, most] = np.inf
        best = int(np.argmin(busier))
        if not busier.flat[best] < sums[most] * (1 - EPSILON):
            return
        own, group, other = np.unravel_index(best, busier.shape)
        moved = change[own, group, other]
        for table in (groups, held):
            table[most, own], table[group, other] = table[group, other], table[most, own]
        sums[most] -= moved
        sums[group] += moved
