"""In which order microbatches that differ are best run: by rules, tried in simulation, and a few moves from there.

    arrival      5 1 9 3 7 2 8 4
    mountain     1 3 5 8 9 7 4 2          short at both ends, the longest in the middle
    mixed        1 3 9 4 8 5 7 2          short at both ends, long and short in turn in between, which holds less

Where microbatches differ, their order decides more than dispatch does: short ones at both ends fill and drain the
pipeline fast, and long ones in the middle wait for nobody. One permutation serves all stages, forward and backward,
so queues keep their order, and sums of gradients are to the last bit those of a plain loop in that order.

Every candidate is the schedule with its microbatches renumbered, which is the same as the schedule over costs in
another order. So the schedule is lowered once, and a candidate is a gather of its ops' times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real

import numpy as np

from penstock.cost import Costs, Links, Uneven
from penstock.cost.costs import require_costs
from penstock.dispatch import Dispatch, Policy
from penstock.engine.sweep import Timer
from penstock.engine.tolerance import EPSILON, is_within, slack
from penstock.schedule import Op, Schedule, ScheduleError, check, declare_order, require_no_updates
from penstock.schedule.columns import KINDS, Array
from penstock.schedule.messages import remove_communication
from penstock.schedule.pairs import require_no_pairs
from penstock.schedule.short_repr import short_repr
from penstock.simulation.lowered import Order, durations, given_caps, memory_changes
from penstock.simulation.runner import PreparedRun, Runner, RunResult
from penstock.simulation.transport import Decoupled, SimulatedTransport, as_transport

SHARES = {
    "mountain": 1 / 2, "a third in front": 1 / 3, "two thirds in front": 2 / 3, "a quarter in front": 1 / 4,
    "three quarters in front": 3 / 4, "ascending": 1.0, "descending": 0.0,
}  # fmt: skip
"""By rule, the share of the microbatches that comes first, the shortest in front; the others follow in reverse."""
ENDS = {
    f"mixed, {round(16 * share)}/16 at the ends": share for share in (0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
}
"""By rule, the share that is short and at both ends, like a mountain's slopes; the others are mixed in between."""
OTHERS = ("ascending", "a third in front")
"""Orders of which others may run well that do not run well frozen."""
ARRIVAL = "arrival"
DISPATCHES = (Dispatch.HINTED, Dispatch.FROZEN, Dispatch.DYNAMIC)
"""What is tried, and what the runtime runs. Of equals the first is taken."""
NEAREST = 3
"""Of how many orders that are good frozen the other dispatches are tried too."""
CLASS_FIRST = 2
"""Of how many that are good class first is tried."""
NUM_MOVES = 300


@dataclass(frozen=True)
class OrderedMicrobatches:
    """A schedule with its microbatches in the order planned for them, and what that gains.

    Attributes:
        schedule: the order declared, the rows renumbered to keep it; the schedule as it was where that is best.
        order: `order[k]` is the microbatch that runs where microbatch k ran before.
        rule: where the order comes from: a rule of `SHARES` or "arrival", and "moved" where moves made it better.
        dispatch: how it is best run.
        makespan: predicted (ms).
        arrival: that of the schedule as it was, frozen (ms).
        peaks: most activations that each rank holds in this order, in the unit of the costs.
        arrival_peaks: the same of the schedule as it was.
        caps: what each rank was allowed to hold.
        seconds: spent.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs(f=[10] * 2, i=[10] * 2, w=[10] * 2, uneven=[4, 1, 2, 3])
        >>> ordered = ps.planning.order_microbatches(ps.build("1f1b", 2, 4), costs)
        >>> sorted(ordered.order), ordered.makespan <= ordered.arrival
        ([0, 1, 2, 3], True)
    """

    schedule: Schedule
    order: tuple[int, ...]
    rule: str
    dispatch: Dispatch
    makespan: float
    arrival: float
    peaks: tuple[float, ...]
    arrival_peaks: tuple[float, ...]
    caps: tuple[float, ...]
    seconds: float = field(compare=False)

    __repr__ = short_repr

    @property
    def gain(self) -> float:
        """`arrival / makespan - 1`: how much faster it is predicted to be."""
        return self.arrival / self.makespan - 1 if self.makespan else 0.0


def order_microbatches(
    schedule: Schedule,
    costs: Costs,
    *,
    links: Links | None = None,
    transport: SimulatedTransport | str = "decoupled",
    memory_limit: float | Sequence[float] | None = None,
    noise: float = 0.0,
    dispatches: Sequence[Dispatch | str] = DISPATCHES,
    time_limit: float = 0.0,
    seed: int = 0,
) -> OrderedMicrobatches:
    """The best order of a schedule's microbatches over costs that differ (`Costs.uneven`), and its best dispatch.

        before    rank 0 | F0 F1 F2 F3 B0 B1 ...        lengths 4 1 2 3: order 1 3 0 2
        after     rank 0 | F1 F3 F0 F2 B1 B3 ...

    Tried are the microbatches as they arrive; by length, ascending or descending; split, a share of them in front in
    ascending order and the others behind in descending order; and mixed, long and short in turn between short ends.
    The best of them are tried under each dispatch. Then come up to 300 moves (two change places, or one goes
    elsewhere) as long as time is left.

    Args:
        schedule: whose microbatches are ordered.
        costs: per stage, with `uneven`.
        links: delays (ms); messages arrive at once where not given.
        transport: as in `ps.simulate`.
        memory_limit: most activations a rank, or each rank, may hold, in the units of the costs; by default what each
            holds at most as the schedule is. It counts sizes: long microbatches side by side hold more than others.
        noise: the gain that a prediction must exceed, 0.05 for 5%; else order and dispatch stay arrival and frozen.
        dispatches: what is tried.
        time_limit: seconds for moves.
        seed: of the moves.

    Raises:
        ScheduleError: the schedule is not valid, already declares an order, has updates, registered ops or stages
            with microbatches of their own; a noise, time or cap that makes no sense; or no order tried holds the cap.
        CostError: costs for another number of stages, or links between ranks that are not there.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs(f=[10] * 2, i=[10] * 2, w=[10] * 2, uneven=[4, 1, 2, 3])
        >>> ordered = ps.planning.order_microbatches(ps.build("1f1b", 2, 4), costs)
        >>> ordered.order, ordered.arrival, ordered.makespan
        ((2, 0, 3, 1), 470.0, 370.0)
    """
    began = time.perf_counter()
    _check_at_least_0("noise", noise)
    _check_at_least_0("time_limit", time_limit)
    search = OrderSearch(
        schedule, costs, links, transport=transport, memory_limit=memory_limit, dispatches=dispatches
    )
    best, arrival = search.best(noise, time_limit, seed), search.arrival
    chosen = schedule if best.rule == ARRIVAL else in_order(remove_communication(schedule), best.order)
    return OrderedMicrobatches(
        chosen, tuple(best.order.tolist()), best.rule, best.dispatch, best.makespan, arrival.makespan,
        tuple(best.lowered.peaks), tuple(arrival.lowered.peaks), tuple(search.caps), time.perf_counter() - began,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class OrderCandidate:
    """An order of microbatches, and what came of it.

    Attributes:
        order: as in `OrderedMicrobatches`. lowered: the schedule over the costs in that order.
        makespan: ms.
    """

    order: Array
    rule: str
    dispatch: Dispatch
    lowered: Order
    makespan: float

    @property
    def peak(self) -> float:
        """The most that any rank holds."""
        return max(self.lowered.peaks)


class OrderSearch:
    """A schedule lowered once, and any order of its microbatches run over the costs.

    Args: as of `order_microbatches`.

    Attributes:
        caps: most each rank may hold, in the units of the costs. arrival: the schedule as it is, frozen.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        links: Links | None = None,
        *,
        transport: SimulatedTransport | str = "decoupled",
        memory_limit: float | Sequence[float] | None = None,
        dispatches: Sequence[Dispatch | str] = DISPATCHES,
    ) -> None:
        require_costs(costs)
        costs.require_stages(schedule.num_stages)
        self.costs, self._links = costs, Links.of(links)
        self._links.check_ranks(schedule.num_ranks)
        self._transport = as_transport(transport)
        self._dispatches = tuple(Policy.of(each).dispatch for each in dispatches)
        if not self._dispatches:
            raise ScheduleError("no dispatches: give at least one, like ('frozen', 'hinted')", rule="dispatch")
        self._even = replace(costs, uneven=())
        self._runner = Runner(self._even)

        plain = _lowered(schedule)
        graph = plain.graph
        self._lowered = replace(
            plain,
            duration=durations(plain.schedule, graph, self._even),
            change=np.array(memory_changes(graph, self._even), np.float64),
        )
        self._known: dict[str, object] = {"crossing": plain.crossing}
        self._prepared: dict[Dispatch, PreparedRun] = {}
        self._counts_sizes = bool(costs.factors.activation)
        if not self._counts_sizes:  # then every order holds what every other does
            self._known["peaks"] = self._lowered.peaks
        self._timer, self._ops = self._frozen_timer(plain), np.arange(plain.num_ops)
        num, stages = schedule.num_microbatches, costs.num_stages
        row, self._microbatch = _rows_of(plain, stages)
        self._row = row * num
        self._times = np.concatenate([costs.time_factors(kind, num) for kind in KINDS])
        self._sizes = np.concatenate([costs.activation_factors(kind, num) for kind in KINDS])
        self._pipelines = np.array(schedule.microbatch_pipeline)
        self._slots = [np.flatnonzero(self._pipelines == k) for k in range(schedule.placement.num_pipelines)]
        first = self._over(np.arange(num))
        self._by_work = np.argsort(np.bincount(self._microbatch, first.duration, num), kind="stable")
        self.caps = first.peaks if memory_limit is None else given_caps(memory_limit, schedule.num_ranks)
        self.arrival = self._run(np.arange(num), ARRIVAL, first, Dispatch.FROZEN)

    def fits(self, lowered: Order) -> bool:
        """Whether each rank stays within its cap."""
        return all(map(is_within, lowered.peaks, self.caps))

    def best(self, noise: float = 0.0, seconds: float = 0.0, seed: int = 0) -> OrderCandidate:
        """The best by rules and, in so many seconds, by moves; the arrival where they gain less than the noise."""
        began = time.perf_counter()
        best, arrival = self.best_by_rules(), self.arrival
        if seconds > 0:
            best = self.moved(best, began + seconds, seed)
        least = max(noise * best.makespan, slack(best.makespan))
        return arrival if self.fits(arrival.lowered) and arrival.makespan - best.makespan <= least else best

    def best_by_rules(self) -> OrderCandidate:
        """The fastest of all rules and dispatches within the caps. Raises ScheduleError where none keeps them."""
        orders = {order.tobytes(): (rule, order) for rule, order in reversed(self._rules())}
        tried = [(order, rule, self._over(order)) for rule, order in reversed(orders.values())]
        within = [each for each in tried if self.fits(each[2])]
        if not within:
            raise self._no_room(min((lowered for _, _, lowered in tried), key=self._excess))
        frozen = sorted((self._run(*each, Dispatch.FROZEN) for each in within), key=lambda each: each.makespan)
        found = frozen if Dispatch.FROZEN in self._dispatches else []
        chosen = [*frozen[:NEAREST], *(each for each in frozen[NEAREST:] if each.rule in OTHERS)]
        for dispatch in sorted({*self._dispatches} - {Dispatch.FROZEN}, key=[*DISPATCHES].index):
            if dispatch is Dispatch.DYNAMIC and found:  # as a rule the slowest
                chosen = sorted(found, key=lambda each: each.makespan)[:CLASS_FIRST]
            found = found + [self._run(each.order, each.rule, each.lowered, dispatch) for each in chosen]
        shortest = min(each.makespan for each in found)
        same = [each for each in found if each.makespan <= shortest + slack(shortest)]
        return min(same, key=lambda each: self._dispatches.index(each.dispatch))

    def moved(self, best: OrderCandidate, until: float, seed: int) -> OrderCandidate:
        """The best after some moves: two microbatches change places, or one goes to another.

        One walk goes through orders as they run under the dispatch of the best, each no slower than the one before;
        one through frozen orders that may be above the caps for a while, at a price.
        """
        best = self._walked(best, best, until, seed)
        if Dispatch.FROZEN not in self._dispatches:
            return best
        starts = [self._run(order, rule, self._over(order), Dispatch.FROZEN) for rule, order in self._rules()]
        return self._walked(min(starts, key=self._price), best, until, seed + 1, above_caps=True)

    def _walked(
        self, at: OrderCandidate, best: OrderCandidate, until: float, seed: int, above_caps: bool = False
    ) -> OrderCandidate:
        """The best after a walk whose orders are no worse than those before them.

        Args:
            at: where it begins.
            above_caps: whether orders may be above the caps, at a price.
        """
        rule, price = f"{at.rule}, moved", self._price(at)
        for move in _moves(len(at.order), seed):
            if time.perf_counter() > until:
                break
            moved = self._by_pipeline(at.order.take(move))
            if np.array_equal(moved, at.order):
                continue
            lowered = self._over(moved)
            fits = self.fits(lowered)
            if not (fits or above_caps):
                continue
            found = self._run(moved, rule, lowered, at.dispatch, price + slack(price))
            if (asked := self._price(found)) <= price:
                at, price = found, asked
                if fits and found.makespan < best.makespan - slack(found.makespan):
                    best = found
        return best

    def _price(self, candidate: OrderCandidate) -> float:
        """The makespan, longer by the share by which the caps are exceeded."""
        if self.fits(candidate.lowered):
            return candidate.makespan
        peaks = candidate.lowered.peaks
        least = EPSILON * max(1.0, max(peaks, default=0.0))
        over = max((peak / max(cap, least) for peak, cap in zip(peaks, self.caps, strict=True)), default=0.0) - 1
        return candidate.makespan * (1 + 2 * max(0.0, over))

    def schedule(self, candidate: OrderCandidate) -> Schedule:
        """The schedule in this order."""
        return in_order(self._lowered.schedule, candidate.order)

    def executed(self, candidate: OrderCandidate) -> Schedule:
        """The schedule in this order, its rows as they ran: run frozen it is no slower."""
        return in_order(self._ran(candidate.order, candidate.lowered, candidate.dispatch).executed(), candidate.order)

    def _rules(self) -> list[tuple[str, Array]]:
        by_work = self._by_work
        found = [(ARRIVAL, np.arange(len(by_work)))]
        found += [(rule, split(by_work, share)) for rule, share in SHARES.items()]
        found += [(rule, mixed(by_work, share)) for rule, share in ENDS.items()]
        return [(rule, self._by_pipeline(order)) for rule, order in found]

    def _by_pipeline(self, order: Array) -> Array:
        """The order with each microbatch in a place of its own pipeline."""
        if len(self._slots) == 1:
            return order
        placed = np.empty_like(order)
        for k, slots in enumerate(self._slots):
            placed[slots] = order[self._pipelines[order] == k]
        return placed

    def _over(self, order: Array) -> Order:
        """The schedule over the costs in another order of microbatches."""
        base = self._lowered
        at = self._row + order.take(self._microbatch)
        duration = base.duration * self._times.take(at)
        change = base.change * self._sizes.take(at) if self._counts_sizes else base.change
        found = Order(base.schedule, base.graph, duration, change)
        found.__dict__.update(self._known)
        return found

    def _run(
        self, order: Array, rule: str, lowered: Order, dispatch: Dispatch, limit: float = math.inf
    ) -> OrderCandidate:
        """What comes of an order; a makespan of infinity where that is known to be above the limit."""
        if dispatch is Dispatch.FROZEN and self._timer is not None:
            makespan = max(self._timer.makespan(self._ops, lowered.duration), 0.0)
        elif (prepared := self._prepared_for(lowered, dispatch)) is not None:
            makespan = prepared.makespan_within(limit, lowered.duration, lowered.change)
        else:
            makespan = self._ran(order, lowered, dispatch).makespan
        return OrderCandidate(order, rule, dispatch, lowered, makespan)

    def _prepared_for(self, lowered: Order, dispatch: Dispatch) -> PreparedRun | None:
        """What all orders' runs of a dispatch begin with; None where that differs from order to order."""
        if dispatch is Dispatch.FROZEN or not self._links.is_constant:
            return None
        if dispatch not in self._prepared:
            policy = Policy.of(dispatch)
            self._prepared[dispatch] = self._runner.prepared(lowered, self._links, policy, self._transport, self.caps)
        return self._prepared[dispatch]

    def _ran(self, order: Array, lowered: Order, dispatch: Dispatch) -> RunResult:
        caps = None if dispatch is Dispatch.FROZEN else self.caps
        prepared = self._prepared_for(lowered, dispatch)
        if prepared is not None:
            return replace(prepared.run(lowered.duration, lowered.change), order=lowered)
        runner = self._runner
        if self.costs.factors.message:
            sizes = {
                kind: self.costs.factors.table("message", kind, self.costs.num_stages, len(order))[:, order].tolist()
                for kind in "FB"
            }
            runner = Runner(replace(self._even, uneven=Uneven(message=sizes)))
        return runner.run(lowered, self._links, dispatch=dispatch, transport=self._transport, caps=caps)

    def _frozen_timer(self, plain: Order) -> Timer | None:
        """What times the frozen order by one sweep; None where links and ops are more than delays and rows."""
        alone = len(plain.graph.gang_first) == 1 and not plain.graph.has_streams
        if not self._links.is_constant or self._transport != Decoupled() or not alone:
            return None
        num = plain.num_ranks
        delays = np.array([self._links.delay(a, b) if a != b else 0.0 for a in range(num) for b in range(num)])
        return Timer(*plain.op_graph(delays).network(plain.duration))

    def _excess(self, lowered: Order) -> float:
        return max(peak - cap for peak, cap in zip(lowered.peaks, self.caps, strict=True))

    def _no_room(self, least: Order) -> ScheduleError:
        rank = max(range(len(self.caps)), key=lambda r: least.peaks[r] - self.caps[r])
        return ScheduleError(
            f"rank {rank} may hold {self.caps[rank]:g}, and in the lightest of the orders of microbatches that were "
            f"tried it holds {least.peaks[rank]:g} (rule: memory); raise the cap, or build the schedule with fewer "
            "in flight",
            rule="memory",
            rank=rank,
        )


def split(by_work: Array, share: float) -> Array:
    """Of microbatches in ascending order, a share as they are, and the others in reverse behind them.

    share 1/2 of  0 1 2 3 4 5:  1 3 5 4 2 0
    """
    turn = np.floor(np.arange(1, len(by_work) + 1) * share + EPSILON)
    in_front = np.diff(turn, prepend=0) > 0
    return np.concatenate([by_work[in_front], by_work[~in_front][::-1]])


def mixed(by_work: Array, share: float) -> Array:
    """Of microbatches in ascending order, the shortest at both ends, and in between long and short in turn.

    share 1/2 of  0 1 2 3 4 5 6 7:  1 3 7 4 6 5 2 0
    """
    num = int(len(by_work) * share)
    slopes, middle = split(by_work[:num], 1 / 2), by_work[num:]
    half = (len(middle) + 1) // 2
    turns = np.empty_like(middle)
    turns[0::2], turns[1::2] = middle[::-1][:half], middle[: len(middle) - half]
    return np.concatenate([slopes[: num // 2], turns, slopes[num // 2 :]])


@lru_cache(maxsize=16)
def _moves(num: int, seed: int) -> Array:
    """Moves of `num` microbatches, as permutations: two change places, or one goes elsewhere."""
    draw, moves = np.random.default_rng(seed), np.empty((NUM_MOVES if num > 1 else 0, num), np.int64)
    for each in moves:
        a, b = draw.integers(0, num, 2).tolist()
        places = list(range(num))
        if draw.random() < 0.5:
            places[a], places[b] = b, a
        else:
            places.insert(b, places.pop(a))
        each[:] = places
    return moves


def in_order(schedule: Schedule, order: Array) -> Schedule:
    """A valid schedule with microbatch `order[k]` in place of k, which is as valid: only names are other ones."""
    taken = order.tolist()
    declared = declare_order(schedule, taken, taken)
    columns = schedule.columns
    if columns is not None:
        return declared.with_columns(columns._replace(microbatch=order[columns.microbatch]))
    rows = tuple(tuple([Op(kind, stage, taken[m]) for kind, stage, m in row]) for row in schedule.order)
    return replace(declared, order=rows)


@lru_cache(maxsize=8)
def _lowered(schedule: Schedule) -> Order:
    """A schedule that was checked, as arrays: the same from step to step."""
    require_no_updates(schedule, "which update a microbatch goes into follows from its number")
    require_no_pairs(schedule, "order_microbatches times ops that run by themselves")
    if schedule.microbatch_orders:
        raise ScheduleError(
            f"{schedule.name} declares an order of microbatches already; give it as it was built, in ascending order",
            rule="microbatches",
        )
    graph = schedule.stage_graph
    if graph is not None and (graph.registered or graph.needs or graph.num_microbatches):
        raise ScheduleError(
            f"{schedule.name} has registered ops, or stages with microbatches of their own, which follow the number "
            "of a microbatch; order_microbatches takes schedules of F, B, I, W and R",
            rule="microbatches",
        )
    check(schedule)
    return Runner(Costs.uniform(schedule.num_stages)).lowered(remove_communication(schedule))


def _rows_of(lowered: Order, num_stages: int) -> tuple[Array, Array]:
    """Of each op its row in tables by kind and stage, and its microbatch."""
    columns = lowered.graph.columns
    if columns is not None:
        return columns.kind * num_stages + columns.stage, columns.microbatch
    rows = [(KINDS.index(op.kind) * num_stages + op.stage, op.microbatch) for op in lowered.graph.ops]
    found = np.array(rows, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _check_at_least_0(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise ScheduleError(f"{name} is {value!r}: give a number of at least 0", rule="options")
