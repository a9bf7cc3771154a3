"""Sends activations to host memory where an order holds too much: those that are needed again last.

    cap 2   before   F0 F1 F2 B0 B1 B2            after   F0 F1 O1 F2 B0 L1 B1 B2

Where an op finds no room, of all that is held the activation goes whose backward is farthest (Belady's rule). Where
none can go, since all that is held waits for its W, the next W runs before its turn. What has gone comes back before
its backward. Ways begin so many times their own length before they have to end, as far as there is room; forwards may
leave room for what comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product

from penstock.cost import Costs, Links
from penstock.engine.tolerance import EPSILON
from penstock.planning.joint.problem import JointProblem, pose_joint
from penstock.planning.options import Limits, OpForms
from penstock.planning.problem import WHOLE, F, I, L, O, Orders, R, W
from penstock.schedule import Schedule, StageGraph

_LEADS = (1.0, 2.0, 0.0)
"""How many times its own length a way begins before it has to end."""


def with_host_memory(
    schedule: Schedule, costs: Costs, links: Links, caps: Sequence[float], host: Sequence[float]
) -> Schedule | None:
    """Adds OFFLOAD and RELOAD ops to a schedule, so that no rank holds more than its cap.

    Args:
        schedule: its forwards and backwards keep their order. Only W may run earlier than before.
        costs: with the times of OFFLOAD and RELOAD.
        links: the delays under which the fastest of several ways is chosen.
        caps, host: most that each rank may hold, and have in host memory, in the unit of `costs.activation`.

    Returns:
        None if nothing that was tried fits, or the schedule has other ops than those of a chain of stages.
    """
    chain, pipelines = StageGraph.chain(schedule.num_stages), schedule.microbatch_pipeline
    if schedule.graph != chain or schedule.placement.shared or schedule.microbatch_orders:
        return None
    kinds = {op.kind for row in schedule.order for op in row}
    held = tuple((each, costs.freed_by_input) for each in costs.activation)
    problem = pose_joint(
        costs, schedule.placement, schedule.num_ranks,
        [pipelines.count(p) for p in range(schedule.placement.num_pipelines)], links,
        Limits(tuple(caps), held, host=tuple(host)), OpForms("R" in kinds, "B" in kinds, "I" in kinds, away=True),
    )  # fmt: skip
    if problem.microbatch_pipeline != pipelines:
        return None
    made = [orders for orders in sent_away(problem, problem.read(schedule)) if problem.fits(orders)]
    best = min(made, key=problem.timed, default=None)
    return None if best is None else problem.schedule(best, f"{schedule.name}-in-host")


def sent_away(problem: JointProblem, given: Orders) -> Iterator[Orders]:
    """The same orders with activations sent away, in several ways; nothing where that does not make room."""
    for lead, spare in product(_LEADS, (False, True)):
        orders = Orders(*(array.copy() for array in given))
        rows = [_AwayRow(problem, orders, r, lead, spare).made() for r in range(problem.num_ranks)]
        if any(row is None for row in rows):
            continue
        for r, row in enumerate(rows):
            assert row is not None
            orders.row[r, : len(row)] = row
            orders.length[r] = len(row)
        yield orders


class _AwayRow:
    """The row of one rank, made anew op by op.

    Args:
        lead: how many times its own length a way begins before it has to end.
        spare: whether forwards leave room for one more activation where that can be had.
    """

    def __init__(self, problem: JointProblem, orders: Orders, r: int, lead: float, spare: bool) -> None:
        self._ops, self._orders, self._lead, self._spare = problem.ops, orders, lead, spare
        self._given = orders.row[r, : orders.length[r]].tolist()
        self._place = {op: at for at, op in enumerate(self._given)}
        self._limit = float(problem.ops.cap[r]) * (1 + EPSILON)
        self._host_limit = float(problem.ops.host[r]) * (1 + EPSILON)
        self._found: list[int] = []
        self._levels = [0.0]
        """What is held before each op found, and now."""
        self._host = 0.0
        self._here: set[int] = set()
        """Forwards whose activations are there, and may go."""
        self._last_away: dict[int, int] = {}
        """Of each chain, the last microbatch that went: they go in their turn."""
        self._weights: deque[int] = deque()
        """W whose I has run."""

    def made(self) -> list[int] | None:
        """The row; None where it can't be made to fit."""
        ran = set[int]()
        ops = self._ops
        for op in self._given:
            if op in ran:
                continue
            forward = op - int(ops.kind[op]) * int(ops.size[ops.chain[op]])
            comes_back = ops.kind[op] == I and bool(self._orders.away[ops.cell[op]])
            need = float(ops.forms.held[ops.chain[op]]) if comes_back else max(0.0, self._change(op))
            self._here.discard(forward)
            self._make_room(need, ran, self._spare and ops.kind[op] == F)
            if self._levels[-1] + need > self._limit and need > 0:
                return None
            if comes_back:
                self._host -= need
                self._insert(forward + L * int(ops.size[ops.chain[op]]))
            self._append(op)
            self._note(op, forward)
        return self._found

    def _make_room(self, need: float, ran: set[int], spare: bool) -> None:
        """Sends away, and runs W before their turn, till there is room for `need`, if that is possible."""
        while need > 0 and self._levels[-1] + need > self._limit:
            if (goes := self._farthest()) >= 0:
                self._send(goes)
            elif self._weights:
                weight = self._weights.popleft()
                ran.add(weight)
                self._append(weight)
            else:
                return
        while spare and self._levels[-1] + 2 * need > self._limit and (goes := self._farthest()) >= 0:
            self._send(goes)

    def _note(self, op: int, forward: int) -> None:
        """What an op that has run makes possible."""
        ops, cell = self._ops, int(self._ops.cell[op])
        size = int(ops.size[ops.chain[op]])
        if ops.kind[op] == F and ops.forms.may_away[ops.chain[op]] and not self._orders.again[cell]:
            self._here.add(op)
        elif ops.kind[op] == I and not self._orders.whole[cell]:
            self._weights.append(forward + W * size)
        elif ops.kind[op] == W and self._weights and self._weights[0] == op:
            self._weights.popleft()
        elif ops.kind[op] == W:
            self._weights.remove(op)

    def _change(self, op: int) -> float:
        ops, orders = self._ops, self._orders
        c, kind, cell = int(ops.chain[op]), int(ops.kind[op]), int(ops.cell[op])
        held, freed = float(ops.forms.held[c]), float(ops.forms.freed[c])
        if kind in (O, L):
            return held if kind == L else -held
        if kind in (F, R):
            kept = float(ops.forms.kept[c]) if orders.again[cell] else held
            return kept if kind == F else held - kept
        if kind == I:
            return -held if orders.whole[cell] else -freed * held
        return (freed - 1.0) * held

    def _time(self, op: int) -> float:
        ops = self._ops
        whole = ops.kind[op] == I and self._orders.whole[ops.cell[op]]
        return float(ops.forms.times[ops.chain[op], WHOLE if whole else ops.kind[op]])

    def _append(self, op: int) -> None:
        self._found.append(op)
        self._levels.append(self._levels[-1] + self._change(op))

    def _insert(self, way: int) -> None:
        """Puts O or L into the row, as long before its end as `lead`, its own forward and the room for it say."""
        ops, passed, at = self._ops, 0.0, len(self._found)
        change = self._change(way)
        while at > 0 and passed < self._lead * self._time(way):
            op = self._found[at - 1]
            own = ops.chain[op] == ops.chain[way] and ops.number[op] == ops.number[way]
            if ops.kind[op] >= O or own or max(self._levels[at - 1], self._levels[at]) + change > self._limit:
                break
            passed += self._time(op)
            at -= 1
        self._found.insert(at, way)
        self._levels = self._levels[: at + 1] + [level + change for level in self._levels[at:]]

    def _farthest(self) -> int:
        """The forward whose activation is to go; -1 where none can."""
        ops = self._ops
        recent, passed = set[int](), 0.0
        for op in reversed(self._found):
            if passed >= self._lead * float(ops.forms.times[ops.chain[op], O]):
                break
            recent.add(op)
            passed += self._time(op)

        there = [op for op in self._here if self._may_go(op)]
        before = [op for op in there if op not in recent]
        return max(before or there, key=lambda op: self._place[op + I * int(ops.size[ops.chain[op]])], default=-1)

    def _may_go(self, op: int) -> bool:
        c = int(self._ops.chain[op])
        fits = self._host + float(self._ops.forms.held[c]) <= self._host_limit
        return fits and int(self._ops.number[op]) > self._last_away.get(c, -1)

    def _send(self, op: int) -> None:
        ops = self._ops
        c = int(ops.chain[op])
        self._here.remove(op)
        self._last_away[c] = int(ops.number[op])
        self._orders.away[ops.cell[op]] = True
        self._host += float(ops.forms.held[c])
        self._insert(op + O * int(ops.size[c]))
