"""Sends activations to host memory where an order holds too much: those that are needed again last.

    cap 2   before   F0 F1 F2 B0 B1 B2            after   F0 F1 O1 F2 B0 L1 B1 B2

Where a forward finds no room, of all that is held the activation goes whose backward is farthest (Belady's rule),
from the end of its own forward on. It comes back as long before its backward as the way takes, if there is room.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from penstock.engine.tolerance import EPSILON
from penstock.planning.joint.moves import WHOLE, F, I, L, O, R
from penstock.planning.joint.problem import JointProblem, Orders

_LEADS = (1.0, 2.0, 0.0)
"""How many times the way back is as long as what an activation comes before its backward."""


def sent_away(problem: JointProblem, given: Orders) -> Iterator[Orders]:
    """The same orders with activations sent away, in several ways; nothing where that does not make room."""
    for lead in _LEADS:
        orders = Orders(*(array.copy() for array in given))
        rows = [_AwayRow(problem, orders, r) for r in range(problem.num_ranks)]
        if not all(row.make_room() for row in rows):
            return
        for r, row in enumerate(rows):
            made = row.with_ways(lead)
            orders.row[r, : len(made)] = made
            orders.length[r] = len(made)
        yield orders


class _AwayRow:
    """The row of one rank."""

    def __init__(self, problem: JointProblem, orders: Orders, r: int) -> None:
        self._ops, self._orders = problem.ops, orders
        self._row = orders.row[r, : orders.length[r]].tolist()
        self._limit = float(problem.ops.cap[r]) * (1 + EPSILON)
        self._levels = list(accumulate(self._change(op) for op in self._row))
        self._away: set[int] = set()
        """Forwards whose activations go."""

    def _change(self, op: int) -> float:
        ops, orders = self._ops, self._orders
        c, kind, cell = int(ops.chain[op]), int(ops.kind[op]), int(ops.cell[op])
        held, freed = float(ops.held[c]), float(ops.freed[c])
        if kind in (O, L):
            return held if kind == L else -held
        if kind in (F, R):
            kept = float(ops.kept[c]) if orders.again[cell] else held
            return kept if kind == F else held - kept
        if kind == I:
            return -held if orders.whole[cell] else -freed * held
        return (freed - 1.0) * held

    def make_room(self) -> bool:
        """Chooses who goes; False where that does not help."""
        ops, place = self._ops, {op: at for at, op in enumerate(self._row)}
        back = {op: place[op + I * int(ops.size[ops.chain[op]])] for op in self._row if ops.kind[op] == F}
        for at, op in enumerate(self._row):
            while self._levels[at] > self._limit and self._change(op) > 0:
                there = [
                    other
                    for other in self._row[:at]
                    if ops.kind[other] == F
                    and back[other] > at
                    and other not in self._away
                    and ops.may_away[ops.chain[other]]
                    and not self._orders.again[ops.cell[other]]
                ]
                if not there:
                    return False
                last = max(there, key=back.__getitem__)
                self._away.add(last)
                for between in range(place[last] + 1, back[last]):
                    self._levels[between] -= float(ops.held[ops.chain[last]])
        return True

    def with_ways(self, lead: float) -> list[int]:
        """The row with O right behind the forwards and L so many times its own length before the backwards."""
        ops, found = self._ops, list[int]()
        for op in self._row:
            c = int(ops.chain[op])
            size = int(ops.size[c])
            forward = op - int(ops.kind[op]) * size
            if ops.kind[op] == I and forward in self._away:
                self._orders.away[ops.cell[op]] = True
                self._come_back(found, forward + L * size, lead * float(ops.times[c, L]))
            found.append(op)
            if op in self._away:
                found.append(op + O * size)
        return found

    def _come_back(self, found: list[int], back: int, lead: float) -> None:
        """Puts an L into the row that ends before its I, as early as `lead` ms and the room for it say."""
        ops = self._ops
        levels = list(accumulate(self._change(op) for op in found))
        at, passed = len(found), 0.0
        while at > 0 and passed < lead:
            op = found[at - 1]
            before = levels[at - 2] if at > 1 else 0.0
            if ops.kind[op] >= O or (ops.chain[op] == ops.chain[back] and ops.number[op] == ops.number[back]):
                break
            if before + self._change(back) > self._limit:
                break
            passed += float(ops.times[ops.chain[op], WHOLE if self._is_whole(op) else ops.kind[op]])
            at -= 1
        found.insert(at, back)

    def _is_whole(self, op: int) -> bool:
        return bool(self._ops.kind[op] == I and self._orders.whole[self._ops.cell[op]])
