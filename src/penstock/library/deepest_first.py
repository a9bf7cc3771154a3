"""The one rule behind Chimera, Hanayo, BitPipe and vChimera: backwards first, deepest stage first, p in flight.

What tells these schedules apart is where their stages lie. In each, a backward goes before a forward, a stage
nearer to the loss before one further from it, and a W runs when nothing else can. p microbatches are in flight,
an equal share of them in each pipeline, from the F of its first stage to the end of that stage's B or W. So no
rank holds more than p full activations.

The order is the one in which the ops run where each takes a unit of time. With N a multiple of p (other numbers
leave the last round of microbatches partly empty) and X the schedule's own factor, the bubble is

    X (f + (b - f) N/p)    with whole backwards and b >= f: X at F = B, and at B = 2F X more for each round
    X/2                    with split backwards and f = i = w = 1
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Literal, get_args

from penstock.schedule import Op, Placement, Schedule, ScheduleError

Backward = Literal["whole", "split"]


def deepest_first(name: str, placement: Placement, num_microbatches: int, backward: Backward) -> Schedule:
    """The schedule by this rule; microbatch m goes to pipeline m mod the number of pipelines.

    Raises:
        ScheduleError: `backward` is neither "whole" nor "split".
    """
    if backward not in get_args(Backward):
        raise ScheduleError(f"{name}: backward is {backward!r}; give 'whole' or 'split'", rule="options")
    pipelines, num_stages = placement.pipelines, placement.num_stages
    num_ranks, num_pipelines = max(pipelines[0]) + 1, placement.num_pipelines
    split = backward == "split"
    rows: list[list[Op]] = [[] for _ in range(num_ranks)]
    ready: list[list[tuple[str, int, int, Op]]] = [[] for _ in range(num_ranks)]
    turn = count()

    def put(op: Op) -> None:
        if op.microbatch < num_microbatches:
            rank = pipelines[op.microbatch % num_pipelines][op.stage]
            heapq.heappush(ready[rank], (_ORDER[op.kind], -op.stage, next(turn), op))

    for m in range(max(num_ranks, num_pipelines)):
        put(Op("F", 0, m))
    while any(ready):
        running = []
        for row, waiting in zip(rows, ready, strict=True):
            if waiting:
                running.append(heapq.heappop(waiting)[-1])
                row.append(running[-1])
        for kind, stage, m in running:
            if kind == "F":
                put(Op("F", stage + 1, m) if stage + 1 < num_stages else Op("I" if split else "B", stage, m))
            elif kind != "W":
                if split:
                    put(Op("W", stage, m))
                if stage:
                    put(Op(kind, stage - 1, m))
            if stage == 0 and kind in ("B", "W"):
                put(Op("F", 0, m + num_ranks))
    pipeline_of = tuple(m % num_pipelines for m in range(num_microbatches))
    return Schedule(name, placement, tuple(map(tuple, rows)), pipeline_of)


_ORDER = {"B": "backward", "I": "backward", "F": "forward", "W": "weights"}
"""Kinds of op, first to last."""
