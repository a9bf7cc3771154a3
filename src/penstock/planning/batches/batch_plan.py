"""A step's batch, planned from the lengths of its sequences: which lie in one bin, on which replica, in which order.

Candidates are ways of packing: as the sequences arrive; to even shares of the work; and to shares that are small at
both ends of the step. Of each the bins are assigned to the replicas so that none is much busier than the others, and
ordered for the schedule. What is fastest by simulation is taken. Arrival, run frozen, is among the candidates, so
that by prediction no plan is slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.cost import CostError, Costs
from penstock.cost.by_length import CostsByLength
from penstock.cost.links import Links
from penstock.dispatch import Dispatch
from penstock.engine.tolerance import is_within, slack
from penstock.planning.batches.assignment import assign_evenly
from penstock.planning.batches.packing import (
    Bins,
    PackingError,
    as_lengths,
    pack_in_turn,
    pack_to_shares,
    tapered_shares,
)
from penstock.planning.microbatch_order import DISPATCHES, OrderSearch, order_microbatches
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.columns import Array
from penstock.schedule.short_repr import short_repr
from penstock.simulation.memory import given_caps

ARRIVAL, IN_TURN, EVEN = "arrival", "in turn", "even"
TAPERS = ((0.5, 0.6), (1.0, 0.4), (2.0, 0.25))
"""Ramps, in bins for each rank of the pipeline, and the share of the first bin: of each a packing is tried."""
TRIED = 2
"""Of how many replicas, the busiest, packings are compared."""


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


Lengths = Sequence[int] | Mapping[str, Sequence[int | Sequence[int]]]
"""Of samples: tokens each; or by tower tokens each, or of each the lengths of its parts, like images."""


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
    seed: int = 0,
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
        seed: of the moves.

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
    num = schedule.num_microbatches
    tokens, sums = _read(lengths, costs, num * num_replicas)
    work = costs.work_by_tower(sums)
    problem = _Problem(schedule, costs, links, tokens, sums, num_replicas)
    in_turn = problem.ready(pack_in_turn(tokens, num * num_replicas), in_turn=True)
    first = [problem.arrived(bins) for bins in in_turn]
    arrival = max(each.makespan for each in first)
    cap = max(each.peak for each in first) if memory_limit is None else float(memory_limit)
    given_caps(cap, schedule.num_ranks)

    def planned(packed: list[Bins], moves: float = 0.0) -> list[_OrderedBins]:
        return [problem.ordered(bins, cap, dispatches, moves, seed) for bins in packed]

    found: list[tuple[float, str, list[Bins]]] = []
    refused: ScheduleError | None = None
    for name, bins in _packings(tokens, work, schedule, num_replicas, token_limit):
        packed = problem.ready(bins)
        busy = sorted(packed, key=problem.work_of, reverse=True)[:TRIED]
        try:
            tried = planned(busy)
        except ScheduleError as error:
            refused = refused or error
            continue
        found.append((max(each.makespan for each in tried), name, packed))
    fits = (token_limit is None or problem.most_tokens(in_turn) <= token_limit) and all(
        is_within(each.peak, cap) for each in first
    )
    chosen = None
    for _, name, packed in sorted(found, key=lambda each: each[0]):
        try:  # of the replicas that were not tried one may hold more than the cap
            chosen = name, packed, planned(packed, moves=moves)
            break
        except ScheduleError as error:
            refused = refused or error
    if chosen is None and not fits:
        raise refused or PackingError(
            f"{len(tokens)} sequences with {tokens.sum()} tokens find no room in {num * num_replicas} microbatches "
            f"of at most {token_limit:g}; raise the limit, or give more microbatches"
        )
    name, packed, best = chosen or (ARRIVAL, in_turn, first)
    makespan = max(each.makespan for each in best)
    if fits and arrival - makespan <= max(noise * makespan, slack(makespan)):
        name, packed, best, makespan = ARRIVAL, in_turn, first, arrival
    loads = np.array([problem.work_of(bins) for bins in packed])
    return BatchPlan(
        microbatches=tuple(
            tuple(tuple(bins[m]) for m in each.order) for bins, each in zip(packed, best, strict=True)
        ),
        packing=name,
        rules=tuple(each.rule for each in best),
        dispatches=tuple(each.dispatch for each in best),
        makespan=makespan,
        arrival=arrival,
        busiest=float(loads.max() / loads.mean()),
        peak=max(each.peak for each in best),
        cap=cap,
        seconds=time.perf_counter() - began,
    )


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


class _OrderedBins(NamedTuple):
    """An order of some bins, and what it is predicted to come to."""

    order: Sequence[int]
    rule: str
    dispatch: Dispatch
    makespan: float
    peak: float


class _Problem:
    """Bins, assigned and ordered over the costs of their lengths."""

    def __init__(
        self,
        schedule: Schedule,
        costs: CostsByLength,
        links: Links | None,
        tokens: Array,
        sums: Array,
        num_replicas: int,
    ) -> None:
        self._schedule, self._costs, self._links = schedule, costs, links
        self._tokens, self._of_sample, self._num_replicas = tokens, sums, num_replicas

    def ready(self, bins: Bins, in_turn: bool = False) -> list[Bins]:
        """The bins of each replica: in turn, or such that all have as much work."""
        if in_turn or self._num_replicas == 1:
            size = len(bins) // self._num_replicas
            return [bins[k : k + size] for k in range(0, len(bins), size)]
        groups = assign_evenly(self._costs.work(self._sums(bins)), self._num_replicas)
        return [[bins[k] for k in group] for group in groups]

    def work_of(self, bins: Bins) -> float:
        return float(self._costs.work(self._sums(bins)).sum())

    def most_tokens(self, packed: list[Bins]) -> int:
        return max(int(self._tokens[own].sum()) for bins in packed for own in bins)

    def arrived(self, bins: Bins) -> _OrderedBins:
        """The bins as they are, run frozen."""
        run = OrderSearch(self._schedule, self._costs_of(bins), self._links).arrival
        return _OrderedBins(run.order.tolist(), run.rule, run.dispatch, run.makespan, max(run.lowered.peaks))

    def ordered(
        self, bins: Bins, cap: float, dispatches: Sequence[Dispatch | str], moves: float, seed: int
    ) -> _OrderedBins:
        """The bins in their best order. Raises ScheduleError where none holds the cap."""
        costs = self._costs_of(bins)
        found = order_microbatches(
            self._schedule,
            costs,
            links=self._links,
            memory_limit=cap,
            dispatches=dispatches,
            time_limit=moves,
            seed=seed,
        )
        return _OrderedBins(found.order, found.rule, found.dispatch, found.makespan, max(found.peaks))

    def _costs_of(self, bins: Bins) -> Costs:
        return self._costs.of_sums(self._sums(bins))

    def _sums(self, bins: Bins) -> Array:
        found = np.array([self._of_sample[own].sum(axis=0) for own in bins])
        found[:, ::3] = 1.0
        return found
