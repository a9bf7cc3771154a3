"""The messages of a step: which op made each and which needed it, and how long each took by itself.

Where both ends were recorded a message takes from when the later end was there to when the receiver had it. Where
none was, it takes from its op's end to the start of the op that waited for it. What nobody waited for takes its
link's median, or less if it was needed sooner.
"""

from __future__ import annotations

import numpy as np

from penstock.analyze.step_network import Messages, groups
from penstock.analyze.whole import StepTable
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import NONE, Scope, TraceError

BACKWARDS = ("B", "I")


def messages_of(table: StepTable) -> Messages:
    """The messages of all steps of a table.

    Raises:
        TraceError: there are more or fewer ends of messages than ops that need them.
    """
    letters = table.letters()
    compute = np.flatnonzero(table.is_scope(Scope.COMPUTE))
    made: dict[tuple[str, int, int, int], list[int]] = {}  # by all ranks that share the stage
    for op in compute.tolist():
        letter = "B" if letters[op] in BACKWARDS else str(letters[op])
        key = letter, int(table.replica[op]), int(table.stage[op]), int(table.microbatch[op])
        made.setdefault(key, []).append(op)
    producer, consumer = [], []
    for (letter, replica, stage, microbatch), ops in made.items():
        sources = made.get((letter, replica, stage + (-1 if letter == "F" else 1), microbatch), [])
        have = {int(table.rank[source]) for source in sources}
        for op in ops if letter in ("F", "B") and sources else ():
            if int(table.rank[op]) not in have:
                producer.append(sources[0])
                consumer.append(op)
    source_ops, targets = np.array(producer, np.int64), np.array(consumer, np.int64)
    receive = _ends(table, targets, Scope.RECEIVE)
    send = _ends(table, source_ops, Scope.SEND)
    if (receive == NONE).all():
        own = _by_waiting(table, source_ops, targets)
        return Messages(source_ops, targets, send, receive, own, np.full(len(targets), NONE))
    began = np.where(send == NONE, table.end[:, source_ops], table.start[:, send])
    posted = np.where(receive == NONE, began, table.start[:, receive])
    arrived = np.where(receive == NONE, table.start[:, targets], table.end[:, receive])
    own = np.maximum(arrived - np.maximum(began, posted), 0.0)
    return Messages(source_ops, targets, send, receive, own, _posted(table, targets, receive))


def _ends(table: StepTable, ops: Array, scope: Scope) -> Array:
    """The recorded op that sent, or received, what each op has to do with; NONE where none was recorded."""
    found = np.full(len(ops), NONE)
    place = {op: at for at, op in enumerate(ops.tolist())}
    letters = table.letters()
    ends = table.is_scope(scope)
    start = table.start[0]
    for letter in ("F", "B"):
        same = BACKWARDS if letter == "B" else (letter,)
        for replica in range(table.trace.num_replicas):
            for rank in range(table.trace.num_ranks):
                here = (table.replica == replica) & (table.rank == rank)
                recorded = np.flatnonzero(here & ends & (letters == letter))
                if not len(recorded):
                    continue
                recorded = recorded[np.argsort(start[recorded], kind="stable")]
                computed = np.flatnonzero(here & np.isin(letters, same) & table.is_scope(Scope.COMPUTE))
                computed = computed[np.argsort(start[computed], kind="stable")]
                needing = [op for op in computed.tolist() if op in place]
                if (table.microbatch[recorded] != NONE).all() and (table.stage[recorded] != NONE).all():
                    by_name = {(int(table.stage[op]), int(table.microbatch[op])): op for op in recorded.tolist()}
                    for op in needing:
                        found[place[op]] = by_name.get((int(table.stage[op]), int(table.microbatch[op])), NONE)
                    continue
                if len(recorded) == len(computed):  # also what goes nowhere was recorded
                    pairs = zip(computed.tolist(), recorded.tolist())
                elif len(recorded) == len(needing):
                    pairs = zip(needing, recorded.tolist())
                elif len(recorded) == len(computed) - 1 and scope is Scope.RECEIVE:  # all but the very first
                    pairs = zip(computed.tolist()[1:], recorded.tolist())
                elif len(recorded) == len(computed) - 1:
                    pairs = zip(computed.tolist()[:-1], recorded.tolist())
                else:
                    raise TraceError(
                        f"{table.trace.name}: replica {replica}, rank {rank} has {len(recorded)} of "
                        f"{table.trace.kinds[int(table.kind[recorded[0]])].name}, and {len(needing)} ops that need "
                        "one; are ops missing? Record whole steps, or leave sends and receives out altogether"
                    )
                for op, end in pairs:
                    if op in place:
                        found[place[op]] = end
    return found


def _posted(table: StepTable, consumer: Array, receive: Array) -> Array:
    """The op after which each message's receiver waits for it: the one before it of its kind."""
    letters = table.letters()
    start = table.start[0]
    compute = np.flatnonzero(table.is_scope(Scope.COMPUTE))
    order = compute[np.argsort(start[compute], kind="stable")]
    before: dict[tuple[int, int, bool], int] = {}
    previous = np.full(table.num_ops, NONE)
    for op in order.tolist():
        key = int(table.replica[op]), int(table.rank[op]), bool(letters[op] == "F")
        if letters[op] in ("F", *BACKWARDS):
            previous[op] = before.get(key, NONE)
            before[key] = op
    return np.where(receive == NONE, NONE, previous[consumer])


def free_at(table: StepTable) -> Array:
    """When the rank of each compute op had ended the one before, (K, M); 0 for others, and for the first."""
    free = np.zeros(table.start.shape)
    worker = table.replica * table.trace.num_ranks + table.rank
    compute = np.flatnonzero(table.is_scope(Scope.COMPUTE))
    shared = groups(table)
    for step, (start, end) in enumerate(zip(table.start, table.end)):
        order = compute[np.lexsort((start[compute], worker[compute]))]
        same = worker[order][1:] == worker[order][:-1]
        free[step, order[1:][same]] = end[order[:-1][same]]
        for number in np.unique(shared[compute][shared[compute] != NONE]).tolist():
            free[step, shared == number] = free[step, shared == number].max()  # it waits for all members
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
