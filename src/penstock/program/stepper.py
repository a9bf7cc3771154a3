"""Runs a program one decision at a time: what was ready, what was chosen, and why nothing else was.

for step in ps.program.Stepper(program):
    print(step)

12.0 ms, rank 1: 1B0
    1F3  ready since 11, backward-first: 1B0 goes first
    1W0  waits for 1I0
"""

from __future__ import annotations

import heapq
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from penstock.engine import list_by_rules
from penstock.engine.list_by_rules import DONE, FULL, NEVER, NOTHING, READY, REFUSED, STAGE_FULL, WAITS
from penstock.engine.needs import last_needed
from penstock.engine.rule_tables import BACKWARD, FORWARD, LAST, NUM_CLASSES, WEIGHT
from penstock.engine.tolerance import is_within
from penstock.program.view import View
from penstock.schedule import Op, Schedule, ScheduleError
from penstock.schedule.short_repr import short_repr

if TYPE_CHECKING:
    from penstock.program.program import Program

CLASS_NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradient"}


@dataclass(frozen=True)
class NextOp:
    """The next op of one queue of a rank, and how it stands.

    Attributes:
        op: the op.
        ready: whether it could have run.
        reason: why it was chosen or not, in words.

    Examples:
        >>> import penstock as ps
        >>> program = ps.Program(ps.placements.one_to_one(2), 2)
        >>> step = next(iter(ps.program.Stepper(program)))
        >>> [(str(each.op), each.ready) for each in step.candidates]
        [('0B0', False), ('0F0', True)]
    """

    op: Op
    ready: bool
    reason: str


@dataclass(frozen=True)
class Step:
    """One decision of one rank at `time` (ms): the op it took, or None, and all that it looked at.

    Attributes:
        time: when the rank decided (ms).
        rank: the rank that decided.
        chosen: the op that it took; None where it waits.
        candidates: all ops that it looked at.

    Examples:
        >>> import penstock as ps
        >>> program = ps.Program(ps.placements.one_to_one(2), 2)
        >>> step = next(iter(ps.program.Stepper(program)))
        >>> step.time, step.rank, str(step.chosen)
        (0.0, 0, '0F0')
    """

    time: float
    rank: int
    chosen: Op | None
    candidates: tuple[NextOp, ...]

    __repr__ = short_repr

    @property
    def ready(self) -> tuple[Op, ...]:
        """The rank's ready queue: the ops that could have run."""
        return tuple(c.op for c in self.candidates if c.ready)

    def __str__(self) -> str:
        lines = [f"{self.time:g} ms, rank {self.rank}: {self.chosen or 'idle'}"]
        width = max((len(str(c.op)) for c in self.candidates), default=0)
        lines += [f"    {str(c.op).ljust(width)}  {c.reason}" for c in self.candidates if c.op != self.chosen]
        return "\n".join(lines)


class Stepper:
    """Iterates over the decisions of a program, in the order in which they are taken.

    Args:
        program: whose decisions are made.

    Examples:
        >>> import penstock as ps
        >>> program = ps.Program(ps.placements.one_to_one(2), 2)
        >>> [(step.time, step.rank, str(step.chosen)) for step in ps.program.Stepper(program)][:3]
        [(0.0, 0, '0F0'), (1.0, 0, '0F1'), (1.0, 1, '1F0')]
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.queues()
        self._tables = program.tables(self.graph)
        self._number = {label: q for q, label in enumerate(self.graph.labels)}
        self.rows: list[list[int]] = [[] for _ in range(self.graph.num_rows)]
        self._start_time = [0.0] * self.graph.num_ops
        self._num_started = 0
        self._moments: list[float] = []
        self._asking: set[int] = set()
        self._now = 0.0

    def __iter__(self) -> Iterator[Step]:
        yield from self._steps(explain=True)

    def run(self) -> Schedule:
        """Takes all decisions that are left and returns the schedule (not checked)."""
        for _ in self._steps(explain=False):
            pass
        return self.schedule()

    def schedule(self) -> Schedule:
        """What the ranks have run so far."""
        return self.graph.schedule(self.program.name, self.rows, self.program._limit(), self._start_time)

    def _steps(self, explain: bool) -> Iterator[Step]:
        t = self._tables
        if self._num_started == 0:
            for q, queue in enumerate(t.queues):
                queue.ready_at = list_by_rules.ready_time(q, t.queues, t.needs, self._start_time)
                if queue.ready_at < NEVER:
                    for rank in self.graph.hosts(q):
                        t.ranks[rank].wake = 0.0
        while self._num_started < self.graph.num_ops:
            rank = min(range(len(t.ranks)), key=lambda r: (t.ranks[r].wake, r))
            time = t.ranks[rank].wake
            if self._asking and self._moments and self._moments[0] < time:
                moment = max(self._moments[0], self._now)
                while self._moments and self._moments[0] <= moment:
                    heapq.heappop(self._moments)
                for asking in self._asking:
                    t.ranks[asking].wake = max(moment, t.ranks[asking].free_at)
                self._asking.clear()
                continue
            if time == NEVER:
                raise self._stuck()
            self._now = time
            q = self._decide(rank, time)
            step = self._explained(rank, time, q) if explain else None
            if q == NOTHING:
                t.ranks[rank].wake = list_by_rules.next_wake(
                    rank, time, t.queues, t.ranks, t.hosts, t.own, self._start_time
                )
                if rank < self.graph.num_ranks and self.program.rules_of(rank).has_functions:
                    self._asking.add(rank)
            else:
                self._begin(q, time)
            if step is not None:
                yield step

    def _begin(self, q: int, time: float) -> None:
        t = self._tables
        started = list_by_rules.begin(
            q, time, t.queues, t.ranks, t.slots, t.slot_queues, t.hosts, t.needs, t.unlocks, self._start_time
        )
        self._num_started += 1
        for rank in self.graph.hosts(q):
            self.rows[rank].append(q)
            self._asking.discard(rank)
        # What a function answers may change when an op starts and when it ends: those who wait are asked again.
        for moment in {time, started, started + t.queues[q].duration}:
            heapq.heappush(self._moments, moment)

    def _decide(self, rank: int, time: float) -> int:
        t = self._tables
        if t.ranks[rank].beside >= 0:
            list_by_rules.give_back(rank, time, t.queues, t.ranks, t.hosts, t.own, self._start_time)
        if rank >= self.graph.num_ranks:  # a stream, which takes what is ready
            return list_by_rules.decide(rank, time, t.queues, t.ranks, t.slots, t.slot_queues, t.hosts)
        rules = self.program.rules_of(rank)
        if rules.has_functions:
            self._ask(rank, time)
        if rules.choose is not None:
            return self._ask_to_choose(rank, time)
        return list_by_rules.decide(rank, time, t.queues, t.ranks, t.slots, t.slot_queues, t.hosts)

    def _ask(self, rank: int, time: float) -> None:
        """Lets the user's check and limit look at every op that could run."""
        t, rules = self._tables, self.program.rules_of(rank)
        view = View(self.graph, t, rank, time, self.rows, self._start_time, self._number)
        for q in self._own(rank):
            queue = t.queues[q]
            queue.refused = 0
            if list_by_rules.standing(q, time, t.queues, t.ranks, t.hosts) != READY:
                continue
            op = self._op(q)
            if rules.check is not None:
                answer = self._call(rules.check, "check", rank, time, op, view, op)
                if not (isinstance(answer, int) or type(answer).__name__ in ("bool", "bool_")):
                    raise self._wrong_answer("check", answer, "True or False", rank, time, op)
                queue.refused = int(not answer)
            if callable(rules.max_in_flight) and queue.op_class == FORWARD and not queue.refused:
                limit = self._call(rules.max_in_flight, "max_in_flight", rank, time, op, view, op)
                if isinstance(limit, bool) or not isinstance(limit, Real) or math.isnan(limit):
                    raise self._wrong_answer("max_in_flight", limit, "a number of forwards", rank, time, op)
                queue.refused = int(t.ranks[rank].in_flight + queue.count > float(limit))

    def _ask_to_choose(self, rank: int, time: float) -> int:
        t, rules = self._tables, self.program.rules_of(rank)
        ready = {
            self._op(q): q
            for q in self._in_order(rank)
            if list_by_rules.standing(q, time, t.queues, t.ranks, t.hosts) == READY
        }
        if not ready or rules.choose is None:
            return NOTHING
        view = View(self.graph, t, rank, time, self.rows, self._start_time, self._number)
        chosen = self._call(rules.choose, "choose", rank, time, None, view, tuple(ready))
        if chosen is None:
            return NOTHING
        for op, q in ready.items():
            if chosen is op or (isinstance(chosen, Op) and chosen == op):
                return q
        raise self._wrong_answer(
            "choose", chosen, f"one of {', '.join(map(str, ready))}, or None to idle", rank, time
        )

    def _wrong_answer(
        self, what: str, answer: object, wanted: str, rank: int, time: float, op: Op | None = None
    ) -> ScheduleError:
        about = f" for {op}" if op is not None else ""
        shown = str(answer) if isinstance(answer, Op) else reprlib.repr(answer)
        return ScheduleError(
            f"rank {rank} at {time:g} ms: the {what} function returned {shown}{about}; return {wanted}",
            rule="rules",
            rank=rank,
            op=op,
        )

    def _call(self, function, what, rank, time, op, *arguments):  # type: ignore[no-untyped-def]
        try:
            return function(*arguments)
        except ScheduleError:
            raise
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)
            about = f", asked about {op}" if op is not None else ""
            raise ScheduleError(
                f"rank {rank} at {time:g} ms: {what} function {name} raised {type(error).__name__}: {error}{about}; "
                "see the exception above for where",
                rule="rules",
                rank=rank,
                op=op,
            ) from error

    def _own(self, rank: int) -> list[int]:
        record = self._tables.ranks[rank]
        return list(self._tables.own[record.own_first : record.own_last])

    def _in_order(self, rank: int) -> list[int]:
        """A rank's queues, classes in the order of the rules and then traversal."""
        t = self._tables
        kind = list_by_rules.preferred(rank, t.ranks)
        other = FORWARD if kind == BACKWARD else BACKWARD
        found = []
        for c in (0, kind, other, WEIGHT, LAST):
            slot = t.slots[rank * NUM_CLASSES + c]
            found += t.slot_queues[slot.first : slot.last]
        return found

    def _op(self, q: int) -> Op:
        return self.graph.op(q, self._tables.queues[q].started)

    def _explained(self, rank: int, time: float, chosen: int) -> Step:
        t = self._tables
        candidates = []
        for q in self._in_order(rank):
            standing = list_by_rules.standing(q, time, t.queues, t.ranks, t.hosts)
            if standing == DONE:
                continue
            reason = "chosen" if q == chosen else self._reason(rank, q, standing, chosen)
            candidates.append(NextOp(self._op(q), standing == READY, reason))
        return Step(
            time, rank % self.graph.num_ranks, None if chosen == NOTHING else self._op(chosen), tuple(candidates)
        )

    def _reason(self, rank: int, q: int, standing: int, chosen: int) -> str:
        t, rules = self._tables, self.program.rules_of(rank % self.graph.num_ranks)
        queue, record = t.queues[q], t.ranks[rank]
        if standing == WAITS:
            return self._wait(q)
        if standing == FULL:
            return self._full(q)
        if standing == STAGE_FULL:
            return f"its stage holds the {queue.cap:g} in flight that it may"
        if standing == REFUSED:
            return "refused by the user's function"
        since = f"ready since {queue.ready_at:g}"
        if rules.choose is not None:
            return f"{since}; choose preferred {self._op(chosen) if chosen != NOTHING else 'to idle'}"
        if record.warmup_left > 0 and queue.op_class != FORWARD:
            return f"{since}; {record.warmup_left} forwards of the warm-up come first"
        if chosen == NOTHING:
            if queue.op_class in (WEIGHT, LAST) and rules.patience:
                return f"{since}; a forward or backward comes within {rules.patience:g} ms"
            if queue.op_class in (FORWARD, BACKWARD) and list_by_rules.preferred(rank, t.ranks) != queue.op_class:
                return f"{since}; strict: it is the turn of a {CLASS_NAMES[list_by_rules.preferred(rank, t.ranks)]}"
            return f"{since}; strict: another stage's interval is not over"
        first = self._op(chosen)
        if t.queues[chosen].op_class == queue.op_class:
            return f"{since}; by the traversal {first} goes first"
        return f"{since}; {rules.kinds}: {first} goes first"

    def _full(self, q: int) -> str:
        """Which of the ranks of a queue has no room for its next op, and for what."""
        t, queue = self._tables, self._tables.queues[q]
        for rank in self.graph.hosts(q):
            record = t.ranks[rank]
            for held, added, room, cap, what in (
                (record.in_flight, queue.count, queue.reserve_count, record.cap_count, "in flight"),
                (record.memory, queue.memory, queue.reserve, record.cap_memory, "of memory"),
            ):
                if not is_within(held + added + room, cap):
                    deeper = f" (and must keep room for {room:g} deeper in the model)" if room else ""
                    return f"rank {rank} holds {held:g} of at most {cap:g} {what}{deeper}"
        return "no room"

    def _wait(self, q: int) -> str:
        t = self._tables
        queue = t.queues[q]
        if queue.ready_at < NEVER:
            return f"all it needs is there at {queue.ready_at:g} ms"
        for n in range(queue.need_first, queue.need_last):
            need = t.needs[n]
            last = last_needed(queue.started, need.before, need.after, need.shift)
            if last >= t.queues[need.queue].started:
                hosts = [rank % self.graph.num_ranks for rank in self.graph.hosts(need.queue)]
                where = f"rank {hosts[0]}" if len(hosts) == 1 else f"ranks {', '.join(map(str, hosts))}"
                return f"waits for {self.graph.op(need.queue, last)} on {where}"
        return "waits"

    def _stuck(self) -> ScheduleError:
        """Who waits for what when nobody can go on."""
        t = self._tables
        known = [queue.ready_at for queue in t.queues if queue.ready_at < NEVER]
        time = max([record.free_at for record in t.ranks] + known)
        lines, first = [], None
        for rank in range(len(t.ranks)):
            left = []
            for q in self._in_order(rank):
                standing = list_by_rules.standing(q, time, t.queues, t.ranks, t.hosts)
                if standing != DONE:
                    left.append(f"{self._op(q)} {self._reason(rank, q, standing, NOTHING)}")
            if left:
                first = rank % self.graph.num_ranks if first is None else first
                lines.append(f"  rank {rank % self.graph.num_ranks}: " + "; ".join(left))
        return ScheduleError(
            f"after {self._num_started} of {self.graph.num_ops} ops no rank can go on (rule: deadlock); change the "
            "rules, warm-ups or limits that hold these back:\n" + "\n".join(lines),
            rule="deadlock",
            rank=first,
        )
