"""Runs orders of ops many times over: other orders, links, caps, dispatch, and no timeline unless it is asked for.

    runner = Runner(costs)
    order = runner.order(schedule)            # lowered once; other orders of the same ops follow from the first
    ran = runner.run(order, links, dispatch="dynamic", caps=caps)
    ran.makespan, ran.peaks, ran.executed()

`simulate` does this once and makes a timeline of it; who compares many candidates keeps the runner.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from penstock.cost import Costs, Links
from penstock.cost.links import LinkQueues
from penstock.dispatch import Dispatch, Graph, Policy, lower
from penstock.engine import event_loop
from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.min_tree import leaves_for
from penstock.engine.network import OpGraph
from penstock.engine.timing import Timer
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.async_ops import in_executed_order, rows_of
from penstock.schedule.columns import Array, B, Columns, W
from penstock.schedule.updates import OWNER
from penstock.simulation.link_arrays import LinkArrays, passed
from penstock.simulation.lowered import Order
from penstock.simulation.memory import by_kind_and_stage, by_op, memory_changes
from penstock.simulation.transport import SimulatedTransport


@dataclass(frozen=True, eq=False)
class RunResult:
    """What came of a run: the engine's arrays, and what they say."""

    order: Order
    arrays: dict[str, Any]

    @property
    def makespan(self) -> float:
        """First op's start to last op's end (ms)."""
        if not self.order.num_ops:
            return 0.0
        return float(np.max(self.arrays["end_time"])) - float(np.min(self.arrays["start_time"]))

    @property
    def peaks(self) -> tuple[float, ...]:
        """Most activations each rank held."""
        return tuple(map(float, self.arrays["peak"][: self.order.num_ranks]))

    def executed(self) -> Schedule:
        """The schedule with each rank's ops in the order in which they ran, see `Timeline.executed`."""
        first, turn = self.order.graph.first, np.asarray(self.arrays["turn"])
        rows = []
        schedule = self.order.schedule
        for rank, row in enumerate(rows_of(schedule)[: schedule.num_ranks]):
            places = np.argsort(turn[first[rank] : first[rank + 1]], kind="stable").tolist()
            rows.append(tuple([row[place] for place in places]))
        return in_executed_order(schedule, rows)


class PreparedRun:
    """An order, and all that its runs begin with but what its ops take.

    What a run changes lies in one array of ints and one of floats, so that another run begins with two copies.

    Args: as of `Runner.run`.
    """

    def __init__(
        self,
        order: Order,
        policy: Policy,
        through: LinkArrays,
        compile: bool,
        caps: Sequence[float] | None,
        warmup: Sequence[int] | None = None,
        due: Array | None = None,
    ) -> None:
        self._order, self._policy, self._through, self._compile = order, policy, through, compile
        self._warmup = warmup
        num_rows, num_ops = order.num_rows, order.num_ops
        streams = num_rows - order.num_ranks
        self._kept: dict[str, Array] = {
            **order.ints,
            **through.arrays,
            "cap": np.array([*([math.inf] * order.num_ranks if caps is None else caps), *[math.inf] * streams]),
            "due": np.zeros(1) if due is None else np.asarray(due),
        }
        changed: dict[str, Array] = {
            "missing": order.missing,
            "head": order.ints["queue_first"][:-1],
            "next_frozen": order.ints["first"][:-1],
            "gathered": np.zeros(max(1, len(order.ints["gang_first"]) - 1), np.int64),
            "warmup_left": np.array([*(warmup or [0] * order.num_ranks), *[0] * streams], np.int64),
            "in_transit": np.zeros(num_rows**2, np.int64),
            "arrival_time": np.zeros(len(order.ints["edge_to"])),
            **{name: through.arrays[name] for name in ("line_free", "line_last")},
            **{name: np.zeros(num_ops, np.int64) for name in ("done", "turn")},
            **{name: np.zeros(num_rows, np.int64) for name in ("state", "unsent")},
            **{name: np.zeros(num_ops) for name in ("start_time", "end_time", "free_time")},
            **{name: np.zeros(num_rows) for name in ("held", "peak", "wake", "left")},
            "ends": np.full(2 * leaves_for(num_rows), event_loop.NEVER),
        }
        if streams:
            changed["beside"] = np.array(order.graph.beside, np.float64)
        self._at_first = [_one_behind_the_other(changed, kind) for kind in (np.int64, np.float64)]

    def run(self, duration: Array, change: Array) -> RunResult:
        """Runs it to its end.

        Args:
            duration: of each op, ms. change: what each adds to what its rank holds.

        Raises:
            ScheduleError: as of `Runner.run`.
        """
        arrays = self._begun(duration, change)
        self._drive(arrays, math.inf)
        return RunResult(self._order, arrays)

    def makespan_within(self, limit: float, duration: Array, change: Array) -> float:
        """The makespan alone (ms) of a run whose first op starts at once; infinity where it is sure to be above
        `limit`, which is often known long before the end.

        Args and Raises: as of `run`.
        """
        if self._compile:
            arrays, wholes = self._again
            for whole, (first, _) in zip(wholes, self._at_first, strict=True):
                whole[:] = first
            arrays |= {"duration": duration, "memory_change": change}
        else:
            arrays = self._begun(duration, change)
        left = np.bincount(self._kept["rank_of"], duration, self._order.num_rows)
        arrays["left"][:] = left if self._compile else left.tolist()
        return RunResult(self._order, arrays).makespan if self._drive(arrays, limit) else math.inf

    @cached_property
    def _again(self) -> tuple[dict[str, Any], list[Array]]:
        """The arrays of runs of which nothing is kept, and those that they are parts of."""
        wholes = [first.copy() for first, _ in self._at_first]
        return self._kept | self._parts_of(wholes), wholes

    def _begun(self, duration: Array, change: Array) -> dict[str, Any]:
        """All arrays as a run begins with them."""
        parts = self._parts_of([first.copy() for first, _ in self._at_first])
        arrays = self._kept | parts | {"duration": duration, "memory_change": change}
        return arrays if self._compile else {name: array.tolist() for name, array in arrays.items()}

    def _parts_of(self, wholes: list[Array]) -> dict[str, Array]:
        places = (places for _, places in self._at_first)
        return {name: whole[place] for whole, each in zip(wholes, places, strict=True) for name, place in each}

    def _drive(self, arrays: dict[str, Any], limit: float) -> bool:
        """Drives the event loop to its end; returns whether that may be within the limit."""
        order, policy, num_ops = self._order, self._policy, self._order.num_ops
        loop: ModuleType = compiled(event_loop) if self._compile else event_loop
        ended = loop.run(
            policy.dispatch.code,
            policy.wait,
            bounded=self._through.bounded,
            lines=self._through.lines,
            base=self._through.base,
            arrival=self._through.arrival,
            limit=limit,
            **arrays,
        )
        if ended == event_loop.TOO_LATE:
            return False
        if ended < num_ops:
            if self._warmup is not None:
                _refuse_warmup(order, arrays, self._warmup)
            stuck = next(o for o in range(num_ops) if not arrays["done"][o])
            op = [op for row in rows_of(order.schedule) for op in row][stuck]
            rank = int(order.ints["rank_of"][stuck]) % order.num_ranks
            raise ScheduleError(
                f"the run stops after {ended} of {num_ops} ops: rank {rank} never runs {op} "
                f"(rule: deadlock); ps.check(schedule) shows why",
                rule="deadlock",
                rank=rank,
                op=op,
            )
        return True


def _one_behind_the_other(arrays: dict[str, Array], kind: type) -> tuple[Array, list[tuple[str, slice]]]:
    """The arrays of a kind of numbers as one, and where in it each is."""
    chosen = {name: array for name, array in arrays.items() if array.dtype == kind}
    ends = np.cumsum([0, *map(len, chosen.values())]).tolist()
    return np.concatenate([*chosen.values()]), list(zip(chosen, map(slice, ends, ends[1:]), strict=False))


def durations(schedule: Schedule, graph: Graph, costs: Costs) -> Array:
    """Of each op of a lowered schedule, ms."""
    columns = graph.columns
    if columns is not None:
        even = by_kind_and_stage(columns, costs.duration)
        return even if not costs.factors.time else even * by_op(columns, costs.time_factors)
    if costs.factors.time:
        found = [costs.duration(*op) for op in graph.ops]
    else:
        known = {key: costs.duration(*key) for key in {(op.kind, op.stage) for op in graph.ops}}
        found = [known[op[:2]] for op in graph.ops]
    for forward, backward in graph.backward_of.items():
        found[forward], found[backward] = costs.pair_duration(graph.ops[forward], graph.ops[backward]), 0.0
    for number, op in enumerate(graph.ops if schedule.updates is not None else ()):
        if op.kind == "U":
            found[number] = costs.duration("U", op.stage, owns=schedule.pipeline_of(op) == OWNER)
    return np.array(found, np.float64)


class Runner:
    """Runs schedules under one set of costs.

    Args:
        costs: per stage.
        compile: whether to run as C; by default where that can be had.
    """

    KEPT, TEMPLATES = 256, 8

    def __init__(self, costs: Costs, compile: bool | None = None) -> None:
        self.costs, self.compile = costs, is_compiled() if compile is None else compile
        self._orders: OrderedDict[Schedule, Order] = OrderedDict()
        self._templates: list[Order] = []

    def order(self, schedule: Schedule) -> Order:
        """The schedule as arrays; it has no communication ops.

        Raises:
            CostError: the costs are for another number of stages.
            ScheduleError: what `lower` refuses.
        """
        found = self._orders.get(schedule)
        if found is None:
            found = self._from_template(schedule) or self.lowered(schedule)
            self._orders[schedule] = found
            if len(self._orders) > self.KEPT:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(schedule)
        return found

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
            due = self.run(order, deepcopy(links), transport=transport, links_at=links_at).arrays["start_time"]
        through, use = self._through(order, links, links_at, transport)
        streams = order.num_rows > order.num_ranks
        plain = not (policy.wait or through.bounded or streams or through.lines or through.arrival or warmup)
        alone = len(order.ints["gang_ops"]) == len(order.ints["gang_first"]) - 1
        if plain and policy.dispatch is Dispatch.FROZEN and alone:
            timed = _swept(order, through.arrays["delay"], compile=use)
            if timed is not None:
                return RunResult(order, timed)
        return PreparedRun(order, policy, through, use, caps, warmup, due).run(order.duration, order.change)

    def prepared(
        self,
        order: Order,
        links: Links | LinkQueues,
        policy: Policy,
        transport: SimulatedTransport,
        caps: Sequence[float] | None = None,
    ) -> PreparedRun:
        """All that `run` takes from an order, for runs that differ in what its ops take: their time and memory."""
        return PreparedRun(order, policy, *self._through(order, links, 0.0, transport), caps)

    def _through(
        self, order: Order, links: Links | LinkQueues, links_at: float, transport: SimulatedTransport
    ) -> tuple[LinkArrays, bool]:
        """The links of a run, and whether it runs compiled."""
        through = passed(order, links, self.costs, links_at, transport)
        return through, self.compile and through.arrival is None

    def lowered(self, schedule: Schedule) -> Order:
        """The schedule as arrays, for one run: it is not looked up among those known."""
        self.costs.require_stages(schedule.num_stages)
        graph = lower(schedule)
        made = Order(
            schedule,
            graph,
            np.arange(graph.num_ops),
            {
                name: graph.arrays[attribute]
                for name, attribute in (("rank_of", "rank"), *((each, each) for each in _AS_THEY_ARE))
            },
            graph.arrays["num_needed"],
            durations(schedule, graph, self.costs),
            np.array(memory_changes(graph, self.costs), np.float64),
        )
        columns = graph.columns
        # Where a stage adds to its gradients by B and by W, edges depend on the order.
        if columns is not None and not np.logical_and(*(_has_stage(columns, kind) for kind in (B, W))).any():
            self._templates = [made, *self._templates][: self.TEMPLATES]
        return made

    def _from_template(self, schedule: Schedule) -> Order | None:
        """The arrays by renumbering those of another order of the same ops; None where none is known."""
        for template in self._templates:
            graph, known = template.graph, template.schedule
            if (
                schedule.num_ops != template.num_ops
                or [len(row) for row in schedule.order] != [len(row) for row in known.order]
                or schedule.graph != known.graph
                or schedule.microbatch_pipeline != known.microbatch_pipeline
                or schedule.placement != known.placement
            ):
                continue
            try:
                base = np.array([graph.number[op] for row in schedule.order for op in row], np.int64)
            except KeyError:
                continue
            ints = template.ints
            if not np.array_equal(ints["rank_of"][base], ints["rank_of"]):
                continue
            number = np.empty_like(base)
            number[base] = np.arange(len(base))
            if len(np.unique(base)) < len(base):
                continue
            from_, to = number[template.sources], number[ints["edge_to"]]
            # An op's messages leave in the order of those who wait for them, as in `lower`.
            leaving = np.lexsort((to, from_))
            queue_of = ints["queue_of"][base]
            renumbered = {
                "edge_first": np.concatenate([[0], np.cumsum(np.bincount(from_, minlength=len(base)))]),
                "edge_to": to[leaving],
                "queue_of": queue_of,
                "queue_ops": np.argsort(queue_of, kind="stable"),
                "priority": ints["priority"][base],
            }
            return Order(
                schedule, graph, base, {**ints, **renumbered}, template.missing[base], template.duration[base],
                template.change[base],
            )  # fmt: skip
        return None


def _has_stage(columns: Columns, kind: int) -> Array:
    """Whether there are ops of a kind, of each stage."""
    there = np.zeros(int(columns.stage.max(initial=0)) + 1, bool)
    there[columns.stage[columns.kind == kind]] = True
    return there


def frozen_timer(order: Order, delay: Array, compile: bool | None = None) -> Timer:
    """What times ranks that follow their orders over links that are only late.

    Args:
        delay: ms of each link (see `Order.ends`).
    """
    graph = OpGraph(
        order.ints["first"], order.ints["rank_of"], order.sources, order.ints["edge_to"], _late(order, delay)
    )
    return Timer(*graph.network(order.duration), compile)


def _late(order: Order, delay: Array) -> Array | None:
    """Of each edge, ms until what an op made is there for another; None where it is there at once."""
    if not delay.any():
        return None
    rank = order.ints["rank_of"]
    before, after = rank[order.sources], rank[order.ints["edge_to"]]
    return np.where(before == after, 0.0, delay[before * order.num_rows + after])


def _swept(order: Order, delay: Array, compile: bool) -> dict[str, Array] | None:
    """What the event loop finds of ranks that follow their orders over links that are only late, by one sweep through
    these; None where they deadlock.

    Args:
        delay: ms of each link (see `Order.ends`).
    """
    ops = np.arange(order.num_ops)
    timed = frozen_timer(order, delay, compile).time(ops)
    if not timed.complete:
        return None
    start = np.asarray(timed.start)
    end = start + order.duration
    turn = np.empty_like(ops)
    turn[np.argsort(start, kind="stable")] = ops
    arrival, late = end[order.sources], _late(order, delay)
    return {
        "start_time": start,
        "end_time": end,
        "free_time": end,
        "arrival_time": arrival if late is None else arrival + late,
        "turn": turn,
        "peak": np.array(order.peaks),
    }


def _refuse_warmup(order: Order, arrays: dict[str, Any], warmup: Sequence[int]) -> None:
    """Raises ScheduleError if it was warm-up counts that a run stopped at: some rank may run nothing but forwards."""
    waiting = [rank for rank in range(order.num_ranks) if arrays["warmup_left"][rank] > 0]
    if not waiting:
        return
    first, ops = order.graph.first, order.graph.ops

    def left(rank: int) -> list[int]:
        """Forwards of the rank that have not run."""
        return [o for o in range(first[rank], first[rank + 1]) if ops[o].kind == "F" and not arrays["done"][o]]

    def has_room_for_none(rank: int) -> bool:
        """Whether there is a forward that only the cap holds back; those run together wait for their turn too."""
        return any(arrays["missing"][o] == 0 and arrays["gang"][o] < 0 for o in left(rank))

    rank = next(filter(has_room_for_none, waiting), waiting[0])
    ran = warmup[rank] - int(arrays["warmup_left"][rank])
    way = ""
    if has_room_for_none(rank):
        reason = f"its cap of {float(arrays['cap'][rank]):g} activations lets in no more than {ran}"
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


_AS_THEY_ARE = (
    "first", "edge_first", "edge_to", "queue_rank_first", "queue_first", "queue_ops", "queue_of", "priority", "gang",
    "gang_first", "gang_ops",
)  # fmt: skip
