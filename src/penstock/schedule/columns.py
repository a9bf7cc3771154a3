"""A schedule's ops as columns of numbers, for what goes through all of them: proofs, lowering, timing.

    order    rank 0 | F0 F1 I0 W0          rank 1 | F0 I0 W0
    kind              0  0  2  3                    0  2  3
    stage             0  0  0  0                    1  1  1
    microbatch        0  1  0  0                    0  0  0
    first    0, 4, 7

Only plain ops have columns: F, B, I, W and R, each on one rank, of stages that all have the schedule's microbatches.
For schedules with other ops (messages, updates, pairs, registered and shared ones) there are none, and their ops are
gone through one by one.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.schedule.op import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT, Op

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule

Array = Any
"""A numpy array of whole numbers."""

KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE)
F, B, I, W, R = range(5)
NOTHING = -1
_CODES = {kind: code for code, kind in enumerate(KINDS)}


class Columns(NamedTuple):
    """A schedule as arrays: one entry for each op, ordered by rank.

    Attributes:
        kind: of each op its number in `KINDS`. stage, microbatch, rank: of each op.
        first: rank r has ops `first[r]` to `first[r + 1] - 1`, in its order.
    """

    kind: Array
    stage: Array
    microbatch: Array
    rank: Array
    first: Array

    @property
    def num_ops(self) -> int:
        return len(self.kind)


class OpNumbers(NamedTuple):
    """The columns of a schedule, with a table that finds an op by its kind, stage and microbatch.

    Attributes:
        columns: of ops that are all there once at most, in stages and microbatches that are there.
        op: `op[kind, stage, microbatch]` is the number of that op; NOTHING where there is none.
    """

    columns: Columns
    op: Array


def columns_of(schedule: Schedule) -> Columns | None:
    """The columns of a schedule; None where it has ops that are not plain."""
    graph = schedule.stage_graph
    if schedule.updates is not None or schedule.placement.shared or schedule.pairs:
        return None
    if graph is not None and (graph.registered or graph.needs or graph.num_microbatches):
        return None
    num_ops = schedule.num_ops
    first = np.zeros(schedule.num_ranks + 1, np.int64)
    np.cumsum([len(row) for row in schedule.order], out=first[1:])
    if num_ops == 0:
        nothing = np.zeros(0, np.int64)
        return Columns(nothing, nothing, nothing, nothing, first)
    kinds, stages, microbatches = zip(*itertools.chain.from_iterable(schedule.order), strict=True)
    try:
        kind = np.array([_CODES[each] for each in kinds], np.int64)
        stage, microbatch = np.array(stages), np.array(microbatches)
    except (KeyError, TypeError, ValueError):
        return None
    if stage.dtype != np.int64 or microbatch.dtype != np.int64:
        return None
    return Columns(kind, stage, microbatch, np.repeat(np.arange(schedule.num_ranks), np.diff(first)), first)


def rows_of_ops(columns: Columns) -> tuple[tuple[Op, ...], ...]:
    """The other way: the ops of each rank."""
    rows = []
    with gc_paused():  # new objects by the million, none of them garbage
        for begin, end in itertools.pairwise(columns.first.tolist()):
            kinds = [KINDS[code] for code in columns.kind[begin:end].tolist()]
            stages, microbatches = columns.stage[begin:end].tolist(), columns.microbatch[begin:end].tolist()
            rows.append(tuple(map(Op, kinds, stages, microbatches)))
    return tuple(rows)


def op_of(columns: Columns, rank: int, step: int) -> Op:
    """The op at a step of a rank."""
    place = int(columns.first[rank]) + step
    return Op(KINDS[columns.kind[place]], int(columns.stage[place]), int(columns.microbatch[place]))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collects no garbage meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def in_slots(slots: Sequence[tuple[int, Array]]) -> Columns:
    """Columns of one stage per rank from when each op would run, were all ops of a rank alike in length.

    Args:
        slots: (kind, a row for each rank with the slot of each microbatch): ops run in the order of their slots,
            those of one slot in the order in which the kinds are given.
    """
    num_ranks, num_microbatches = slots[0][1].shape
    key = np.concatenate([slot * len(slots) + turn for turn, (_, slot) in enumerate(slots)], axis=1)
    place = np.argsort(key, axis=1, kind="stable").ravel()
    kind = np.array([each for each, _ in slots], np.int64)[place // num_microbatches]
    rank = np.repeat(np.arange(num_ranks), len(slots) * num_microbatches)
    first = np.arange(num_ranks + 1) * (len(slots) * num_microbatches)
    return Columns(kind, rank, place % num_microbatches, rank, first)


def numbered(schedule: Schedule) -> OpNumbers | None:
    """The columns with the number of every op; None where there are none, an op is out of range, or there twice."""
    columns = schedule.columns
    if columns is None:
        return None
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    if columns.num_ops and not (
        columns.stage.min() >= 0
        and columns.stage.max() < num_stages
        and columns.microbatch.min() >= 0
        and columns.microbatch.max() < num_microbatches
    ):
        return None
    op = np.full((len(KINDS), num_stages, num_microbatches), NOTHING, np.int64)
    op[columns.kind, columns.stage, columns.microbatch] = np.arange(columns.num_ops)
    if np.count_nonzero(op != NOTHING) != columns.num_ops:
        return None
    return OpNumbers(columns, op)


def edges_of(found: OpNumbers, targets: tuple[tuple[int, ...], ...]) -> tuple[Array, Array]:
    """(producer, consumer) of everything that ops need, as `dependencies.predecessors` says for one op.

    Args:
        targets: of each stage, those that take its output.

    Returns:
        Two arrays, by consumer and then in the order of `predecessors`. A producer is NOTHING where it is not there.
    """
    op = found.op
    made = np.where(op[R] != NOTHING, op[R], op[F])
    back = np.where(op[B] != NOTHING, op[B], op[I])
    forward: list[tuple[Array, Array]] = []
    backward: list[tuple[Array, Array]] = []
    for a, b in _slices(targets):
        forward.append((op[F, a], op[F, b]))
        backward += [(back[b], op[B, a]), (back[b], op[I, a])]
    pairs = [*forward, (op[F], op[R]), (made, op[B]), (made, op[I]), *backward, (op[I], op[W])]
    producer = np.concatenate([source.ravel() for source, _ in pairs])
    consumer = np.concatenate([target.ravel() for _, target in pairs])
    there = consumer != NOTHING
    producer, consumer = producer[there], consumer[there]
    order = np.argsort(consumer, kind="stable")
    return producer[order], consumer[order]


def _slices(targets: tuple[tuple[int, ...], ...]) -> list[tuple[slice, slice]]:
    """Edges of the stage graph, all of a chain at once: where stages `a` feed stages `b`."""
    num = len(targets)
    if all(each == (stage + 1,) for stage, each in enumerate(targets[:-1])) and not any(targets[-1:]):
        return [(slice(0, num - 1), slice(1, num))]
    return [(slice(a, a + 1), slice(b, b + 1)) for a, each in enumerate(targets) for b in each]


def accumulation_edges(kind: Array, rank: Array, stage: Array) -> tuple[Array, Array]:
    """Edges that keep weight gradients in the order of the row on stages which mix B with I and W.

    B and W then add to the same gradients from different queues, and a sum of floats depends on its order.

    Args:
        kind, rank, stage: of each op, as in `Columns`.
    """
    adding = np.flatnonzero((kind == B) | (kind == W))
    place = rank[adding] * (int(stage.max(initial=0)) + 1) + stage[adding]
    adding = adding[np.argsort(place, kind="stable")]
    place, added = np.sort(place), kind[adding]
    pairs = np.flatnonzero((place[1:] == place[:-1]) & (added[1:] != added[:-1]))
    return adding[pairs], adding[pairs + 1]
