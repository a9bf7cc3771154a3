"""The tables that `list_by_rules` works on: a network of queues, and what rules say of its queues, ranks and classes.

All are named tuples of arrays: lists for Python, numpy arrays for C (see `arrays.prepared`). A run changes a
`ListState` alone.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Floats, Ints, prepared
from penstock.engine.min_tree import leaves_for
from penstock.engine.network import Irregularities, Network

FIRST, BACKWARD, FORWARD, WEIGHT, LAST = range(5)
"""Classes of ops, as rules see them: registered kinds come before everything else, or after it."""
NUM_CLASSES = 5
INFINITY = float("inf")


class QueueRules(NamedTuple):
    """What rules count of each queue.

    Attributes:
        op_class: FIRST to LAST.
        memory: what an op adds to what its ranks hold (above 0) or takes away at its end.
        count: the same in forwards in flight: 1 for F, -1 for B or W.
        reserve, reserve_count: room that must stay free on its ranks when an F starts, so that what is deeper in
            the model can still pass: without it two stages of a rank lock each other out under a cap.
        release: of an F queue, the queue that ends its life (B or W), else -1.
        cap: of an F queue, most in flight.
        late: 1 where what an op frees counts from its end, for other rows than its own use the same memory.
    """

    op_class: Ints
    memory: Floats
    count: Floats
    reserve: Floats
    reserve_count: Floats
    release: Ints
    cap: Floats
    late: Ints


class RankRules(NamedTuple):
    """The rules of each row: of a rank, or of the stream of one.

    Attributes:
        own_first, own: row r has the queues `own[own_first[r]:own_first[r + 1]]`.
        holder: the rank whose memory the ops of a row use: itself, or the rank whose stream it is.
        beside: the other row that uses the same memory, -1 where there is none.
        mode: which of backward and forward it prefers.
        strict: 1 where it waits for the kind whose turn it is.
        unit_forward, unit_backward: how many of a kind run at one go.
        cap_memory, cap_count: most memory, most forwards in flight.
        patience: ms before a forward or backward that is known to come in which no weight gradient starts.
        warmup: forwards that run before anything else.
    """

    own_first: Ints
    own: Ints
    holder: Ints
    beside: Ints
    mode: Ints
    strict: Ints
    unit_forward: Ints
    unit_backward: Ints
    cap_memory: Floats
    cap_count: Floats
    patience: Floats
    warmup: Ints


class SlotRules(NamedTuple):
    """The queues of one class on one row, in the order of traversal, at `row * NUM_CLASSES + class`.

    Attributes:
        first, queues: slot s has the queues `queues[first[s]:first[s + 1]]`.
        pick: which of those that are ready.
        interval: how many ops of one queue follow one another (0: no interval).
        hold: 1 where the class waits for that queue.
    """

    first: Ints
    queues: Ints
    pick: Ints
    interval: Ints
    hold: Ints


class Tables(NamedTuple):
    """All that a run reads. The network is one of `of_queues`, whose needs and rows are all in `more`."""

    network: Network
    more: Irregularities
    queues: QueueRules
    ranks: RankRules
    slots: SlotRules


class ListState(NamedTuple):
    """How far a run has got.

    Attributes:
        started: of each queue, ops that have started.
        ready_at: of each queue, when the next op has all it needs (infinite: not known yet).
        refused: of each queue, 1 where the user's check refuses the next op.
        freed: of each queue that is `late`, how many ops have been counted as ended.
        free_at: of each row, when its last op ends.
        memory, in_flight: what each rank holds.
        turn, turn_left: of each row, the class that ran last, backward or forward, and how many of it are still to
            follow.
        warmup_left: of each row, forwards still to run before anything else.
        position, stepped: of each slot, the queue whose interval runs, and how far it has got.
        start_time: of each op, queue by queue (ms).
        rows, filled: the queues that each row has run, from `row_first` of the network on, and how many.
        tree: when each row decides next, in a tree of minima.
    """

    started: Ints
    ready_at: Floats
    refused: Ints
    freed: Ints
    free_at: Floats
    memory: Floats
    in_flight: Floats
    turn: Ints
    turn_left: Ints
    warmup_left: Ints
    position: Ints
    stepped: Ints
    start_time: Floats
    rows: Ints
    filled: Ints
    tree: Floats


def tables_of(
    network: Network, more: Irregularities, queues: QueueRules, num_ranks: int, shares_memory: bool = False
) -> Tables:
    """The tables of a network of lists: backward first, queues of a class in their order, no caps.

    Args:
        num_ranks: rows behind those of the ranks are their streams.
        shares_memory: whether what streams do changes what their ranks hold.
    """
    num_rows = network.num_ranks
    own: list[list[int]] = [[] for _ in range(num_rows)]
    for q in range(len(queues.op_class)):
        for row in more.hosts[more.host_first[q] : more.host_first[q + 1]]:
            own[row].append(q)
    slots = [[q for q in row if queues.op_class[q] == kind] for row in own for kind in range(NUM_CLASSES)]
    none = [0] * num_rows
    ranks = RankRules(
        own_first=list(accumulate(map(len, own), initial=0)),
        own=list(chain.from_iterable(own)),
        holder=[r % num_ranks for r in range(num_rows)],
        beside=[(r + num_ranks) % num_rows if shares_memory else -1 for r in range(num_rows)],
        mode=none,
        strict=none,
        unit_forward=[1] * num_rows,
        unit_backward=[1] * num_rows,
        cap_memory=[INFINITY] * num_rows,
        cap_count=[INFINITY] * num_rows,
        patience=[0.0] * num_rows,
        warmup=none,
    )
    first, zeros = list(accumulate(map(len, slots), initial=0)), [0] * len(slots)
    return Tables(
        network, more, queues, ranks, SlotRules(first, list(chain.from_iterable(slots)), zeros, zeros, zeros)
    )


def new_state(tables: Tables, as_c: bool) -> ListState:
    """The state of a run that has not begun; see `list_by_rules.prepare`."""
    network, num_queues, num_rows = tables.network, len(tables.queues.op_class), tables.network.num_ranks
    num_slots = len(tables.slots.pick)
    state = ListState(
        started=np.zeros(num_queues),
        ready_at=np.zeros(num_queues),
        refused=np.zeros(num_queues),
        freed=np.zeros(num_queues),
        free_at=np.zeros(num_rows),
        memory=np.zeros(num_rows),
        in_flight=np.zeros(num_rows),
        turn=np.full(num_rows, BACKWARD),
        turn_left=np.zeros(num_rows),
        warmup_left=np.array(tables.ranks.warmup, np.int64),
        position=np.zeros(num_slots),
        stepped=np.zeros(num_slots),
        start_time=np.zeros(network.num_ops),
        rows=np.zeros(network.row_first[-1], np.int64),
        filled=np.zeros(num_rows),
        tree=np.full(2 * leaves_for(num_rows), INFINITY),
    )
    return prepared(state, as_c)
