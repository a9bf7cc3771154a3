"""Activations held: what each op changes, what a frozen order needs at most, and the caps of a dynamic run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.cost import Costs
from penstock.dispatch import Graph
from penstock.schedule import ScheduleError


def memory_changes(graph: Graph, costs: Costs) -> list[float]:
    """Per op number, what it adds to or takes from the activations its rank holds."""
    again = {(op.stage, op.microbatch) for op in graph.ops if op.kind == "R"}
    table = {key: costs.memory_change(*key) for key in {(op.kind, op.stage) for op in graph.ops}}
    changes = [table[op.kind, op.stage] for op in graph.ops]
    if again:
        for number, op in enumerate(graph.ops):
            if op.kind == "F" and (op.stage, op.microbatch) in again:
                changes[number] -= costs.memory_change("R", op.stage)
    return changes


def frozen_peaks(graph: Graph, change: Sequence[float]) -> list[float]:
    """Most activations each rank holds when it follows its frozen order; timing has no part in it."""
    peaks = []
    for rank in range(graph.num_ranks):
        held = peak = 0.0
        for op in range(graph.first[rank], graph.first[rank + 1]):
            held += change[op]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def frozen_caps(
    graph: Graph, change: Sequence[float], max_held: float | Sequence[float] | None = None
) -> list[float]:
    """The caps of a dynamic run: the frozen peaks, or what the user gave if the frozen order fits in it."""
    peaks = frozen_peaks(graph, change)
    if max_held is None:
        return peaks
    try:
        single = isinstance(max_held, int | float)
        caps = [float(max_held)] * graph.num_ranks if single else list(map(float, max_held))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ScheduleError(
            f"max_held is {max_held!r}: give a number of activations, or one a rank", rule="memory"
        ) from None
    if len(caps) != graph.num_ranks:
        raise ScheduleError(
            f"max_held has {len(caps)} entries, one a rank is needed: {graph.num_ranks}", rule="memory"
        )
    for rank, (cap, peak) in enumerate(zip(caps, peaks, strict=True)):
        if math.isnan(cap) or cap < peak * (1 - 1e-9):
            raise ScheduleError(
                f"rank {rank}: the cap is {cap:g} activations, but the schedule's own order needs {peak:g} "
                f"(rule: memory); raise max_held or build the schedule with fewer in flight",
                rule="memory",
                rank=rank,
            )
    return caps
