"""Looped breadth-first (Lamy-Poirier 2023): several stages per rank, each stage's microbatches all at once."""

from __future__ import annotations

from penstock.library.options import whole_multiple
from penstock.schedule import Op, Schedule, circular


def looped_bfs(num_ranks: int, num_microbatches: int, num_stages: int | None = None) -> Schedule:
    """All forwards of a rank's first stage, then of its next, then the backwards, last stage first.

    Two ranks, four stages (`2F0` is stage 2), three microbatches:

        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B0 2B1 2B2 0B0 0B1 0B2
        rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2

    The bubble is `interleaved-1f1b`'s, (p - 1)(f + b)/v in full-stage times, where N is at least p; with fewer
    microbatches every turn but one leaves p - N more. A rank holds all N activations of each of its stages: what
    that buys is that a stage's weights are used, and with sharded data parallelism fetched, once each way.

    Args:
        num_stages: over the whole model, v * num_ranks; two a rank by default.
    """
    num_stages = 2 * num_ranks if num_stages is None else num_stages
    whole_multiple("looped-bfs", "stages", num_stages, "ranks", num_ranks)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        row = [Op("F", stage, m) for stage in stages for m in range(num_microbatches)]
        row += [Op("B", stage, m) for stage in reversed(stages) for m in range(num_microbatches)]
        rows.append(row)
    return Schedule.of("looped-bfs", circular(num_ranks, num_stages), rows, num_microbatches)
