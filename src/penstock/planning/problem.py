"""A planning problem as plain arrays: what runs where, how long it takes, what waits for what, and what may be held.

Within one stage each kind of op runs in microbatch order. That loses nothing, by an exchange argument: two ops of
a kind that run out of order can swap places without delaying any other. So a rank's order is a sequence of queues,
and an op is (queue, number within the queue):

    queue    0 1 2 | 3 4 5        F I W of stage 0 | F I W of stage 1
    row of rank 0 | 0 0 1 2 0 1 2 1 2        that is F0 F1 I0 W0 F2 I1 W1 I2 W2

A queue waits for at most two others, one op for the op of the same number: a message from a neighbouring stage and
the op before it on its own. Time can be turned round: the same arrays, with before and after exchanged, pose the
problem of running everything backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.cost import Costs, Links
from penstock.schedule import Op, Placement, Schedule

Array = Any
"""A numpy array."""

NONE = -1
FORWARD_CLASS, BACKWARD_CLASS, WEIGHT_CLASS = 1, 0, 2


class Queues(NamedTuple):
    """The arrays that compiled functions take. Q queues over R ranks, n ops.

    Attributes:
        rank, pipeline: of each queue.
        rank_first: rank r has queues `rank_first[r]` to `rank_first[r + 1] - 1`.
        size: ops of each queue.
        op_first: queue q has ops `op_first[q]` to `op_first[q + 1] - 1`.
        row_first: rank r has places `row_first[r]` to `row_first[r + 1] - 1` in a row of all ranks' orders.
        duration: ms of each queue's ops.
        memory: what an op adds to (at its start) or takes from (at its end) what its rank holds.
        message_from, delay: the queue on another stage whose op it needs, and ms until that op's message is there.
        local_from: the queue on its own stage whose op it needs.
        message_to, local_to: the same seen from the other side; `delay_to` is the delay towards `message_to`.
        cap: most that each rank may hold.
        release, tail: ms before a rank may start, and ms that count after its last op: 0 but where the span matters.
    """

    rank: Array
    pipeline: Array
    rank_first: Array
    size: Array
    op_first: Array
    row_first: Array
    duration: Array
    memory: Array
    message_from: Array
    delay: Array
    local_from: Array
    message_to: Array
    delay_to: Array
    local_to: Array
    cap: Array
    release: Array
    tail: Array

    @property
    def num_ranks(self) -> int:
        return len(self.cap)

    @property
    def num_ops(self) -> int:
        return int(self.op_first[-1])

    def turned(self) -> Queues:
        """The problem with time turned round: op j of a queue is its op size - 1 - j; what freed memory takes it."""
        return self._replace(
            memory=-self.memory,
            message_from=self.message_to,
            delay=self.delay_to,
            local_from=self.local_to,
            message_to=self.message_from,
            delay_to=self.delay,
            local_to=self.local_from,
            release=self.tail,
            tail=self.release,
        )

    def with_delays(self, delay: Array, delay_to: Array) -> Queues:
        return self._replace(delay=delay, delay_to=delay_to)


@dataclass(frozen=True)
class Problem:
    """A planning problem: its arrays, and what they stand for.

    Attributes:
        queues: the arrays.
        kind, stage: of each queue.
        placement, microbatch_pipeline: as in the schedule to be made.
    """

    queues: Queues
    kind: tuple[str, ...]
    stage: tuple[int, ...]
    placement: Placement
    microbatch_pipeline: tuple[int, ...]

    @property
    def priority_class(self) -> Array:
        """Backward before forward before weight gradients, as a class of each queue, low first."""
        classes = {"F": FORWARD_CLASS, "I": BACKWARD_CLASS, "B": BACKWARD_CLASS, "W": WEIGHT_CLASS}
        return np.array([classes[kind] for kind in self.kind], np.int64)

    def described(self) -> str:
        """The problem in words, all its numbers given, for a report."""
        queues = self.queues
        ms = "; ".join(
            f"{kind} {[float(d) for d, k in zip(queues.duration, self.kind, strict=True) if k == kind]}"
            for kind in dict.fromkeys(self.kind)
        )
        held = [float(m) for m, kind in zip(queues.memory, self.kind, strict=True) if kind == "F"]
        late = {
            (int(queues.rank[before]), int(queues.rank[q])): float(queues.delay[q])
            for q, before in enumerate(queues.message_from.tolist())
            if before != NONE and queues.delay[q] > 0
        }
        return (
            f"{queues.num_ranks} ranks, {len(self.microbatch_pipeline)} microbatches, placement "
            f"{self.placement.pipelines}, ms of each queue: {ms}; delays {late}, a forward's memory {held}, "
            f"caps {queues.cap.tolist()}, tails {queues.tail.tolist()}"
        )

    def schedule(self, row: Array, name: str, memory_limit: float | None = None) -> Schedule:
        """The schedule whose orders are `row` (queue ids, rank after rank)."""
        queues = self.queues
        microbatches: dict[int, list[int]] = {}
        for microbatch, pipeline in enumerate(self.microbatch_pipeline):
            microbatches.setdefault(pipeline, []).append(microbatch)
        ops = [
            iter([Op(kind, stage, m) for m in microbatches.get(int(pipeline), [])])
            for kind, stage, pipeline in zip(self.kind, self.stage, queues.pipeline, strict=True)
        ]
        places = row.tolist()
        rows = tuple(
            tuple([next(ops[q]) for q in places[queues.row_first[r] : queues.row_first[r + 1]]])
            for r in range(queues.num_ranks)
        )
        return Schedule(name, self.placement, rows, self.microbatch_pipeline, memory_limit)

    def row(self, schedule: Schedule) -> Array:
        """The other way: a schedule of this placement as queue ids."""
        queue = {
            (kind, stage, int(pipeline)): q
            for q, (kind, stage, pipeline) in enumerate(zip(self.kind, self.stage, self.queues.pipeline, strict=True))
        }
        pipelines = schedule.microbatch_pipeline
        return np.array(
            [queue[op.kind, op.stage, pipelines[op.microbatch]] for row in schedule.order for op in row], np.int64
        )


def pose(
    costs: Costs,
    placement: Placement,
    num_ranks: int,
    num_microbatches: int,
    links: Links,
    memory: Sequence[Sequence[float]],
    cap: Sequence[float],
    split: bool,
) -> Problem:
    """Lays out the arrays.

    Args:
        memory: per stage, what F holds and the share of it that I frees.
        cap: per rank.
        split: whether the backward is I and W, or one B.
    """
    num_pipelines, num_stages = placement.num_pipelines, placement.num_stages
    kinds = "FIW" if split else "FB"
    back = kinds[1]
    pipeline_of = tuple(m % num_pipelines for m in range(num_microbatches))
    keys: list[tuple[int, int, int, str]] = []
    for pipeline, hosts in enumerate(placement.pipelines):
        for stage, host in enumerate(hosts):
            keys += [(host, pipeline, stage, kind) for kind in kinds]
    keys.sort(key=lambda key: key[:3])
    number = {key[1:]: q for q, key in enumerate(keys)}
    num_queues = len(keys)
    rank = np.array([key[0] for key in keys], np.int64)
    count = np.array([pipeline_of.count(key[1]) for key in keys], np.int64)
    ints = {
        name: np.full(num_queues, NONE, np.int64) for name in ("message_from", "local_from", "message_to", "local_to")
    }
    floats = {name: np.zeros(num_queues) for name in ("duration", "memory", "delay", "delay_to")}

    def joined(q: int, before: int, name: str) -> None:
        ints[f"{name}_from"][q], ints[f"{name}_to"][before] = before, q
        if name == "message" and rank[q] != rank[before]:
            floats["delay"][q] = floats["delay_to"][before] = links.delay(int(rank[before]), int(rank[q]))

    for q, (_, pipeline, stage, kind) in enumerate(keys):
        held, share = memory[stage]
        floats["duration"][q] = costs.duration(kind, stage)
        floats["memory"][q] = {"F": held, "I": -share * held, "W": (share - 1.0) * held, "B": -held}[kind]
        if kind == "F" and stage > 0:
            joined(q, number[pipeline, stage - 1, "F"], "message")
        if kind == back:
            joined(q, number[pipeline, stage, "F"], "local")
            if stage + 1 < num_stages:
                joined(q, number[pipeline, stage + 1, back], "message")
        if kind == "W":
            joined(q, number[pipeline, stage, "I"], "local")
    rank_first = np.searchsorted(rank, np.arange(num_ranks + 1)).astype(np.int64)
    op_first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    queues = Queues(
        rank=rank,
        pipeline=np.array([key[1] for key in keys], np.int64),
        rank_first=rank_first,
        size=count,
        op_first=op_first,
        row_first=op_first[rank_first],
        cap=np.array(cap, np.float64),
        release=np.zeros(num_ranks),
        tail=np.zeros(num_ranks),
        **ints,
        **floats,
    )
    return Problem(queues, tuple(key[3] for key in keys), tuple(key[2] for key in keys), placement, pipeline_of)
