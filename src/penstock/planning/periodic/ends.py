"""Shortens a timed flow window by window, with CP-SAT: above all its warm-up and cool-down, where no steady state is.

The ops that start within a window of time are freed; those before stay where they are, those after keep their
order. A freed op may start no earlier than what is fixed before it allows (its head), and once it has ended at
least the longest way through what is fixed after it is still to go (its tail):

    before | window            | after                      minimise over the freed ops
    -------+-------------------+-----------------           max(start + duration + tail)
    fixed  | in a better order | same order, moved

A step never lengthens the whole, and where the window holds the only wait on the critical path, it shortens it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.planning.periodic.model import BlockInstance, Flow, fits, makespan, retimed, start_order
from penstock.planning.periodic.modulo import IntegerTimes, cp_sat, memory_unit, solve

_FIRST_WINDOW, _LARGEST_WINDOW = 64, 384
_SLICE = 2.0
"""Seconds for one window, at most."""


def shortened(
    flow: Flow,
    units: IntegerTimes,
    timed: list[BlockInstance],
    caps: Sequence[float],
    lower_bound: float,
    good_enough: float,
    deadline: float,
    found: Callable[[list[BlockInstance]], None],
    *,
    seed: int = 0,
    num_workers: int = 2,
) -> None:
    """Hands each shorter one to `found`, until `deadline` (of `time.perf_counter`) or a `good_enough` makespan (ms).

    Args:
        lower_bound: of the makespan (ms).
    """
    size = _FIRST_WINDOW
    best = makespan(flow, timed)
    while size <= _LARGEST_WINDOW:
        improved = False
        for first in _windows(len(timed), size):
            left = deadline - time.perf_counter()
            if left <= 0.01 or best <= good_enough:
                return
            window = _Window(flow, units, timed, first, first + size, caps)
            order = window.solved(min(left, _SLICE), best, lower_bound, seed, num_workers)
            if order is not None:
                candidate = sorted(retimed(flow, order), key=lambda one: start_order(flow, *one))
                value = makespan(flow, candidate)
                # Ops that take no time can change places with others that start when they do.
                if not fits(flow, [(one.block, one.turn) for one in candidate], caps):
                    continue
                if value < best:
                    improved = True
                    found(candidate)
                if value <= best:
                    timed, best = candidate, value
        if not improved:
            if size >= len(timed):
                break
            size *= 2


def _windows(num_ops: int, size: int) -> list[int]:
    """Where windows begin: at both ends first, and then, with overlap, from both ends to the middle."""
    last = max(0, num_ops - size)
    places: list[int] = []
    for offset in range(0, last // 2 + 1, max(1, size // 2)):
        places += [place for place in (offset, last - offset) if place not in places]
    return places[:6]


class _Window:
    """One window: the ops at places `first` to `last - 1` of `timed` are freed."""

    def __init__(
        self,
        flow: Flow,
        units: IntegerTimes,
        timed: list[BlockInstance],
        first: int,
        last: int,
        caps: Sequence[float],
    ) -> None:
        self.flow, self.units, self.caps = flow, units, caps
        self.before, self.freed, self.after = timed[:first], timed[first:last], timed[last:]
        self.heads = heads_of(flow, self.before, self.freed)
        self.tails = tails_of(flow, self.after, self.freed)
        self.held = [0.0] * flow.num_ranks
        for one in self.before:
            block = flow.blocks[one.block]
            for rank in block.ranks:
                self.held[rank] += block.acquires - block.releases

    def solved(
        self, seconds: float, best: float, lower_bound: float, seed: int, num_workers: int
    ) -> list[tuple[int, int]] | None:
        """A better order of everything as (block, turn), or None if there is none or none was found."""
        cp = cp_sat()
        model: Any = cp.CpModel()
        unit, durations, blocks = self.units.unit, self.units.durations, self.flow.blocks
        horizon = math.ceil(best / unit) + sum(durations)
        begin = min(self.heads, default=0.0)
        starts = [model.new_int_var(round((head - begin) / unit), horizon, "") for head in self.heads]
        total = model.new_int_var(0, horizon, "")
        place = {(one.block, one.turn): k for k, one in enumerate(self.freed)}
        rows: list[list[Any]] = [[] for _ in range(self.flow.num_ranks)]
        for k, one in enumerate(self.freed):
            length = durations[one.block]
            model.add(total >= starts[k] + length + round(self.tails[k] / unit))
            model.add_hint(starts[k], round((one.start - begin) / unit))
            for need, delay in zip(blocks[one.block].needs, self.units.delays[one.block], strict=True):
                source = place.get((need.block, one.turn))
                if source is not None:
                    model.add(starts[k] >= starts[source] + durations[need.block] + delay)
            earlier = place.get((one.block, one.turn - 1))
            if earlier is not None:
                model.add(starts[k] >= starts[earlier] + length)
            for rank in blocks[one.block].ranks:
                rows[rank].append(model.new_fixed_size_interval_var(starts[k], length, ""))
        for row in rows:
            model.add_no_overlap(row)
        self._limit(model, starts)
        model.add(total >= math.ceil((lower_bound - begin) / unit - 1e-6))
        model.minimize(total)
        status, value = solve(model, seconds, seed=seed, num_workers=num_workers)
        if status not in (cp.OPTIMAL, cp.FEASIBLE):
            return None
        order = sorted(
            (start_order(self.flow, one.block, one.turn, value(starts[k])) for k, one in enumerate(self.freed))
        )
        return [
            *((one.block, one.turn) for one in self.before),
            *((block, turn) for _, _, block, turn in order),
            *((one.block, one.turn) for one in self.after),
        ]

    def _limit(self, model: Any, starts: list[Any]) -> None:
        for rank, cap in enumerate(self.caps):
            if cap == math.inf:
                continue
            unit = memory_unit(self.flow, rank, cap)
            times, changes = [], []
            for k, one in enumerate(self.freed):
                block = self.flow.blocks[one.block]
                if rank not in block.ranks:
                    continue
                if block.acquires > 0:
                    times.append(starts[k])
                    changes.append(math.ceil(block.acquires / unit - 1e-3))
                if block.releases > 0:
                    times.append(starts[k] + self.units.durations[one.block])
                    changes.append(-math.floor(block.releases / unit + 1e-3))
            room = math.floor((cap - self.held[rank]) / unit + 1e-3)
            if times and room < sum(change for change in changes if change > 0):
                model.add_reservoir_constraint(times, changes, sum(min(change, 0) for change in changes), room)


def heads_of(flow: Flow, before: Sequence[BlockInstance], freed: Sequence[BlockInstance]) -> list[float]:
    """Of each freed op, when it may start (ms), what is before it fixed."""
    free = [0.0] * flow.num_ranks
    ends: dict[tuple[int, int], float] = {}
    for one in before:
        end = ends[one.block, one.turn] = one.start + flow.blocks[one.block].duration
        for rank in flow.blocks[one.block].ranks:
            free[rank] = end
    heads = []
    for one in freed:
        block = flow.blocks[one.block]
        there = [ends[op] + need.delay for need in block.needs if (op := (need.block, one.turn)) in ends]
        heads.append(max([free[rank] for rank in block.ranks] + there))
    return heads


def tails_of(flow: Flow, after: Sequence[BlockInstance], freed: Sequence[BlockInstance]) -> list[float]:
    """Of each freed op, the ms that are still to go once it has ended, at least: its head, with time turned round."""
    last_block, last_turn = len(flow.blocks) - 1, max((one.turn for one in (*after, *freed)), default=0)

    def turned(ops: Sequence[BlockInstance]) -> list[tuple[int, int]]:
        return [(last_block - one.block, last_turn - one.turn) for one in reversed(ops)]

    backwards = flow.reversed()
    instances = [BlockInstance(block, turn, 0.0) for block, turn in turned(freed)]
    return heads_of(backwards, retimed(backwards, turned(after)), instances)[::-1]
