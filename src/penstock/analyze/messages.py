"""The messages of a step: which op made each and which needed it, and how long each took by itself.

Where both ends were recorded a message takes from when the later end was there to when the receiver had it. Where
none was, it takes from its op's end to the start of the op that waited for it. What nobody waited for takes its
link's median, or less if it was needed sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

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
