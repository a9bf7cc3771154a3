"""AMDP: asynchronous multi-directional pipelines (paper under review, sections 3.1 to 3.4).

As in PipeDream the pipelines never flush, but each lets only two microbatches in before its first backward, so
that a microbatch meets at most one update between its F and its B. One such pipeline keeps a rank busy 2/d of the
time; d/2 of them, laid over the ranks in both directions, fill each other's bubbles.
"""

from __future__ import annotations

import heapq
from bisect import insort
from math import isfinite
from typing import NamedTuple

from penstock.library.options import at_least, whole_multiple
from penstock.program.placements import multi_directional
from penstock.schedule import Op, Schedule, ScheduleError, Updates, Windows

_READ_AHEAD = 2
"""Microbatches that stage 0 of a pipeline reads before its first backward: the paper's n."""


def amdp(
    num_ranks: int,
    num_microbatches: int,
    f: float = 1.0,
    b: float = 2.0,
    window: int | None = None,
    max_mismatch: int = 1,
    u: float = 0.0,
) -> Schedule:
    """d ranks, d/2 pipelines, microbatch m on pipeline m mod d/2, in blocks of d microbatches.

    Stage i of an even pipeline j lies on rank (2j + i) mod d, of an odd one on rank (2j - i + d + 1) mod d.
    Four ranks, six microbatches:

        rank 0 | 0F0 0F2 0F4 3F1 3B1 3F3 3B3 .   0B0 .   0B2 ...
        rank 1 | .   1F0 2F1 1F2 2F3 1F4 2B1 1B0 2B3 1B2 2F5 ...
        rank 2 | .   1F1 2F0 1F3 2F2 1F5 2B0 1B1 2B2 1B3 2F4 ...
        rank 3 | 0F1 0F3 0F5 3F0 3B0 3F2 3B2 .   0B1 .   0B3 ...

    Where two pipelines want one rank, the earlier block goes first, and within it the op that was ready first.
    At the boundary of two blocks stage 0 reads floor(b/f) microbatches more, so that forwards of the next block
    fill the bubbles at the end of this one and at its own beginning.

    Ranks are busy 0.99 of the time at d = 4, 8, 12, 16 over 40 blocks with b = 2f; 0.85 without the reads ahead.
    So "d/2 pipelines fully eliminate bubbles" (section 3.2) holds for b = f and d a multiple of 4, by this order of
    blocks; first in, first out over all blocks alike, as the paper has it, already leaves bubbles at d = 8. Where
    d/2 is odd, one direction has a pipeline more and about 0.9 is reached. Peak d + 1 activations at b = f and d a
    multiple of 4, up to half as many again at b = 2f.

    With a `window` the updates are ops of the order (section 3.3). The owner's runs when every pipeline
    has gone through the window, the others after it, each in the next bubble of its rank, or just before a forward of
    its copy that would miss it. Two rules beyond the paper make the bound hold for any b/f:

    - A forward of microbatch m waits for the update that closes the window of microbatch m - d. So only the first d
      microbatches of a window may meet an update, and only one. Without this the reads ahead break both: where
      b = 2f two updates with windows of d, and the first 3d/2 microbatches of longer ones. It costs nothing there
      from windows of 2d on, and up to 0.05 of the time with windows of d.
    - On the last stage no update comes between a microbatch's F and B: Lemma 1's min(2, d - i) - 1 holds on all.

    The gradients of two windows may be under way at once, never of three. Four ranks, windows of eight, rank 1:

        ... 2B7 1B6 1U0 1F10 2B9 2F11 1B8 1F12 .   .   2B11 1B10 2U1 2F13 ...

    Args:
        f, b, u: times of a stage's F, B and its owner's U; their ratios shape the order.
        window: microbatches that an update gathers, a multiple of the d of a block; without it updates are left out.
        max_mismatch: most updates between a microbatch's F and B on any stage; 0 drains the pipelines at each update.
    """
    whole_multiple("amdp", "ranks", num_ranks, "that each pipeline takes", 2)
    for name, time in (("f", f), ("b", b)):
        if not (isinstance(time, int | float) and isfinite(time) and time > 0):
            raise ScheduleError(f"amdp: {name} is {time!r}; give a time above 0", rule="options")
    if not (isinstance(u, int | float) and isfinite(u) and u >= 0):
        raise ScheduleError(f"amdp: u is {u!r}; give a time of at least 0", rule="options")
    updates = None
    if window is not None:
        whole_multiple("amdp", "a window", window, "microbatches of a block", num_ranks)
        at_least("amdp", "update as max_mismatch", max_mismatch, 0)
        updates = Updates(window, max_mismatch)
    placement = multi_directional(num_ranks)
    rows = _Run(placement.pipelines, num_microbatches, {"F": f, "B": b, "U": u}, updates).rows()
    pipeline_of = tuple(m % placement.num_pipelines for m in range(num_microbatches))
    return Schedule("amdp", placement, tuple(map(tuple, rows)), pipeline_of, updates=updates)


class _Ready(NamedTuple):
    """An op that has all it needs, in the order in which a rank prefers them."""

    block: int
    since: float
    microbatch: int
    op: Op


class _Run:
    """The order in which the ranks run all ops, from event to event."""

    def __init__(
        self,
        pipelines: tuple[tuple[int, ...], ...],
        num_microbatches: int,
        duration: dict[str, float],
        updates: Updates | None,
    ) -> None:
        self._pipelines, self._num_microbatches, self._duration = pipelines, num_microbatches, duration
        self._num_ranks, self._num_pipelines = len(pipelines[0]), len(pipelines)
        self._read_ahead = (_READ_AHEAD + int(duration["B"] // duration["F"])) * self._num_pipelines
        self._order: list[list[Op]] = [[] for _ in range(self._num_ranks)]
        self._ready: list[list[_Ready]] = [[] for _ in range(self._num_ranks)]
        self._updating = None if updates is None else _Updating(pipelines, num_microbatches, updates)

    def rows(self) -> list[list[Op]]:
        running: list[tuple[float, int, Op]] = []
        idle = set(range(self._num_ranks))
        for m in range(self._read_ahead):
            self._put(Op("F", 0, m), 0.0)
        now = 0.0
        while True:
            for rank in sorted(idle):
                op = self._next(rank)
                if op is not None:
                    self._order[rank].append(op)
                    heapq.heappush(running, (now + self._takes(op), rank, op))
                    idle.remove(rank)
            if not running:
                return self._order
            now = running[0][0]
            while running and running[0][0] == now:
                _, rank, op = heapq.heappop(running)
                idle.add(rank)
                self._ended(op, now)

    def _takes(self, op: Op) -> float:
        """How long an op takes; a copy that does not own its stage only takes parameters over, at once."""
        copies = op.kind == "U" and op.microbatch % self._num_pipelines
        return 0.0 if copies else self._duration[op.kind]

    def _put(self, op: Op, now: float) -> None:
        m = op.microbatch
        if m < self._num_microbatches:
            rank = self._pipelines[m % self._num_pipelines][op.stage]
            insort(self._ready[rank], _Ready(m // self._num_ranks, now, m, op))

    def _next(self, rank: int) -> Op | None:
        """What an idle rank runs: the first op that may run, but before a forward the update that it would miss."""
        updating, ready = self._updating, self._ready[rank]
        for place, (_, _, _, op) in enumerate(ready):
            if updating is not None and op.kind == "F":
                if (update := updating.before(rank, op)) is not None:
                    return update
                if not updating.may_start(op):
                    continue
            del ready[place]
            if updating is not None:
                updating.started(op)
            return op
        return None if updating is None else updating.any_of(rank)

    def _ended(self, op: Op, now: float) -> None:
        kind, stage, m = op
        if kind == "F":
            self._put(Op("F", stage + 1, m) if stage + 1 < self._num_ranks else Op("B", stage, m), now)
        elif kind == "B":
            self._put(Op("B", stage - 1, m) if stage else Op("F", 0, m + self._read_ahead), now)
        if self._updating is not None:
            self._updating.ended(op)


class _Updating:
    """Which updates have all they need, and which forwards wait for one.

    A forward of microbatch m waits for the update that closes the window of microbatch m - d * max_mismatch, and for
    all before it. So a window's first d * max_mismatch microbatches may meet the update before theirs, or as many as
    `max_mismatch`, and the rest meet none.
    """

    def __init__(self, pipelines: tuple[tuple[int, ...], ...], num_microbatches: int, updates: Updates) -> None:
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

    def before(self, rank: int, forward: Op) -> Op | None:
        """The pending update of the forward's copy that gathers earlier microbatches than it, if it may run."""
        pipeline = forward.microbatch % self._num_pipelines
        for op in self._pending[rank]:
            update, copy = self._windows.update_of(op.microbatch)
            earlier = update < forward.microbatch // self._windows.window
            if op.stage == forward.stage and copy == pipeline and earlier and self._may_run(op):
                return self._take(rank, op)
        return None

    def any_of(self, rank: int) -> Op | None:
        """The first pending update that may run, for a rank with nothing else to do."""
        op = next((op for op in self._pending[rank] if self._may_run(op)), None)
        return None if op is None else self._take(rank, op)

    def may_start(self, forward: Op) -> bool:
        """Whether a forward's copy has taken over all updates that it waits for."""
        _, stage, m = forward
        closed = max(0, m - self._may_miss) // self._windows.window
        return self._taken[stage][m % self._num_pipelines] >= closed

    def started(self, op: Op) -> None:
        last = op.stage == len(self._left) - 1
        if last:
            self._in_last[op.microbatch % self._num_pipelines] += 1 if op.kind == "F" else -1

    def ended(self, op: Op) -> None:
        kind, stage, number = op
        if kind == "B":
            self._left[stage][number // self._windows.window] -= 1
            self._offer_owner(stage)
        elif kind == "U":
            update, pipeline = self._windows.update_of(number)
            self._taken[stage][pipeline] += 1
            if pipeline == 0:
                for copy in range(1, self._num_pipelines):
                    self._offer(stage, update, copy)
                self._offer_owner(stage)

    def _offer_owner(self, stage: int) -> None:
        update = self._owned[stage]
        if update < len(self._left[stage]) and not self._left[stage][update] and self._taken[stage][0] == update:
            self._owned[stage] += 1
            self._offer(stage, update, 0)

    def _offer(self, stage: int, update: int, pipeline: int) -> None:
        self._pending[self._pipelines[pipeline][stage]].append(Op("U", stage, self._windows.number(update, pipeline)))

    def _take(self, rank: int, op: Op) -> Op:
        self._pending[rank].remove(op)
        return op

    def _may_run(self, op: Op) -> bool:
        """Not between the F and the B of the last stage, where Lemma 1 has no mismatch."""
        return op.stage < len(self._left) - 1 or not self._in_last[self._windows.update_of(op.microbatch)[1]]
