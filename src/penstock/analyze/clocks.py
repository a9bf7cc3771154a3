"""Clocks of hosts brought together: by messages within a pipeline, by the ends of collectives between replicas.

A message can't arrive before it was sent. Between two ranks messages go both ways, activations and gradients. With
both clocks right, the shortest one each way takes its own time and no more:

    shortest there = way + (clock of b - clock of a)        so the clocks differ by half of what
    shortest back  = way - (clock of b - clock of a)        the two differ by

Clocks that break no message's order are left alone: there the way need not be the same in both directions.
If no shift of clocks mends the order, but every op ends after its message was sent, ranges hold the wait for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from penstock.analyze.messages import messages_of
from penstock.analyze.step_network import Messages
from penstock.analyze.whole import StepTable
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import NONE, Scope, TraceError

WRONG = 0.1
"""The share of an op's time by which a message may still arrive too early once clocks are together."""
LEAST = 0.1
"""Ms by which a message must arrive before it was sent for clocks to be aligned: less is rounding."""


def aligned(table: StepTable) -> StepTable:
    """The steps on one clock; as they are where no message arrives before it was sent, and no collective's ends lie
    apart by more than it lasts.
    """
    num_ranks = table.trace.num_ranks
    num_workers = table.trace.num_replicas * num_ranks
    sent = messages_of(table)
    worker = table.replica * num_ranks + table.rank
    shortest = _shortest(table, sent, worker)
    offset = np.zeros((len(table.steps), num_workers))
    wrong = [pair for pair, ways in shortest.items() if ways.min() < -LEAST]
    if wrong:
        _over_messages(offset, shortest)
    apart = _over_collectives(offset, table, worker)
    if not wrong and not apart:
        return table
    start, end = table.start - offset[:, worker], table.end - offset[:, worker]
    first = start.min(axis=1, keepdims=True)
    together = replace(table, start=start - first, end=end - first)
    shortest_way = float(_ways(together, sent).min(initial=0.0))
    if shortest_way < -_tolerance(table, sent) and (waiting := _without_waits(table, sent)) is not None:
        return waiting
    _require_chain(together, sent)
    largest = np.abs(offset - offset.mean(axis=1, keepdims=True)).max()
    note = f"clocks of ranks were brought together, by up to {largest:.3g} ms"
    if wrong:
        a, b = wrong[0]
        note += f": a message from rank {a % num_ranks} to {b % num_ranks} arrived before it was sent"
    return replace(together, trace=table.trace.with_note(note))


def _shortest(table: StepTable, sent: Messages, worker: Array) -> dict[tuple[int, int], Array]:
    """Ms of the shortest message from worker to worker, by step."""
    ways = _ways(table, sent)
    source, target = worker[sent.producer], worker[sent.consumer]
    return {
        (a, b): ways[:, (source == a) & (target == b)].min(axis=1)
        for a, b in sorted(set(zip(source.tolist(), target.tolist())))
    }


def _ways(table: StepTable, sent: Messages) -> Array:
    """Ms from when each message was computed to when it was there, at the latest, (K, L)."""
    arrived = table.start[:, sent.consumer].copy()
    has = sent.receive != NONE
    arrived[:, has] = table.end[:, sent.receive[has]]
    ways: Array = arrived - table.end[:, sent.producer]
    return ways


def _tolerance(table: StepTable, sent: Messages) -> float:
    """Ms by which a message may still arrive too early."""
    usual = float(np.median(table.end[:, sent.producer] - table.start[:, sent.producer]))
    return max(LEAST, WRONG * usual)


def _without_waits(table: StepTable, sent: Messages) -> StepTable | None:
    """The steps with ops that begin when their message was sent; None where one would have no time left."""
    if (sent.receive != NONE).any():
        return None
    start = table.start.copy()
    for producer, consumer in zip(sent.producer, sent.consumer):
        start[:, consumer] = np.maximum(start[:, consumer], table.end[:, producer])
    own = table.end - start
    for kind, stage in set(zip(table.kind[sent.consumer].tolist(), table.stage[sent.consumer].tolist())):
        alike = own[:, (table.kind == kind) & (table.stage == stage)]
        if alike.min() <= WRONG * np.median(alike) - 2 * LEAST:
            return None
    start = np.minimum(start, table.end)
    waits = int((start > table.start + LEAST).sum())
    note = f"{waits} ops begin before their message was sent: their ranges hold the wait for it, which is left out"
    return replace(table, start=start, trace=table.trace.with_note(note))


def _require_chain(table: StepTable, sent: Messages) -> None:
    """Raises TraceError where messages arrive before they were sent whatever the clocks."""
    ways = _ways(table, sent)
    step, message = np.unravel_index(int(np.argmin(ways)), ways.shape)
    shortest = float(ways[step, message])
    if shortest < -_tolerance(table, sent):
        raise TraceError(
            f"{table.trace.name}, step {int(table.steps[step])}: {table.named(int(sent.consumer[message]))} starts "
            f"{-shortest:.6g} ms before {table.named(int(sent.producer[message]))} has ended, which it needs, and no "
            "shift of clocks mends that: are stages numbered otherwise than they follow each other, do they branch, "
            "or is a rank's file of another run? Where names have no stage, --ranks says how many a pipeline has"
        )


def _over_messages(offset: Array, shortest: dict[tuple[int, int], Array]) -> None:
    """How far each worker's clock is ahead of the first one's of its pipeline."""
    joined: dict[int, set[int]] = {}
    for a, b in shortest:
        joined.setdefault(a, set()).add(b)
        joined.setdefault(b, set()).add(a)
    seen: set[int] = set()
    for first in sorted(joined):
        if first in seen:
            continue
        todo = deque([first])
        seen.add(first)
        while todo:
            a = todo.popleft()
            for b in sorted(joined[a] - seen):
                there, back = shortest.get((a, b)), shortest.get((b, a))
                if there is not None and back is not None:
                    ahead = (there - back) / 2
                elif there is not None:  # one way only: no more than what breaks the order
                    ahead = np.minimum(there, 0.0)
                else:
                    ahead = -np.minimum(shortest[b, a], 0.0)
                offset[:, b] = offset[:, a] + ahead
                seen.add(b)
                todo.append(b)


def _over_collectives(offset: Array, table: StepTable, worker: Array) -> bool:
    """Moves pipelines whose collectives end at other times than those of replica 0; whether any had to move."""
    num_ranks = table.trace.num_ranks
    moved = False
    ops = np.flatnonzero(table.is_scope(Scope.REPLICAS))
    of_first = {
        (table.keys[op].kind, table.keys[op].rank, table.keys[op].number): op
        for op in ops.tolist()
        if table.replica[op] == 0
    }
    for replica in range(1, table.trace.num_replicas):
        gaps, lasts = [], []
        for op in ops[table.replica[ops] == replica].tolist():
            other = of_first.get((table.keys[op].kind, table.keys[op].rank, table.keys[op].number))
            if other is not None:
                end = table.end[:, [op, other]] - offset[:, worker[[op, other]]]
                gaps.append(end[:, 0] - end[:, 1])
                lasts.append(np.minimum(table.end - table.start, np.inf)[:, [op, other]].min(axis=1))
        if not gaps:
            continue
        gap, last = np.median(gaps, axis=0), np.median(lasts, axis=0)
        if (np.abs(gap) > last + LEAST).any():
            offset[:, replica * num_ranks : (replica + 1) * num_ranks] += gap[:, None]
            moved = True
    return moved
