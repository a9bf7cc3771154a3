"""Runs a program one decision at a time: what was ready, what was chosen, and why nothing else was.

A user's functions are asked here with a `View`: the state of all ranks at that moment, and nothing they can change.

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
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from numbers import Real
from typing import TYPE_CHECKING, Any

from penstock.engine import list_by_rules
from penstock.engine.list_by_rules import DONE, FULL, NEVER, NOTHING, READY, REFUSED, STAGE_FULL, WAITS
from penstock.engine.min_tree import least_of
from penstock.engine.needs import last_needed
from penstock.engine.rule_tables import BACKWARD, FORWARD, INFINITY, LAST, NUM_CLASSES, WEIGHT, new_state
from penstock.engine.tolerance import is_within
from penstock.schedule import Op, Schedule, ScheduleError
from penstock.schedule.short_repr import short_repr

if TYPE_CHECKING:
    from penstock.program.program import Program
    from penstock.program.rules import Rules

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


class View:
    """The moment of a decision.

    Attributes:
        rank: who decides.
        time: when (ms).

    Examples:
        >>> import penstock as ps
        >>> def one_at_a_time(view, op):
        ...     return op.kind != "F" or view.in_flight() < 1
        >>> program = ps.Program(ps.placements.one_to_one(2), 2, ps.Rules(check=one_at_a_time))
        >>> print(program.build())
        schedule program: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 .  .  B0 F1 .  .  B1
        rank 1 | .  F0 B0 .  .  F1 B1
    """

    def __init__(self, stepper: Stepper, rank: int, time: float) -> None:
        self.rank, self.time = rank, time
        self._run, self._graph, self._state = stepper, stepper.graph, stepper.state

    def started(self, kind: str, stage: int, pipeline: int = 0) -> int:
        """How many ops of a kind of a stage have started; 0 for a kind that is not there."""
        q = self._run.number.get((pipeline, kind, stage))
        return 0 if q is None else int(self._state.started[q])

    def in_flight(self, rank: int | None = None, stage: int | None = None) -> int:
        """Forwards on a rank (by default the one that decides), or of a stage, whose B or W has not started."""
        if stage is None:
            return int(self._state.in_flight[self.rank if rank is None else rank])
        queues = zip(self._graph.labels, self._run.tables.queues.count, self._state.started, strict=True)
        return sum(int(each) * started for (_, _, s), each, started in queues if s == stage)

    def memory(self, rank: int | None = None) -> float:
        """What a rank holds, in the unit of the costs' activations."""
        return float(self._state.memory[self.rank if rank is None else rank])

    def steps(self, rank: int | None = None) -> int:
        """How many ops a rank has started."""
        return self._state.filled[self.rank if rank is None else rank]

    def ran(self, rank: int | None = None) -> tuple[Op, ...]:
        """The ops a rank has started, in order."""
        number: defaultdict[int, Iterator[int]] = defaultdict(count)
        row = self._run.row(self.rank if rank is None else rank)
        return tuple(self._graph.op(q, next(number[q])) for q in row)

    def upcoming(self, rank: int | None = None) -> tuple[Op, ...]:
        """The next op of each kind of each stage of a rank (in each pipeline), ready or not, where any is left."""
        own = self._run.own_queues(self.rank if rank is None else rank)
        return tuple(self._run.next_op(q) for q in own if self._run.has_next(q))

    def ready_since(self, op: Op) -> float:
        """When (ms) an upcoming op had all that it needs; infinite where that is not known yet, or for another op.

        An op that a limit held back counts from the moment when all it needs was there.
        """
        q, index = self._find(op)
        return self._state.ready_at[q] if q != NOTHING and index == self._state.started[q] else INFINITY

    def has_run(self, op: Op) -> bool:
        """Whether an op has ended by now, wherever it runs (False for one that is not there)."""
        q, index = self._find(op)
        if q == NOTHING or index >= self._state.started[q]:
            return False
        network = self._run.tables.network
        return bool(self._state.start_time[network.op_first[q] + index] + network.duration[q] <= self.time)

    def _find(self, op: Op) -> tuple[int, int]:
        """An op's queue, and its number there; NOTHING for one that is not there."""
        graph, index, pipeline = self._graph, op.microbatch, 0
        if graph.is_dealt(op.kind, op.stage):
            if not 0 <= index < len(graph.microbatch_pipeline):
                return NOTHING, 0
            pipeline = graph.microbatch_pipeline[index]
            index = bisect_left(graph.microbatches[pipeline], index)
        q = self._run.number.get((pipeline, op.kind, op.stage))
        if q is None or not 0 <= index < self._run.size(q):
            return NOTHING, 0
        return q, index


def _wrong_answer(
    what: str, answer: object, wanted: str, rank: int, time: float, op: Op | None = None
) -> ScheduleError:
    about = "" if op is None else f" for {op}"
    shown = str(answer) if isinstance(answer, Op) else reprlib.repr(answer)
    text = f"rank {rank} at {time:g} ms: the {what} function returned {shown}{about}; return {wanted}"
    return ScheduleError(text, rule="rules", rank=rank, op=op)


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
        self.tables = program.tables(self.graph)
        self.state = new_state(self.tables, as_c=False)
        self.number = {label: q for q, label in enumerate(self.graph.labels)}
        self._moments: list[float] = []
        self._asking: set[int] = set()
        self._now = 0.0
        list_by_rules.prepare(self.tables, self.state)

    def __iter__(self) -> Iterator[Step]:
        return self._steps(explain=True)

    def run(self) -> Schedule:
        """Takes all decisions that are left and returns the schedule (not checked)."""
        for _ in self._steps(explain=False):
            pass
        return self.schedule()

    def schedule(self) -> Schedule:
        """What the ranks have run so far."""
        rows = [self.row(rank) for rank in range(self.graph.num_rows)]
        return self.graph.schedule(self.program.name, rows, self.program._limit(), self.state.start_time)

    def row(self, rank: int) -> list[int]:
        """The queues from which a rank or a stream took its ops, in order."""
        first = self.tables.network.row_first[rank]
        row: list[int] = self.state.rows[first : first + self.state.filled[rank]]
        return row

    def _steps(self, explain: bool) -> Iterator[Step]:
        t, s = self.tables, self.state
        while sum(s.started) < self.graph.num_ops:
            time, rank = s.tree[1], least_of(s.tree, len(s.tree) // 2)
            if self._asking and self._moments and self._moments[0] < time:
                # What a function answers may change when an op starts and when it ends: who waits is asked again.
                moment = max(self._moments[0], self._now)
                while self._moments and self._moments[0] <= moment:
                    heapq.heappop(self._moments)
                for asking in self._asking:
                    list_by_rules.wake(asking, max(moment, s.free_at[asking]), s)
                self._asking.clear()
                continue
            if time == NEVER:
                raise self._stuck()
            self._now = time
            q = self._decide(rank, time)
            step = self._explained(rank, time, q) if explain else None
            list_by_rules.advance(rank, q, time, t, s)
            if q != NOTHING:
                self._note_start(q, time)
            elif rank < self.graph.num_ranks and self.program.rules_of(rank).has_functions:
                self._asking.add(rank)
            if step is not None:
                yield step

    def _note_start(self, q: int, time: float) -> None:
        """Notes the moments at which what users' functions answer may change."""
        self._asking.difference_update(self.graph.hosts(q))
        network = self.tables.network
        started = self.state.start_time[network.op_first[q] + self.state.started[q] - 1]
        for moment in {time, started, started + network.duration[q]}:
            heapq.heappush(self._moments, moment)

    def _decide(self, rank: int, time: float) -> int:
        t, s = self.tables, self.state
        if t.ranks.beside[rank] >= 0:
            list_by_rules.give_back(rank, time, t, s)
        if rank < self.graph.num_ranks:  # a stream takes what is ready
            rules = self.program.rules_of(rank)
            if rules.has_functions:
                self._ask(rank, time, rules)
            if rules.choose is not None:
                return self._ask_to_choose(rank, time, rules.choose)
        return list_by_rules.decide(rank, time, t, s)

    def _ask(self, rank: int, time: float, rules: Rules) -> None:
        """Lets the user's check and limit look at every op that could run."""
        refused, queues = self.state.refused, self.tables.queues
        for q in self.own_queues(rank):
            refused[q] = 0
            if self._standing(q, time) != READY:
                continue
            op = self.next_op(q)
            if rules.check is not None:
                answer = self._answer(rules.check, "check", rank, time, op)
                if not (isinstance(answer, int) or type(answer).__name__ in ("bool", "bool_")):
                    raise _wrong_answer("check", answer, "True or False", rank, time, op)
                refused[q] = int(not answer)
            if callable(rules.max_in_flight) and queues.op_class[q] == FORWARD and not refused[q]:
                limit = self._answer(rules.max_in_flight, "max_in_flight", rank, time, op)
                if isinstance(limit, bool) or not isinstance(limit, Real) or math.isnan(limit):
                    raise _wrong_answer("max_in_flight", limit, "a number of forwards", rank, time, op)
                refused[q] = int(self.state.in_flight[rank] + queues.count[q] > float(limit))

    def _ask_to_choose(self, rank: int, time: float, choose: Callable[..., Any]) -> int:
        ready = {self.next_op(q): q for q in self._in_order(rank) if self._standing(q, time) == READY}
        chosen = self._answer(choose, "choose", rank, time, tuple(ready)) if ready else None
        if chosen is None:
            return NOTHING
        if isinstance(chosen, Op) and chosen in ready:
            return ready[chosen]
        wanted = f"one of {', '.join(map(str, ready))}, or None to idle"
        raise _wrong_answer("choose", chosen, wanted, rank, time)

    def _answer(self, function: Callable[..., Any], what: str, rank: int, time: float, about: Any) -> Any:
        """What a user's function answers about an op, or about all that are ready."""
        try:
            return function(View(self, rank, time), about)
        except ScheduleError:
            raise
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)
            op = about if isinstance(about, Op) else None
            asked = "" if op is None else f", asked about {op}"
            raise ScheduleError(
                f"rank {rank} at {time:g} ms: {what} function {name} raised {type(error).__name__}: {error}{asked}; "
                "see the exception above for where",
                rule="rules",
                rank=rank,
                op=op,
            ) from error

    def _standing(self, q: int, time: float) -> int:
        return list_by_rules.standing(q, time, self.tables, self.state)

    def own_queues(self, rank: int) -> list[int]:
        """The numbers of a rank's queues."""
        ranks = self.tables.ranks
        return list(ranks.own[ranks.own_first[rank] : ranks.own_first[rank + 1]])

    def _in_order(self, rank: int) -> list[int]:
        """A rank's queues, classes in the order of the rules and then traversal."""
        kind = list_by_rules.preferred(rank, self.tables, self.state)
        other = FORWARD if kind == BACKWARD else BACKWARD
        found, slots = [], self.tables.slots
        for c in (0, kind, other, WEIGHT, LAST):
            slot = rank * NUM_CLASSES + c
            found += slots.queues[slots.first[slot] : slots.first[slot + 1]]
        return found

    def size(self, q: int) -> int:
        """How many ops a queue has."""
        first = self.tables.network.op_first
        return int(first[q + 1] - first[q])

    def has_next(self, q: int) -> bool:
        """Whether a queue has ops left to start."""
        return list_by_rules.has_next(q, self.tables, self.state)

    def next_op(self, q: int) -> Op:
        """The next op of a queue."""
        return self.graph.op(q, self.state.started[q])

    def _explained(self, rank: int, time: float, chosen: int) -> Step:
        candidates = []
        for q in self._in_order(rank):
            standing = self._standing(q, time)
            if standing == DONE:
                continue
            reason = "chosen" if q == chosen else self._reason(rank, q, standing, chosen)
            candidates.append(NextOp(self.next_op(q), standing == READY, reason))
        return Step(
            time, rank % self.graph.num_ranks, None if chosen == NOTHING else self.next_op(chosen), tuple(candidates)
        )

    def _reason(self, rank: int, q: int, standing: int, chosen: int) -> str:
        queues, rules = self.tables.queues, self.program.rules_of(rank % self.graph.num_ranks)
        op_class, warmup_left = queues.op_class[q], self.state.warmup_left[rank]
        if standing == WAITS:
            return self._wait(q)
        if standing == FULL:
            return self._full(q)
        if standing == STAGE_FULL:
            return f"its stage holds the {queues.cap[q]:g} in flight that it may"
        if standing == REFUSED:
            return "refused by the user's function"
        since = f"ready since {self.state.ready_at[q]:g}"
        if rules.choose is not None:
            return f"{since}; choose preferred {self.next_op(chosen) if chosen != NOTHING else 'to idle'}"
        if warmup_left > 0 and op_class != FORWARD:
            return f"{since}; {warmup_left} forwards of the warm-up come first"
        if chosen == NOTHING:
            if op_class in (WEIGHT, LAST) and rules.patience:
                return f"{since}; a forward or backward comes within {rules.patience:g} ms"
            turn = list_by_rules.preferred(rank, self.tables, self.state)
            if op_class in (FORWARD, BACKWARD) and turn != op_class:
                return f"{since}; strict: it is the turn of a {CLASS_NAMES[turn]}"
            return f"{since}; strict: another stage's interval is not over"
        first = self.next_op(chosen)
        if queues.op_class[chosen] == op_class:
            return f"{since}; by the traversal {first} goes first"
        return f"{since}; {rules.kinds}: {first} goes first"

    def _full(self, q: int) -> str:
        """Which of the ranks of a queue has no room for its next op, and for what."""
        queues, ranks, state = self.tables.queues, self.tables.ranks, self.state
        for rank in self.graph.hosts(q):
            for held, added, room, cap, what in (
                (state.in_flight[rank], queues.count[q], queues.reserve_count[q], ranks.cap_count[rank], "in flight"),
                (state.memory[rank], queues.memory[q], queues.reserve[q], ranks.cap_memory[rank], "of memory"),
            ):
                if not is_within(held + added + room, cap):
                    deeper = f" (and must keep room for {room:g} deeper in the model)" if room else ""
                    return f"rank {rank} holds {held:g} of at most {cap:g} {what}{deeper}"
        return "no room"

    def _wait(self, q: int) -> str:
        more, started, ready_at = self.tables.more, self.state.started, self.state.ready_at[q]
        if ready_at < NEVER:
            return f"all it needs is there at {ready_at:g} ms"
        for n in range(more.need_first[q], more.need_first[q + 1]):
            source = more.need_queue[n]
            last = last_needed(started[q], more.before[n], more.after[n], more.shift[n])
            if last >= started[source]:
                hosts = [rank % self.graph.num_ranks for rank in self.graph.hosts(source)]
                where = f"rank {hosts[0]}" if len(hosts) == 1 else f"ranks {', '.join(map(str, hosts))}"
                return f"waits for {self.graph.op(source, last)} on {where}"
        return "waits"

    def _stuck(self) -> ScheduleError:
        """Who waits for what when nobody can go on."""
        known = [ready for ready in self.state.ready_at if ready < NEVER]
        time = max([*self.state.free_at, *known])
        left: dict[int, list[str]] = {}
        for row in range(self.graph.num_rows):
            for q in self._in_order(row):
                if (standing := self._standing(q, time)) != DONE:
                    left.setdefault(row, []).append(f"{self.next_op(q)} {self._reason(row, q, standing, NOTHING)}")
        lines = [f"  rank {row % self.graph.num_ranks}: {'; '.join(reasons)}" for row, reasons in left.items()]
        return ScheduleError(
            f"after {sum(self.state.started)} of {self.graph.num_ops} ops no rank can go on (rule: deadlock); change "
            "the rules, warm-ups or limits that hold these back:\n" + "\n".join(lines),
            rule="deadlock",
            rank=next(iter(left), 0) % self.graph.num_ranks,
        )
