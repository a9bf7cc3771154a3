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

from penstock.analyze.messages import Messages, messages_of
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
    sent = messages_of(table)
    ways, tolerance = _ways(table, sent), _tolerance(table, sent)
    links = np.stack([table.worker[sent.producer], table.worker[sent.consumer]], axis=1)
    shortest = {
        (a, b): ways[:, (links == (a, b)).all(axis=1)].min(axis=1) for a, b in np.unique(links, axis=0).tolist()
    }
    offset = np.zeros((len(table.steps), table.num_workers))
    wrong = [pair for pair, ways in shortest.items() if ways.min() < -LEAST]
    if wrong:
        _over_messages(offset, shortest)
    if not _over_collectives(offset, table) and not wrong:
        return table
    start, end = table.start - offset[:, table.worker], table.end - offset[:, table.worker]
    first = start.min(axis=1, keepdims=True)
    together = replace(table, start=start - first, end=end - first)
    ways = _ways(together, sent)
    if ways.min(initial=0.0) < -tolerance:
        if (waiting := _without_waits(table, sent)) is not None:
            return waiting
        step, message = np.unravel_index(int(np.argmin(ways)), ways.shape)
        raise TraceError(
            f"{table.trace.name}, step {int(table.steps[step])}: {table.named(int(sent.consumer[message]))} starts "
            f"{-ways[step, message]:.6g} ms before {table.named(int(sent.producer[message]))} has ended, which it "
            "needs, and no shift of clocks mends that: are stages numbered otherwise than they follow each other, do "
            "they branch, or is a rank's file of another run? Where names have no stage, --ranks says how many a "
            "pipeline has"
        )
    largest = np.abs(offset - offset.mean(axis=1, keepdims=True)).max()
    note = f"clocks of ranks were brought together, by up to {largest:.3g} ms"
    if wrong:
        a, b = (worker % table.trace.num_ranks for worker in wrong[0])
        note += f": a message from rank {a} to {b} arrived before it was sent"
    return replace(together, trace=table.trace.with_note(note))


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


def _over_messages(offset: Array, shortest: dict[tuple[int, int], Array]) -> None:
    """How far each worker's clock is ahead of the first one's of its pipeline."""
    joined: dict[int, set[int]] = {}
    for a, b in shortest:
        joined.setdefault(a, set()).add(b)
        joined.setdefault(b, set()).add(a)
    seen: set[int] = set()
    for first in sorted(joined):
        todo = deque({first} - seen)
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


def _over_collectives(offset: Array, table: StepTable) -> bool:
    """Moves pipelines whose collectives end at other times than those of replica 0; whether any had to move."""
    num_ranks = table.trace.num_ranks
    moved = False
    ops = np.flatnonzero(table.is_scope(Scope.REPLICAS))
    names = list(zip(table.kind[ops].tolist(), table.rank[ops].tolist(), table.number[ops].tolist()))
    of_first = {name: op for name, op in zip(names, ops.tolist()) if table.replica[op] == 0}
    end = table.end - offset[:, table.worker]
    for replica in range(1, table.trace.num_replicas):
        pairs = [
            (op, of_first[name])
            for name, op in zip(names, ops.tolist())
            if table.replica[op] == replica and name in of_first
        ]
        if not pairs:
            continue
        mine, first = np.array(pairs).T
        taken = table.end - table.start
        gap = np.median(end[:, mine] - end[:, first], axis=1)
        last = np.median(np.minimum(taken[:, mine], taken[:, first]), axis=1)
        if (np.abs(gap) > last + LEAST).any():
            offset[:, replica * num_ranks : (replica + 1) * num_ranks] += gap[:, None]
            moved = True
    return moved
