"""AMDP's order of forwards and backwards: every rank takes, of what is ready, the earliest block's first.

Run from event to event over times per stage. Where there are updates it is run twice. Without them ranks fall
into a pattern that leaves hardly a bubble, but an op that must wait for an update throws them out of it, and by
the rule of blocks they do not find back. So the second time ranks take, of what is ready, what came first
without updates. These take no time here and run as soon as they can, so that what they hold up is only what may
not miss them; `amdp` then says where they stand. So it is no list scheduling by `engine.list_by_rules`:
whether a forward may start depends on updates of other stages' windows, which have no place in a row, and ops
of all classes are in one line.

`OrderOptions` are what the paper leaves open: which of two ops of one block goes first, and how many microbatches
are read ahead where b/f is no whole number.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule import Op, Updates, Windows
from penstock.schedule.updates import OWNER

READ_AHEAD = 2
"""Microbatches that stage 0 of a pipeline reads before its first backward: the paper's n."""

Pipelines = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds per stage, and those of a message between ranks: of an activation or gradient of one, and of a
    stage's gradients or parameters."""

    f: Sequence[float]
    b: Sequence[float]
    message: float = 0.0
    update_message: float = 0.0

    def of(self, op: Op) -> float:
        return {"F": self.f, "B": self.b}[op.kind][op.stage] if op.kind in "FB" else 0.0


@dataclass(frozen=True)
class OrderOptions:
    """By which times, and how, an order is made.

    Attributes:
        times: of the stages, as the run takes them to be.
        read_ahead: microbatches that stage 0 of each pipeline reads at a block's boundary besides `READ_AHEAD`.
        backward_first: of a block's ops that are ready, backwards go first; else the one that was ready first.
        by_turns: with updates, ops go first that did without them; else those of the earliest block again.
    """

    times: StageTimes
    read_ahead: int
    backward_first: bool = False
    by_turns: bool = True


class RanRows(NamedTuple):
    """Each rank's forwards and backwards in the order in which they ran, and when these and each update started."""

    rows: list[list[Op]]
    starts: dict[Op, float]


class _ReadyOp(NamedTuple):
    """An op that has all it needs, in the order in which a rank prefers them.

    `turn` is the block of its microbatch, or when the op started without updates.
    """

    turn: float
    later: bool
    since: float
    microbatch: int
    op: Op


class OrderRun:
    """The order in which the ranks run all ops, from event to event; with updates, `turns` of those without."""

    def __init__(
        self,
        pipelines: Pipelines,
        num_microbatches: int,
        options: OrderOptions,
        updates: Updates | None = None,
        turns: Mapping[Op, float] | None = None,
    ) -> None:
        self._pipelines, self._num_microbatches, self._times = pipelines, num_microbatches, options.times
        self._num_ranks, self._num_pipelines = len(pipelines[0]), len(pipelines)
        self._read_ahead = (READ_AHEAD + options.read_ahead) * self._num_pipelines
        self._backward_first, self._turns = options.backward_first, turns
        self._ran = RanRows([[] for _ in range(self._num_ranks)], {})
        self._ready: list[list[_ReadyOp]] = [[] for _ in range(self._num_ranks)]
        self._events: list[tuple[float, int, Op, bool]] = []
        self._updating = None if updates is None else _UpdateState(pipelines, num_microbatches, updates)

    def ran(self) -> RanRows:
        idle = set(range(self._num_ranks))
        for m in range(self._read_ahead):
            self._put(Op("F", 0, m), 0.0)
        now = 0.0
        while True:
            for rank in sorted(idle):
                op = self._next(rank)
                if op is not None:
                    idle.remove(rank)
                    self._ran.starts[op] = now
                    heapq.heappush(self._events, (now + self._times.of(op), rank, op, True))
            if not self._events:
                return self._ran
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                _, rank, op, ends = heapq.heappop(self._events)
                if ends:
                    idle.add(rank)
                    self._ended(op, now)
                else:
                    self._arrived(op, now)

    def _next(self, rank: int) -> Op | None:
        """What an idle rank runs: the first op that may run, but before a forward the update that it would miss."""
        updating, ready = self._updating, self._ready[rank]
        for place, op in enumerate(r.op for r in ready):
            if updating is not None and op.kind == "F":
                if (update := updating.taken(rank, before=op)) is not None:
                    return update
                if not updating.may_start(op):
                    continue
            del ready[place]
            if updating is not None:
                updating.started(op)
            self._ran.rows[rank].append(op)
            return op
        return None if updating is None else updating.taken(rank)

    def _ended(self, op: Op, now: float) -> None:
        kind, stage, m = op
        if kind == "F":
            last = stage + 1 == self._num_ranks
            self._put(Op("B", stage, m), now) if last else self._send(Op("F", stage + 1, m), now, self._times.message)
        elif kind == "B":
            if stage:
                self._send(Op("B", stage - 1, m), now, self._times.message)
            else:
                self._put(Op("F", 0, m + self._read_ahead), now)
        if self._updating is not None:
            for update in self._updating.ended(op):
                self._send(update, now, self._times.update_message)

    def _send(self, op: Op, now: float, takes: float) -> None:
        """Lets an op that needs a message know of it when it arrives."""
        if takes:
            heapq.heappush(self._events, (now + takes, -1, op, False))
        else:
            self._arrived(op, now)

    def _arrived(self, op: Op, now: float) -> None:
        if op.kind != "U":
            self._put(op, now)
        elif self._updating is not None:
            self._updating.arrived(op)

    def _put(self, op: Op, now: float) -> None:
        m = op.microbatch
        if m < self._num_microbatches:
            rank = self._pipelines[m % self._num_pipelines][op.stage]
            turn = m // self._num_ranks if self._turns is None else self._turns[op]
            later = self._backward_first and op.kind == "F"
            insort(self._ready[rank], _ReadyOp(turn, later, now, m, op))


def ran_with(pipelines: Pipelines, num_microbatches: int, options: OrderOptions, updates: Updates | None) -> RanRows:
    """Runs all ops of so many microbatches."""
    if updates is not None and not options.by_turns:
        return OrderRun(pipelines, num_microbatches, options, updates).ran()
    ran = OrderRun(pipelines, num_microbatches, options).ran()
    return ran if updates is None else OrderRun(pipelines, num_microbatches, options, updates, ran.starts).ran()


class _UpdateState:
    """Which updates have all they need, and which forwards wait for one.

    A forward of microbatch m waits for the update that closes the window of microbatch m - d * max_mismatch, and for
    all before it. So a window's first d * max_mismatch microbatches may meet the update before theirs, or as many as
    `max_mismatch`, and the rest meet none.
    """

    def __init__(self, pipelines: Pipelines, num_microbatches: int, updates: Updates) -> None:
        self._pipelines, self._num_pipelines, num_stages = pipelines, len(pipelines), len(pipelines[0])
        self._windows = Windows(updates.window, num_microbatches, len(pipelines))
        self._may_miss = num_stages * (updates.max_mismatch or 0)
        self._left = [
            [len(self._windows.microbatches(update)) for update in range(self._windows.num_updates)]
            for _ in range(num_stages)
        ]
        """Backwards of each stage and window still to end."""
        self._owned = [0] * num_stages
        """Updates that each stage's owner could start on so far."""
        self._taken = [[0] * len(pipelines) for _ in range(num_stages)]
        """Updates that each copy has taken over."""
        self._pending: list[list[Op]] = [[] for _ in pipelines[0]]
        """Of each rank, the U that have all they need."""
        self._in_last = [0] * len(pipelines)
        """Microbatches of each pipeline between the F and the B of its last stage."""

    def taken(self, rank: int, before: Op | None = None) -> Op | None:
        """Takes a rank's first pending update that may run, or the first that a given forward would miss."""
        for op in self._pending[rank]:
            if self._may_run(op) and (before is None or self._misses(before, op)):
                self._pending[rank].remove(op)
                return op
        return None

    def _misses(self, forward: Op, update: Op) -> bool:
        """Whether an update is the forward's copy's, and gathers earlier microbatches than it."""
        number, copy = self._windows.update_of(update.microbatch)
        _, stage, m = forward
        return (stage, m % self._num_pipelines) == (update.stage, copy) and number < m // self._windows.window

    def may_start(self, forward: Op) -> bool:
        """Whether a forward's copy has taken over all updates that it waits for."""
        _, stage, m = forward
        closed = max(0, m - self._may_miss) // self._windows.window
        return self._taken[stage][m % self._num_pipelines] >= closed

    def started(self, op: Op) -> None:
        last = op.stage == len(self._left) - 1
        if last:
            self._in_last[op.microbatch % self._num_pipelines] += 1 if op.kind == "F" else -1

    def ended(self, op: Op) -> list[Op]:
        """The updates that an op lets go, once its message has come to them."""
        kind, stage, number = op
        if kind == "B":
            self._left[stage][number // self._windows.window] -= 1
            return self._due(stage)
        if kind != "U":
            return []
        update, pipeline = self._windows.update_of(number)
        self._taken[stage][pipeline] += 1
        if pipeline != OWNER:
            return []
        others = [Op("U", stage, self._windows.number(update, copy)) for copy in range(1, self._num_pipelines)]
        return [*others, *self._due(stage)]

    def arrived(self, update: Op) -> None:
        """Takes note that an update has all it needs."""
        pipeline = self._windows.update_of(update.microbatch)[1]
        self._pending[self._pipelines[pipeline][update.stage]].append(update)

    def _due(self, stage: int) -> list[Op]:
        """The owner's next update, where all backwards of its window and the update before it have ended."""
        update = self._owned[stage]
        if update < len(self._left[stage]) and not self._left[stage][update] and self._taken[stage][OWNER] == update:
            self._owned[stage] += 1
            return [Op("U", stage, self._windows.number(update, OWNER))]
        return []

    def _may_run(self, op: Op) -> bool:
        """Not between the F and the B of the last stage, where Lemma 1 has no mismatch."""
        return op.stage < len(self._left) - 1 or not self._in_last[self._windows.update_of(op.microbatch)[1]]
