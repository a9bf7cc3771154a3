"""A planning problem as plain arrays: what runs where, how long it takes, what waits for what, and what may be held.

The arrays are a `Network` of the engine. A queue of it waits for at most two others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.cost import Costs, Links
from penstock.engine.arrays import Flags, FloatRows, Floats, IntRows, Ints
from penstock.engine.memory import peaks
from penstock.engine.network import NONE, Array, Network
from penstock.engine.tolerance import is_within
from penstock.planning.options import dealt, in_turn
from penstock.schedule import Placement, Schedule
from penstock.schedule.columns import KINDS, Columns

F, R, I, W, O, L = 0, 1, 2, 3, 4, 5
"""Kinds of ops. O, an offload, and L, its reload, run beside the others on the stream of their rank."""
WHOLE = 6
"""The column of `ChainForms.times` with the length of a B."""

_NUMBER_OF = {"F": F, "I": I, "B": I, "W": W}
"""By kind, its number in the rows of a walk."""
FORWARD_CLASS, BACKWARD_CLASS, WEIGHT_CLASS = 1, 0, 2


@dataclass(frozen=True)
class Problem:
    """A planning problem: its arrays, and what they stand for.

    Attributes:
        queues: the arrays.
        kind, stage: of each queue.
        placement, microbatch_pipeline: as in the schedule to be made.
    """

    queues: Network
    kind: tuple[str, ...]
    stage: tuple[int, ...]
    placement: Placement
    microbatch_pipeline: tuple[int, ...]

    @property
    def num_ops(self) -> int:
        return self.queues.num_ops

    @property
    def priority_class(self) -> Array:
        """Backward before forward before weight gradients, as a class of each queue, low first."""
        classes = {"F": FORWARD_CLASS, "I": BACKWARD_CLASS, "B": BACKWARD_CLASS, "W": WEIGHT_CLASS}
        return np.array([classes[kind] for kind in self.kind], np.int64)

    @cached_property
    def number(self) -> dict[tuple[str, int, int], int]:
        """Which queue a (kind, stage, pipeline) has."""
        keys = zip(self.kind, self.stage, self.queues.pipeline.tolist(), strict=True)
        return {key: q for q, key in enumerate(keys)}

    @cached_property
    def hosts_several(self) -> bool:
        """Whether a rank hosts several stages, of one pipeline or of several."""
        takers = self.queues.rank[self.queues.memory > 0]
        return len(takers) > len(np.unique(takers))

    def numbers(self, row: Array) -> Array:
        """Of each place of orders, which op of its queue runs there."""
        by_queue = np.argsort(row, kind="stable")
        number = np.empty(len(row), np.int64)
        number[by_queue] = np.arange(len(row)) - self.queues.op_first[row[by_queue]]
        return number

    @cached_property
    def queue_of(self) -> Array:
        """The queue of each op."""
        return np.repeat(np.arange(len(self.queues.rank)), self.queues.size)

    @cached_property
    def number_of(self) -> Array:
        """The number of each op in its queue."""
        return np.arange(self.num_ops) - self.queues.op_first[self.queue_of]

    def schedule(self, row: Array, name: str, max_in_flight: float | None = None) -> Schedule:
        """The schedule whose orders are `row` (queue ids, rank after rank)."""
        queues, number = self.queues, self.numbers(row)
        pipeline = np.array(self.microbatch_pipeline, np.int64)
        dealt_to = np.argsort(pipeline, kind="stable")  # the microbatches of one pipeline after those of another
        begins = np.searchsorted(pipeline[dealt_to], np.arange(self.placement.num_pipelines))
        columns = Columns(
            np.array([KINDS.index(kind) for kind in self.kind], np.int64)[row],
            np.array(self.stage, np.int64)[row],
            dealt_to[begins[queues.pipeline[row]] + number],
            np.repeat(np.arange(queues.num_ranks), np.diff(queues.row_first)),
            queues.row_first,
        )
        return Schedule.of_columns(name, self.placement, columns, self.microbatch_pipeline, max_in_flight)

    def row(self, schedule: Schedule) -> Array | None:
        """The other way: a schedule as queue ids, each B as I and its W behind it where the problem has those.

        None where it does not solve the problem.
        """
        if schedule.microbatch_pipeline != self.microbatch_pipeline:
            return None
        kinds, queue, pipelines = set(self.kind), self.number, schedule.microbatch_pipeline
        halves = {"B": "IW"} if "W" in kinds else {}
        ops = [op for row in schedule.order for op in row]
        if not {op.kind for op in ops} <= kinds | set(halves):
            return None
        return np.array(
            [queue[kind, stage, pipelines[m]] for each, stage, m in ops for kind in halves.get(each, each)], np.int64
        )

    def row_of_starts(self, start: Array) -> Array:
        """The orders in which ops start at some moments (one per op); those that start together in queue order."""
        queue_of = self.queue_of
        found: Array = queue_of[np.lexsort((queue_of, self.number_of, start, self.queues.rank[queue_of]))]
        return found


def fits(problem: Problem, row: Array) -> bool:
    """Whether fixed orders (queue ids, rank after rank) keep every rank within its cap."""
    queues = problem.queues
    return all(map(is_within, peaks(queues.memory[row], queues.row_first), queues.cap.tolist()))


def pose(
    costs: Costs,
    placement: Placement,
    num_ranks: int,
    num_microbatches: int,
    links: Links,
    memory: Sequence[Sequence[float]],
    cap: Sequence[float],
    split: bool,
    deal: Sequence[int] | None = None,
) -> Problem:
    """Lays out the arrays.

    Args:
        memory: per stage, what F holds and the share of it that I frees.
        cap: per rank.
        split: whether the backward is I and W, or one B.
        deal: how many microbatches each pipeline has; dealt in turn where not given.
    """
    num_pipelines, num_stages = placement.num_pipelines, placement.num_stages
    kinds = "FIW" if split else "FB"
    back = kinds[1]
    pipeline_of = dealt(in_turn(num_microbatches, num_pipelines) if deal is None else deal)
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
    queues = Network(
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


class ChainForms(NamedTuple):
    """The forms that the microbatches of each chain may take, and what ops take in each of them.

    Attributes:
        times: ms of F, R, I, W, O, L and B.
        held, kept, freed: what F holds, what it holds where R runs, and the share of it that I frees.
        may_again, may_whole, may_split, may_away: whether a forward may run again, whether a backward may be a B, or
            I and W, and whether what F holds may go to host memory.
        is_open: whether any op of any chain may take another form.
    """

    times: FloatRows
    held: Floats
    kept: Floats
    freed: Floats
    may_again: Flags
    may_whole: Flags
    may_split: Flags
    may_away: Flags
    is_open: bool


class Ops(NamedTuple):
    """What is given. C chains over K ranks, n ops, M cells: a chain and one of its microbatches.

    Attributes:
        chain, kind, number, cell, rank: of each op; `number` counts the chain's microbatches.
        message_from, delay: the op on another stage that an op needs, or -1, and ms until its message is there.
        message_to: the same seen from the other side.
        first, size, cell_first: of each chain, its first op, its microbatches, its first cell.
        chain_rank, chain_first: of each chain; rank r has chains `chain_first[r]` to `chain_first[r + 1] - 1`.
        forms: the forms that each chain's microbatches may take, with their times.
        cap, host: most that each rank may hold, and have in host memory.
        tail: ms that count after each rank's last op.
        num_kinds: how many ops a microbatch of a chain has at most.
    """

    chain: Ints
    kind: Ints
    number: Ints
    cell: Ints
    rank: Ints
    message_from: Ints
    delay: Floats
    message_to: Ints
    first: Ints
    size: Ints
    cell_first: Ints
    chain_rank: Ints
    chain_first: Ints
    forms: ChainForms
    cap: Floats
    host: Floats
    tail: Floats
    num_kinds: int


class Orders(NamedTuple):
    """What is decided, and what follows from it.

    Attributes:
        row: of each rank, its ops in their order; `length` says how many there are.
        again, whole, away: of each cell.
        duration, change: of each op in its form: ms, and what it adds (at its start) to what its rank holds, or
            takes (at its end).
        place: of each op, where it stands in its row; -1 where it is not there.
        wait: of each op, that of its rank's stream whose end it waits for, or -1.
        level: of each op, what its rank holds before it.
    """

    row: IntRows
    length: Ints
    again: Flags
    whole: Flags
    away: Flags
    duration: Floats
    change: Floats
    place: Ints
    wait: Ints
    level: Floats

    @classmethod
    def of(cls, ops: Ops) -> Orders:
        """Room for orders, with nothing in it."""
        num_ops, num_ranks, cells = len(ops.chain), len(ops.cap), int(ops.size.sum())
        again, whole, away = np.zeros((3, cells), np.bool_)
        duration, change, level = np.zeros((3, num_ops))
        place, wait = np.full((2, num_ops), -1, np.int64)
        row = np.full((num_ranks, int(np.bincount(ops.rank, minlength=num_ranks).max(initial=1))), -1, np.int64)
        return cls(row, np.zeros(num_ranks, np.int64), again, whole, away, duration, change, place, wait, level)


def walk_first(problem: Problem, chain_first: Array) -> Array:
    """Of each queue, its first op as a walk numbers them, given the first op of each chain."""
    kind = np.array([_NUMBER_OF[kind] for kind in problem.kind], np.int64)
    found: Array = np.repeat(chain_first, len(set(problem.kind))) + kind * problem.queues.size
    return found


def walk_ops(problem: Problem, num_kinds: int = W + 1) -> Ops:
    """The ops as a walk takes them: each in the one form that it has.

    Args:
        num_kinds: of the ops of a chain; there is room for more kinds than those of the problem.
    """
    queues, num_queues = problem.queues, len(set(problem.kind))
    forward = np.arange(0, len(queues.rank), num_queues)
    size, chain_rank = queues.size[forward], queues.rank[forward]
    cell_first = np.cumsum(size) - size
    first_of = walk_first(problem, num_kinds * cell_first)
    num_ops = num_kinds * int(size.sum())
    chain = np.repeat(np.arange(len(forward)), num_kinds * size)
    within = np.arange(num_ops) - first_of[forward][chain]
    kind, number = within // np.maximum(1, size[chain]), within % np.maximum(1, size[chain])
    message_from, message_to = np.full((2, num_ops), NONE, np.int64)
    delay = np.zeros(num_ops)
    for q in np.flatnonzero(queues.message_from != NONE).tolist():
        mine = first_of[q] + np.arange(queues.size[q])
        theirs = first_of[queues.message_from[q]] + np.arange(queues.size[q])
        message_from[mine], message_to[theirs], delay[mine] = theirs, mine, queues.delay[q]
    times = np.zeros((len(forward), WHOLE + 1))
    for q, each in enumerate(problem.kind):
        times[q // num_queues, _NUMBER_OF[each]] = times[q // num_queues, WHOLE] = queues.duration[q]
    held = queues.memory[forward]
    freed = np.divide(-queues.memory[forward + 1], held, out=np.zeros(len(held)), where=held > 0)
    never = np.zeros(len(forward), np.bool_)
    forms = ChainForms(times, held, held, freed, never, never, never, never, is_open=False)
    return Ops(
        chain=chain, kind=kind, number=number, cell=cell_first[chain] + number, rank=chain_rank[chain],
        message_from=message_from, delay=delay, message_to=message_to, first=first_of[forward], size=size,
        cell_first=cell_first, chain_rank=chain_rank,
        chain_first=np.searchsorted(chain_rank, np.arange(queues.num_ranks + 1)), forms=forms, cap=queues.cap,
        host=np.zeros(queues.num_ranks), tail=queues.tail, num_kinds=num_kinds,
    )  # fmt: skip
