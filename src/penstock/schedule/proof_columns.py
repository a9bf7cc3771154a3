"""The rules of `check`, asked of all ops of a schedule at once, over its columns.

Each function says whether a rule holds. Where one does not, `check` goes through the ops one by one and says where.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.engine.memory import peaks
from penstock.engine.network import OpGraph
from penstock.engine.sweep import Timer
from penstock.schedule.columns import NOTHING, B, Columns, F, I, OpNumbers, R, W
from penstock.schedule.microbatch_order import places_of
from penstock.schedule.schedule import Schedule

CHAINS = ((F,), (B, I), (B, W), (R,))
"""Kinds whose ops come in one order of microbatches; see `check_order`."""


def one_of_each(schedule: Schedule, columns: Columns) -> list[tuple[int, int]] | None:
    """(rank, step) of one op of each kind, stage and pipeline on each rank, all of whose ops are placed alike; None
    where an op is out of range.
    """
    if columns.num_ops == 0:
        return []
    stage, microbatch = columns.stage, columns.microbatch
    if not (stage.min() >= 0 and stage.max() < schedule.num_stages):
        return None
    if not (microbatch.min() >= 0 and microbatch.max() < schedule.num_microbatches):
        return None
    pipelines = schedule.placement.num_pipelines
    alike = columns.rank * schedule.num_stages + stage
    if pipelines > 1:
        alike = alike * pipelines + np.array(schedule.microbatch_pipeline)[microbatch]
    ops = np.unique(alike, return_index=True)[1]
    ranks = columns.rank[ops]
    return list(zip(ranks.tolist(), (ops - columns.first[ranks]).tolist(), strict=True))


def are_covered(found: OpNumbers) -> bool:
    """Whether each stage has for each microbatch one F, and one B, or one I with one W."""
    there = found.op != NOTHING
    return bool(there[F].all() and (there[B] ^ there[I]).all() and (there[I] == there[W]).all())


def are_in_local_order(columns: Columns, edges: tuple[Any, Any]) -> bool:
    """Whether no op comes before what it needs on its own rank."""
    producer, consumer = edges
    return not np.any((producer > consumer) & (columns.rank[producer] == columns.rank[consumer]))


def are_in_microbatch_order(schedule: Schedule, found: OpNumbers) -> bool:
    """Whether every queue runs its microbatches in the order declared, or ascending."""
    places = None
    if schedule.microbatch_orders:
        places = np.tile(np.arange(schedule.num_microbatches), (2, schedule.num_stages, 1))
        for (name, stage, _), order in places_of(schedule.microbatch_orders).items():
            places[0 if name == "F" else 1, stage, list(order)] = list(order.values())
    pipeline_of = np.array(schedule.microbatch_pipeline)
    for chain in CHAINS:
        ops = found.op[chain[0]]
        for kind in chain[1:]:
            ops = np.where(ops == NOTHING, found.op[kind], ops)
        for pipeline in range(schedule.placement.num_pipelines):
            own = np.flatnonzero(pipeline_of == pipeline)
            queues = ops if len(own) == ops.shape[1] else ops[:, own]
            if places is not None:
                place = places[0 if chain == (F,) else 1][:, own]
                queues = np.take_along_axis(queues, np.argsort(place, axis=1, kind="stable"), axis=1)
            if not _ascend(queues):
                return False
    return True


def _ascend(queues: Any) -> bool:
    """Whether the numbers of each row ascend, those that are not there left out."""
    if np.all(queues[:, 1:] > queues[:, :-1]):  # which NOTHING at a row's beginning does not disturb
        return True
    row, column = np.nonzero(queues != NOTHING)
    there = queues[row, column]
    return not np.any((row[1:] == row[:-1]) & (there[1:] <= there[:-1]))


def run_to_their_ends(columns: Columns, edges: tuple[Any, Any]) -> bool:
    """Whether the ranks, each in its own order, all reach their last op."""
    graph = OpGraph(columns.first, columns.rank, *edges)
    return Timer(*graph.network()).time(graph.row).complete


def are_within(columns: Columns, limit: float) -> bool:
    """Whether no rank holds more stage activations than the limit, each from its F (or R) to its B or W."""
    added = np.array([1, -1, 0, -1, 1])[columns.kind]
    if np.any(columns.kind == R):
        num = int(columns.microbatch.max()) + 1
        cell = columns.stage * num + columns.microbatch
        added[(columns.kind == F) & np.isin(cell, cell[columns.kind == R])] = 0
    return max(peaks(added, columns.first), default=0) <= limit
