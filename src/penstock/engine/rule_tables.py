"""The tables that `list_by_rules` works on: records by queue, rank, class slot and need, and lists of numbers.

As lists of plain objects they serve uncompiled code (users' own functions, stepping); as numpy records,
compiled code. Both are read alike: `queues[3].started`.

What a network says of a queue is laid out in the queue's record too (`Tables.of`), for speed: compiled functions that
take the arrays of `Network` and `Irregularities` in place of eight of records take twice as long, since every call
hands all of them over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.network import Irregularities, Network

FIRST, BACKWARD, FORWARD, WEIGHT, LAST = range(5)
"""Classes of ops, as rules see them: registered kinds come before everything else, or after it."""
NUM_CLASSES = 5

Records = Any
"""A list of records, or a numpy record array."""
Numbers = Any
"""A list of numbers, or a numpy array."""
INFINITY = float("inf")


@dataclass(slots=True)
class QueueRecord:
    """One queue: what it is, and how far it has got.

    Attributes:
        length: how many ops; duration: ms of one; op_class: FIRST to LAST.
        memory: what an op adds to what its ranks hold (above 0) or takes away at its end.
        count: the same in forwards in flight: 1 for F, -1 for B or W.
        reserve, reserve_count: room that must stay free on its ranks when an F starts, so that what is deeper in
            the model can still pass: without it two stages of a rank lock each other out under a cap.
        release: of an F queue, the queue that ends its life (B or W), else -1; cap: most in flight.
        first_op: where its ops begin when all are laid out queue by queue.
        host_first, host_last: its ranks in `hosts`; need_first, need_last: what it waits for in `needs`;
        unlock_first, unlock_last: who waits for it in `unlocks`.
        started: ops that have started; ready_at: when the next has all it needs (infinite: not known yet).
        refused: 1 where the user's check refuses the next op.
        late: 1 where what an op frees counts from its end, for other rows than its own use the same memory; freed:
            how many of those ops have been counted.
    """

    length: int
    duration: float
    op_class: int
    memory: float
    count: float
    reserve: float
    reserve_count: float
    release: int
    cap: float
    first_op: int
    host_first: int
    host_last: int
    need_first: int
    need_last: int
    unlock_first: int
    unlock_last: int
    started: int = 0
    ready_at: float = INFINITY
    refused: int = 0
    late: int = 0
    freed: int = 0


@dataclass(slots=True)
class NeedRecord:
    """Every `before` ops of `queue` unlock `after` ops of who needs it, `delay` ms after the last one ends.

    By `shift` ops later, or earlier where it is below 0; see `Irregularities`.
    """

    queue: int
    before: int
    after: int
    delay: float
    shift: int = 0


@dataclass(slots=True)
class RankRecord:
    """One rank: its rules, and where it stands.

    Attributes:
        own_first, own_last: its queues in `own`.
        holder: the rank whose memory its ops use: itself, or the rank whose stream it is.
        beside: the other row that uses the same memory, -1 where there is none.
        mode: which of backward and forward it prefers; strict: 1 where it waits for the kind whose turn it is.
        unit_forward, unit_backward: how many of a kind run at one go.
        cap_memory, cap_count: most memory, most forwards in flight.
        patience: ms before a forward or backward that is known to come in which no weight gradient starts.
        warmup_left: forwards still to run before anything else.
        free_at: when its last op ends; wake: when it decides next.
        memory, in_flight: what it holds.
        turn, turn_left: the class that ran last, backward or forward, and how many of it are still to follow.
    """

    own_first: int
    own_last: int
    holder: int
    beside: int = -1
    mode: int = 0
    strict: int = 0
    unit_forward: int = 1
    unit_backward: int = 1
    cap_memory: float = INFINITY
    cap_count: float = INFINITY
    patience: float = 0.0
    warmup_left: int = 0
    free_at: float = 0.0
    wake: float = INFINITY
    memory: float = 0.0
    in_flight: float = 0.0
    turn: int = BACKWARD
    turn_left: int = 0


@dataclass(slots=True)
class SlotRecord:
    """The queues of one class on one rank, in the order of traversal, at `rank * NUM_CLASSES + class`.

    Attributes:
        first, last: in `slot_queues`.
        pick: which of those that are ready; interval: how many ops of one queue follow one another (0: no
            interval); hold: 1 where the class waits for that queue.
        position, stepped: the queue whose interval runs, and how far it has got.
    """

    first: int
    last: int
    pick: int = 0
    interval: int = 0
    hold: int = 0
    position: int = 0
    stepped: int = 0


Queues = Sequence[QueueRecord]
Needs = Sequence[NeedRecord]
Ranks = Sequence[RankRecord]
Slots = Sequence[SlotRecord]


@dataclass(slots=True)
class Tables:
    """All tables of one run. `copy()` before a run: it changes them in place."""

    queues: Records
    ranks: Records
    slots: Records
    slot_queues: Numbers
    hosts: Numbers
    needs: Records
    unlocks: Numbers
    own: Numbers

    @classmethod
    def of(
        cls,
        network: Network,
        more: Irregularities,
        said: Sequence[Mapping[str, Any]],
        num_ranks: int,
        shares_memory: bool = False,
    ) -> Tables:
        """The tables of a network of lists, whose needs and rows are all said in `more`. They have no rules yet.

        Args:
            said: of each queue, what a network does not say and a record has no default for.
            num_ranks: rows behind those of the ranks are their streams.
            shares_memory: whether what streams do changes what their ranks hold.
        """
        num_rows, classes = network.num_ranks, [each["op_class"] for each in said]
        own: list[list[int]] = [[] for _ in range(num_rows)]
        queues = []
        for q, each in enumerate(said):
            hosts = more.hosts[more.host_first[q] : more.host_first[q + 1]]
            for row in hosts:
                own[row].append(q)
            queues.append(
                QueueRecord(
                    length=network.op_first[q + 1] - network.op_first[q],
                    duration=network.duration[q],
                    first_op=network.op_first[q],
                    host_first=more.host_first[q],
                    host_last=more.host_first[q + 1],
                    need_first=more.need_first[q],
                    need_last=more.need_first[q + 1],
                    unlock_first=more.unlock_first[q],
                    unlock_last=more.unlock_first[q + 1],
                    late=int(shares_memory and (each["memory"] < 0 or each["count"] < 0)),
                    **each,
                )
            )
        own_first = list(accumulate(map(len, own), initial=0))
        slots = [[q for q in row if classes[q] == kind] for row in own for kind in range(NUM_CLASSES)]
        slot_first = list(accumulate(map(len, slots), initial=0))
        return cls(
            queues,
            [
                RankRecord(
                    own_first[r],
                    own_first[r + 1],
                    holder=r % num_ranks,
                    beside=(r + num_ranks) % num_rows if shares_memory else -1,
                )
                for r in range(num_rows)
            ],
            [SlotRecord(slot_first[s], slot_first[s + 1]) for s in range(len(slots))],
            list(chain.from_iterable(slots)),
            more.hosts,
            [
                NeedRecord(*each)
                for each in zip(more.need_queue, more.before, more.after, more.need_delay, more.shift, strict=True)
            ],
            more.unlocks,
            list(chain.from_iterable(own)),
        )

    @property
    def num_ops(self) -> int:
        """Ops laid out queue by queue; one that several ranks run together counts once."""
        last = self.queues[len(self.queues) - 1]
        return int(last.first_op + last.length)

    def copy(self) -> Tables:
        """The same tables with records of their own."""
        if isinstance(self.queues, list):
            records = {n: _copied(getattr(self, n)) for n in ("queues", "ranks", "slots")}
        else:
            records = {n: getattr(self, n).copy() for n in ("queues", "ranks", "slots")}
        return Tables(
            **records,
            slot_queues=self.slot_queues,
            hosts=self.hosts,
            needs=self.needs,
            unlocks=self.unlocks,
            own=self.own,
        )

    def as_numpy(self, like: Tables | None = None) -> Tables:
        """The same tables for compiled code.

        `like` may give the numpy form of tables that differ in rules alone, before a run: what is equal is taken
        from it, which is much the faster.
        """
        import numpy as np

        if like is not None:
            queues = like.queues.copy()
            queues["cap"] = [queue.cap for queue in self.queues]
            return Tables(
                queues,
                _record_array(self.ranks, RankRecord),
                _record_array(self.slots, SlotRecord),
                np.asarray(self.slot_queues, np.int64),
                like.hosts,
                like.needs,
                like.unlocks,
                like.own,
            )
        numbers = {n: np.asarray(getattr(self, n), np.int64) for n in ("slot_queues", "hosts", "unlocks", "own")}
        records = {
            "queues": _record_array(self.queues, QueueRecord),
            "ranks": _record_array(self.ranks, RankRecord),
            "slots": _record_array(self.slots, SlotRecord),
            "needs": _record_array(self.needs, NeedRecord),
        }
        return Tables(**numbers, **records)


def _copied(records: list[Any]) -> list[Any]:
    if not records:
        return []
    record: type = type(records[0])
    values = _values(record)
    return [record(*values(each)) for each in records]


@functools.cache
def _values(record: type) -> Callable[[Any], tuple[Any, ...]]:
    """What gives the values of a record, in the order of its fields, in one go: searches copy many."""
    return attrgetter(*record.__dataclass_fields__)  # type: ignore[attr-defined]


@functools.cache
def _dtype(record: type) -> Any:
    import numpy as np

    fields = record.__dataclass_fields__  # type: ignore[attr-defined]
    return np.dtype([(n, np.float64 if f.type == "float" else np.int64) for n, f in fields.items()])


def _record_array(records: list[Any], record: type) -> Any:
    import numpy as np

    return np.array([*map(_values(record), records)], _dtype(record))
