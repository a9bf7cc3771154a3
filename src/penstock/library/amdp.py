"""AMDP: asynchronous multi-directional pipelines (paper under review, sections 3.1 and 3.2).

As in PipeDream the pipelines never flush, but each lets only two microbatches in before its first backward, so
that a microbatch meets at most one update between its F and its B. One such pipeline keeps a rank busy 2/d of the
time; d/2 of them, laid over the ranks in both directions, fill each other's bubbles.
"""

from __future__ import annotations

import heapq
from math import isfinite

from penstock.library.options import whole_multiple
from penstock.program.placements import multi_directional
from penstock.schedule import Op, Schedule, ScheduleError

_READ_AHEAD = 2
"""Microbatches that stage 0 of a pipeline reads before its first backward: the paper's n."""


def amdp(num_ranks: int, num_microbatches: int, f: float = 1.0, b: float = 2.0) -> Schedule:
    """d ranks, d/2 pipelines, microbatch m on pipeline m mod d/2, in blocks of d microbatches.

    Stage i of an even pipeline j lies on rank (2j + i) mod d, of an odd one on rank (2j - i + d + 1) mod d.
    Four ranks, six microbatches:

        rank 0 | 0F0 0F2 0F4 3F1 3B1 3F3 3B3 .   0B0 .   0B2 ...
        rank 1 | .   1F0 2F1 1F2 2F3 1F4 2B1 1B0 2B3 1B2 2F5 ...
        rank 2 | .   1F1 2F0 1F3 2F2 1F5 2B0 1B1 2B2 1B3 2F4 ...
        rank 3 | 0F1 0F3 0F5 3F0 3B0 3F2 3B2 .   0B1 .   0B3 ...

    Where two pipelines want one rank, the earlier block goes first, and within it the op that was ready first.
    At the boundary of two blocks stage 0 reads floor(b/f) microbatches more, so that forwards of the next block
    fill the bubbles at the end of this one and at its own beginning.

    Ranks are busy 0.99 of the time at d = 4, 8, 12, 16 over 40 blocks with b = 2f; 0.85 without the reads ahead.
    So "d/2 pipelines fully eliminate bubbles" (section 3.2) holds for b = f and d a multiple of 4, by this order of
    blocks; first in, first out over all blocks alike, as the paper has it, already leaves bubbles at d = 8. Where
    d/2 is odd, one direction has a pipeline more and about 0.9 is reached. Peak d + 1 activations at b = f and d a
    multiple of 4, up to half as many again at b = 2f. The updates, once a window of at least d microbatches, are
    not present in the order.

    Args:
        f, b: times of a stage's F and B; their ratio shapes the order.
    """
    whole_multiple("amdp", "ranks", num_ranks, "that each pipeline takes", 2)
    for name, time in (("f", f), ("b", b)):
        if not (isinstance(time, int | float) and isfinite(time) and time > 0):
            raise ScheduleError(f"amdp: {name} is {time!r}; give a time above 0", rule="options")
    placement = multi_directional(num_ranks)
    rows = _first_in_first_out(placement.pipelines, num_microbatches, {"F": f, "B": b})
    pipeline_of = tuple(m % placement.num_pipelines for m in range(num_microbatches))
    return Schedule("amdp", placement, tuple(map(tuple, rows)), pipeline_of)


def _first_in_first_out(
    pipelines: tuple[tuple[int, ...], ...], num_microbatches: int, duration: dict[str, float]
) -> list[list[Op]]:
    """The order in which the ranks run all ops, from event to event."""
    num_ranks, num_pipelines = len(pipelines[0]), len(pipelines)
    in_flight = _READ_AHEAD + int(duration["B"] // duration["F"])
    rows: list[list[Op]] = [[] for _ in range(num_ranks)]
    ready: list[list[tuple[int, float, int, Op]]] = [[] for _ in range(num_ranks)]
    running: list[tuple[float, int, Op]] = []
    idle = set(range(num_ranks))

    def put(op: Op, now: float) -> None:
        m = op.microbatch
        if m < num_microbatches:
            heapq.heappush(ready[pipelines[m % num_pipelines][op.stage]], (m // num_ranks, now, m, op))

    for m in range(in_flight * num_pipelines):
        put(Op("F", 0, m), 0.0)
    now = 0.0
    while True:
        for rank in sorted(r for r in idle if ready[r]):
            op = heapq.heappop(ready[rank])[-1]
            rows[rank].append(op)
            heapq.heappush(running, (now + duration[op.kind], rank, op))
            idle.remove(rank)
        if not running:
            return rows
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, (kind, stage, m) = heapq.heappop(running)
            idle.add(rank)
            if kind == "F":
                put(Op("F", stage + 1, m) if stage + 1 < num_ranks else Op("B", stage, m), now)
            else:
                put(Op("B", stage - 1, m) if stage else Op("F", 0, m + in_flight * num_pipelines), now)
