"""Runs orders of ops many times over: other orders, links, caps, dispatch, and no timeline unless it is asked for.

    runner = Runner(costs)
    order = runner.order(schedule)            # lowered once
    ran = runner.run(order, links, dispatch="dynamic", caps=caps)
    ran.makespan, ran.peaks, ran.executed()

`simulate` does this once and makes a timeline of the result. Code that compares many candidates keeps the runner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np

from penstock.cost import Costs, Links
from penstock.cost.links import LinkQueues
from penstock.dispatch import Dispatch, Policy
from penstock.engine import event_loop
from penstock.engine.arrays import Array, copied, prepared, taken
from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.decider import RankState
from penstock.engine.event_loop import LinkArrays, LoopState
from penstock.engine.min_tree import leaves_for
from penstock.engine.sweep import Timer
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.async_ops import in_executed_order, rows_of
from penstock.simulation.lowered import Order, lowered
from penstock.simulation.transport import Arrival, SimulatedTransport, run_links


@dataclass(frozen=True, eq=False)
class RunResult:
    """When the ops of a run started and ended, and how much each rank held.

    Attributes:
        order: the order that ran.
        start_time, end_time, free_time, turn: of each op; arrival_time: of each edge; peak: of each rank. See
            `event_loop.LoopState`.
    """

    order: Order
    start_time: Array
    end_time: Array
    free_time: Array
    arrival_time: Array
    turn: Array
    peak: Array

    @property
    def makespan(self) -> float:
        """First op's start to last op's end (ms)."""
        return makespan_of(self.start_time, self.end_time)

    @property
    def peaks(self) -> tuple[float, ...]:
        """Most activations each rank held."""
        return tuple(map(float, self.peak[: self.order.num_ranks]))

    def executed(self) -> Schedule:
        """The schedule with each rank's ops in the order in which they ran, see `Timeline.executed`."""
        first, turn = self.order.graph.first, np.asarray(self.turn)
        rows = []
        schedule = self.order.schedule
        for rank, row in enumerate(rows_of(schedule)[: schedule.num_ranks]):
            places = np.argsort(turn[first[rank] : first[rank + 1]], kind="stable").tolist()
            rows.append(tuple([row[place] for place in places]))
        return in_executed_order(schedule, rows)


def makespan_of(start: Array, end: Array) -> float:
    """First op's start to last op's end (ms)."""
    return float(np.max(end)) - float(np.min(start)) if len(start) else 0.0


class PreparedRun:
    """An order with the state in which its runs begin. Runs may differ in the time and memory of ops.

    Args: as of `Runner.run`.
    """

    def __init__(
        self,
        order: Order,
        policy: Policy,
        links: tuple[LinkArrays, Arrival | None],
        compile: bool,
        caps: Sequence[float] | None,
        warmup: Sequence[int] | None = None,
        due: Array | None = None,
    ) -> None:
        arrays, self._arrival = links
        self._order, self._policy, self._warmup = order, policy, warmup
        self._loop: ModuleType = compiled(event_loop) if compile else event_loop
        graph, num_rows, num_ops = order.graph, order.num_rows, order.num_ops
        streams = num_rows - order.num_ranks
        nothing, num_edges = np.zeros(0), len(graph.arrays.edge_to)
        ranks = RankState(
            memory_change=nothing,
            cap=np.array([*([math.inf] * order.num_ranks if caps is None else caps), *[math.inf] * streams]),
            missing=graph.arrays.num_needed,
            done=np.zeros(num_ops),
            head=graph.arrays.queue_first[:-1],
            next_frozen=graph.arrays.first[:-1],
            held=np.zeros(num_rows),
            warmup_left=np.array([*(warmup or [0] * order.num_ranks), *[0] * streams]),
            under_way=np.zeros(order.num_ranks) if streams else None,
        )
        loop = LoopState(
            duration=nothing,
            due=nothing if due is None else np.asarray(due),
            left=np.zeros(num_rows),
            start_time=np.zeros(num_ops),
            end_time=np.zeros(num_ops),
            free_time=np.zeros(num_ops),
            arrival_time=np.zeros(num_edges),
            peak=np.zeros(num_rows),
            turn=np.zeros(num_ops),
            state=np.zeros(num_rows),
            last_on=np.zeros(num_rows),
            unsent=np.zeros(num_rows),
            wake=np.zeros(num_rows),
            ends=np.full(2 * leaves_for(num_rows), event_loop.NEVER),
            gathered=np.zeros(len(graph.arrays.gang_first)),
            in_transit=np.zeros(num_rows**2 if arrays.bounded else 0),
            reached=np.zeros(2),
        )
        self._compile = compile
        self._network = graph.arrays if compile else graph.lists
        self._ranks, self._state, self._links = (
            prepared(ranks, compile), prepared(loop, compile), prepared(arrays, compile)
        )  # fmt: skip

    def run(self, duration: Array, change: Array) -> RunResult:
        """Runs the order to its end.

        Args:
            duration: ms of each op.
            change: the activations that each op adds to those its rank holds.

        Raises:
            ScheduleError: as of `Runner.run`.
        """
        state = self._driven(duration, change, math.inf)
        assert state is not None
        return RunResult(
            self._order, state.start_time, state.end_time, state.free_time, state.arrival_time, state.turn, state.peak
        )

    def makespan_within(self, limit: float, duration: Array, change: Array) -> float:
        """The makespan (ms) of a run whose first op starts at once. Infinity if the makespan is sure to be above
        `limit`, which is often known long before the run ends.

        Args and Raises: as of `run`.
        """
        state = self._driven(duration, change, limit)
        return math.inf if state is None else makespan_of(state.start_time, state.end_time)

    def _driven(self, duration: Array, change: Array, limit: float) -> LoopState | None:
        """The state that the event loop wrote. None if the run is sure to end after `limit` (ms)."""
        order, num_ops = self._order, self._order.num_ops
        ranks = copied(self._ranks)._replace(memory_change=taken(change, np.float64, self._compile))
        state = copied(self._state)._replace(duration=taken(duration, np.float64, self._compile))
        if limit < math.inf:
            state.left[:] = np.bincount(order.graph.arrays.rank, duration, order.num_rows)
        ended = self._loop.run(
            self._policy.dispatch.code, self._policy.wait, limit, self._network, ranks, state, copied(self._links),
            self._arrival,
        )  # fmt: skip
        if ended == event_loop.TOO_LATE:
            return None
        if ended < num_ops:
            if self._warmup is not None:
                _refuse_warmup(order, ranks, self._warmup)
            stuck = next(o for o in range(num_ops) if not ranks.done[o])
            op, rank = order.graph.ops[stuck], order.graph.host(stuck)
            raise ScheduleError(
                f"the run stops after {ended} of {num_ops} ops: rank {rank} never runs {op} "
                f"(rule: deadlock); ps.check(schedule) shows why",
                rule="deadlock",
                rank=rank,
                op=op,
            )
        return state


class Runner:
    """Runs schedules under one set of costs.

    Args:
        costs: per stage.
        compile: whether to run as C; by default where that can be had.
    """

    KEPT = 256

    def __init__(self, costs: Costs, compile: bool | None = None) -> None:
        self.costs, self.compile = costs, is_compiled() if compile is None else compile
        self._known = lru_cache(self.KEPT)(self.lowered)

    def order(self, schedule: Schedule) -> Order:
        """The schedule lowered, which is kept; args and Raises as of `lowered`."""
        return self._known(schedule)

    def lowered(self, schedule: Schedule) -> Order:
        """The schedule lowered, for one run; it has no communication ops.

        Raises:
            CostError: the costs are for another number of stages.
            ScheduleError: what `lower` refuses.
        """
        return lowered(schedule, self.costs)

    def run(
        self,
        order: Order,
        links: Links | LinkQueues,
        *,
        dispatch: Dispatch | Policy | str = Dispatch.FROZEN,
        transport: SimulatedTransport,
        caps: Sequence[float] | None = None,
        warmup: Sequence[int] | None = None,
        links_at: float = 0.0,
        due: Array | None = None,
    ) -> RunResult:
        """Runs an order to its end. Caps count where dispatch is not frozen, and are not checked here.

        Args:
            due: when each op is planned to start (ms), for a policy that waits; by default when it does in the
                frozen run over the same costs and links.

        Raises:
            ScheduleError: the order deadlocks, or a rank can't run the forwards of its warm-up first.
        """
        policy = Policy.of(dispatch)
        if policy.wait and due is None:
            due = self.run(order, deepcopy(links), transport=transport, links_at=links_at).start_time
        arrays, arrival = through = run_links(order, links, self.costs, links_at, transport)
        graph, use = order.graph, self.compile and arrival is None
        plain = not (policy.wait or arrays.bounded or arrays.lines or arrival or warmup)
        follows = policy.dispatch is Dispatch.FROZEN and not graph.has_streams and not graph.has_shared_ops
        if plain and follows and (timed := _swept(order, arrays.delay, compile=use)) is not None:
            return timed
        return PreparedRun(order, policy, through, use, caps, warmup, due).run(order.duration, order.change)

    def prepared(
        self,
        order: Order,
        links: Links | LinkQueues,
        policy: Policy,
        transport: SimulatedTransport,
        caps: Sequence[float] | None = None,
    ) -> PreparedRun:
        """An order made ready for many runs, which differ in the time and memory of its ops."""
        through = run_links(order, links, self.costs, 0.0, transport)
        return PreparedRun(order, policy, through, self.compile and through[1] is None, caps)


def _swept(order: Order, delay: Array, compile: bool) -> RunResult | None:
    """The result of the event loop, computed by one sweep through the orders. None if the ranks deadlock.

    Both agree where ranks follow their orders and links do nothing but delay messages.

    Args:
        delay: ms of each link (see `Order.ends`).
    """
    ops = np.arange(order.num_ops)
    timed = Timer(*order.op_graph(delay).network(order.duration), compile).time(ops)
    if not timed.complete:
        return None
    start = np.asarray(timed.start)
    end = start + order.duration
    turn = np.empty_like(ops)
    turn[np.argsort(start, kind="stable")] = ops
    arrival, late = end[order.graph.sources], order.late(delay)
    if late is not None:
        arrival += late
    return RunResult(order, start, end, end, arrival, turn, np.array(order.peaks))


def _refuse_warmup(order: Order, state: RankState, warmup: Sequence[int]) -> None:
    """Raises ScheduleError if warm-up counts stopped a run: some rank may then run nothing but forwards."""
    waiting = [rank for rank in range(order.num_ranks) if state.warmup_left[rank] > 0]
    if not waiting:
        return
    first, ops = order.graph.first, order.graph.ops

    def left(rank: int) -> list[int]:
        """Forwards of the rank that have not run."""
        return [o for o in range(first[rank], first[rank + 1]) if ops[o].kind == "F" and not state.done[o]]

    def has_room_for_none(rank: int) -> bool:
        """Whether there is a forward that only the cap holds back; those run together wait for their turn too."""
        return any(state.missing[o] == 0 and order.graph.gang[o] < 0 for o in left(rank))

    rank = next(filter(has_room_for_none, waiting), waiting[0])
    ran = warmup[rank] - int(state.warmup_left[rank])
    way = ""
    if has_room_for_none(rank):
        reason = f"its cap of {float(state.cap[rank]):g} activations lets in no more than {ran}"
        way = ", or a higher memory_limit"
    elif not left(rank):
        reason = f"it has only {ran}"
    else:
        reason = f"after {ran} none can run before some other op has"
    raise ScheduleError(
        f"rank {rank} is to run {warmup[rank]} forwards before anything else, and {reason} (rule: warm-up); give a "
        f"warm-up of at most {ran}{way}",
        rule="options",
        rank=rank,
    )
