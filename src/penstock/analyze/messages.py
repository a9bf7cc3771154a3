"""The messages of a step: which op made each and which needed it, and how long each took by itself.

Where both ends were recorded a message takes from when the later end was there to when the receiver had it. Where
none was, it takes from its op's end to the start of the op that waited for it. What nobody waited for takes its
link's median, or less if it was needed sooner.

Clocks of hosts are brought together by messages within a pipeline, and by the ends of collectives between replicas. A
message can't arrive before it was sent. Between two ranks messages go both ways, activations and gradients. With both
clocks right, the shortest one each way takes its own time and no more:

    shortest there = way + (clock of b - clock of a)        so the clocks differ by half of what
    shortest back  = way - (clock of b - clock of a)        the two differ by

Clocks that break no message's order are left alone: there the way need not be the same in both directions.
If no shift of clocks mends the order, but every op ends after its message was sent, ranges hold the wait for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from penstock.analyze.whole import StepTable
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import NONE, Scope, TraceError

BACKWARDS = ("B", "I")


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages between ranks of a step: L of them.

    Attributes:
        producer, consumer: ops of the step that made and needed each, (L,).
        receive: ops that recorded its end; NONE where none did.
        own: ms that each took by itself, (K, L).
        posted: the op after which its receiver waits for it; NONE where any number may be under way.
    """

    producer: Array
    consumer: Array
    receive: Array
    own: Array
    posted: Array

    @property
    def recorded(self) -> bool:
        return bool((self.receive != NONE).any())


def messages_of(table: StepTable) -> Messages:
    """The messages of all steps of a table.

    Raises:
        TraceError: there are more or fewer ends of messages than ops that need them.
    """
    made: dict[tuple[str, int, int, int], list[int]] = {}  # by all ranks that share the stage
    for op in table.compute.tolist():
        letter = "B" if table.letters[op] in BACKWARDS else str(table.letters[op])
        key = letter, int(table.replica[op]), int(table.stage[op]), int(table.microbatch[op])
        made.setdefault(key, []).append(op)
    pairs = []
    for (letter, replica, stage, microbatch), ops in made.items():
        sources = made.get((letter, replica, stage + (-1 if letter == "F" else 1), microbatch), [])
        have = table.rank[sources]
        for op in ops if letter in ("F", "B") and sources else ():
            if table.rank[op] not in have:
                pairs.append((sources[0], op))
    producer, consumer = np.array(pairs, np.int64).reshape(-1, 2).T
    receive = _ends(table, consumer, Scope.RECEIVE)
    if (receive == NONE).all():
        own = _by_waiting(table, producer, consumer)
        return Messages(producer, consumer, receive, own, np.full(len(consumer), NONE))
    send = _ends(table, producer, Scope.SEND)
    began = np.where(send == NONE, table.end[:, producer], table.start[:, send])
    posted = np.where(receive == NONE, began, table.start[:, receive])
    arrived = np.where(receive == NONE, table.start[:, consumer], table.end[:, receive])
    own = np.maximum(arrived - np.maximum(began, posted), 0.0)
    return Messages(producer, consumer, receive, own, _posted(table, consumer, receive))


def _ends(table: StepTable, ops: Array, scope: Scope) -> Array:
    """The recorded op that sent, or received, the message of each op; NONE where none was recorded."""
    found = np.full(table.num_ops, NONE)
    has_message = np.zeros(table.num_ops, bool)
    has_message[ops] = True
    order = np.argsort(table.start[0], kind="stable")
    is_end, is_compute = table.is_scope(scope)[order], table.is_scope(Scope.COMPUTE)[order]
    for letters in (("F",), BACKWARDS):
        is_letter = np.isin(table.letters[order], letters)
        for worker in range(table.num_workers):
            here = (table.worker[order] == worker) & is_letter
            recorded, computed = order[here & is_end], order[here & is_compute]
            if not len(recorded):
                continue
            needing = computed[has_message[computed]]
            if (table.microbatch[recorded] != NONE).all() and (table.stage[recorded] != NONE).all():
                by_name = {(table.stage[op], table.microbatch[op]): op for op in recorded.tolist()}
                found[needing] = [by_name.get((table.stage[op], table.microbatch[op]), NONE) for op in needing]
            elif len(recorded) == len(computed):  # also what goes nowhere was recorded
                found[computed] = recorded
            elif len(recorded) == len(needing):
                found[needing] = recorded
            elif len(recorded) == len(computed) - 1:  # all but the very first receive, or the very last send
                found[computed[1:] if scope is Scope.RECEIVE else computed[:-1]] = recorded
            else:
                replica, rank = divmod(worker, table.trace.num_ranks)
                raise TraceError(
                    f"{table.trace.name}: replica {replica}, rank {rank} has {len(recorded)} of "
                    f"{table.trace.kinds[int(table.kind[recorded[0]])].name}, and {len(needing)} ops that need "
                    "one; are ops missing? Record whole steps, or leave sends and receives out altogether"
                )
    return found[ops]


def _posted(table: StepTable, consumer: Array, receive: Array) -> Array:
    """The op after which each message's receiver waits for it: the one before it of its kind."""
    before: dict[tuple[int, bool], int] = {}
    previous = np.full(table.num_ops, NONE)
    for op in table.compute[np.argsort(table.start[0][table.compute], kind="stable")].tolist():
        key = int(table.worker[op]), bool(table.letters[op] == "F")
        if table.letters[op] in ("F", *BACKWARDS):
            previous[op] = before.get(key, NONE)
            before[key] = op
    return np.where(receive == NONE, NONE, previous[consumer])


def free_at(table: StepTable) -> Array:
    """When the rank of each compute op had ended the one before, (K, M); 0 for others, and for the first."""
    free = np.zeros(table.start.shape)
    shared = np.unique(table.groups[table.compute])
    for step, (start, end) in enumerate(zip(table.start, table.end)):
        order = table.compute[np.lexsort((start[table.compute], table.worker[table.compute]))]
        same = table.worker[order][1:] == table.worker[order][:-1]
        free[step, order[1:][same]] = end[order[:-1][same]]
        for group in shared[shared != NONE].tolist():
            free[step, table.groups == group] = free[step, table.groups == group].max()  # it waits for all members
    return free


def _by_waiting(table: StepTable, producer: Array, consumer: Array) -> Array:
    """Ms from each op's end to the start of the op that waited for its message, (K, L)."""
    gap = table.start[:, consumer] - table.end[:, producer]
    own = np.where(table.end[:, producer] >= free_at(table)[:, consumer], gap, np.nan)
    links = np.stack([table.rank[producer], table.rank[consumer]], axis=1)
    for link in np.unique(links, axis=0):
        on = np.flatnonzero((links == link).all(axis=1))
        known = own[:, on][~np.isnan(own[:, on])]
        usual = float(np.median(known)) if len(known) else 0.0
        own[:, on] = np.where(np.isnan(own[:, on]), np.minimum(usual, gap[:, on]), own[:, on])
    return np.maximum(own, 0.0)


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
