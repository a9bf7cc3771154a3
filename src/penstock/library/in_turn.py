"""Forwards and backwards in turn, synchronously: GPipe, 1F1B, interleaved 1F1B and looped breadth-first.

GPipe (Huang et al. 2019) runs all forwards, then all backwards. 1F1B (PipeDream-Flush, DAPPLE) runs a backward as
early as possible, so that few activations are held. Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM) has several
stages per rank and smaller bubbles; with split backwards it is that of Qi et al. 2023 ("Zero Bubble Pipeline
Parallelism") and torch's InterleavedZeroBubble. Looped breadth-first (Lamy-Poirier 2023) runs each stage's
microbatches all at once.
"""

from __future__ import annotations

import numpy as np

from penstock.library.options import whole_multiple
from penstock.library.two_ways import Backward, check_backward
from penstock.schedule import Op, Schedule, circular, one_to_one
from penstock.schedule.columns import B, Columns, F, I, W, in_slots


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

        rank 0 | F0 F1 F2 .  .  .  .  B0 B1 B2
        rank 1 | .  F0 F1 F2 .  .  B0 B1 B2
        rank 2 | .  .  F0 F1 F2 B0 B1 B2

    Bubble (p - 1)(f + b); peak N activations on every rank.
    """
    m = np.tile(np.arange(num_microbatches), (num_ranks, 1))
    columns = in_slots(((F, m), (B, m + num_microbatches)))
    return Schedule.of_columns("gpipe", one_to_one(num_ranks), columns, (0,) * num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm-up of p - 1 - i forwards on rank i, then one forward and one backward in turn, then the rest.

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

    Bubble (p - 1)(f + b), as GPipe; peak min(p - i, N) activations.
    """
    return in_turn("1f1b", num_ranks, num_microbatches, num_ranks)


def in_turn(name: str, num_ranks: int, num_microbatches: int, in_flight: int) -> Schedule:
    """1F1B whose first stage reads at most `in_flight` microbatches before its first backward, others no more."""
    rank, m = np.arange(num_ranks)[:, None], np.arange(num_microbatches)
    warmup = np.minimum(num_ranks - rank, in_flight) - 1
    columns = in_slots(((F, m - warmup), (B, m + 0 * rank)))
    return Schedule.of_columns(name, one_to_one(num_ranks), columns, (0,) * num_microbatches)


def interleaved(
    num_ranks: int, num_microbatches: int, num_stages: int | None = None, backward: Backward = "whole"
) -> Schedule:
    """1F1B over v stages per rank, stage s on rank s mod p, microbatches in groups of g.

    Two ranks, four stages (`2F0` is stage 2):

        rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 0F3 2B1 2F2 ...
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 ...

    Rank i runs 2(p - 1 - i) + (v - 1)g forwards before its first backward, and holds one stage activation more at
    most. Bubble (p - 1)(f + b)/v in full-stage times, and (v - 1)(p - N)(f + b)/v more with N below p.

    Where p divides N, g is p. Other N make groups as even as they go, the larger ones first: 10 microbatches over 4
    ranks are 5 and 5. If more than p/2 would be left over by groups of p, the first group is instead one of p with
    some microbatches missing. That holds what groups of p hold, and takes no longer than the next multiple of p.

    With split backwards rank i runs (p - 1 - i) + (v - 1)g forwards first, and each W when i more I have run, as
    `zb-h1` does. Bubble (p - 1)(f + i - w)/v where w is at most f and i; peak (v - 1)g + p stage activations.

    Args:
        num_stages: over the whole model, v * num_ranks; two a rank by default.
        backward: "whole", or "split" into I and W.
    """
    check_backward("interleaved-1f1b", backward)
    num_stages = 2 * num_ranks if num_stages is None else num_stages
    whole_multiple("interleaved-1f1b", "stages", num_stages, "ranks", num_ranks)
    chunks, left_over = num_stages // num_ranks, num_microbatches % num_ranks
    missing = num_ranks - left_over if 2 * left_over > num_ranks and num_microbatches > num_ranks else 0
    groups = np.array_split(np.arange(num_microbatches + missing), max(1, (num_microbatches + missing) // num_ranks))
    chunk = np.concatenate([np.repeat(np.arange(chunks), len(group)) for group in groups])
    microbatch = np.concatenate([np.tile(group, chunks) for group in groups])
    total = len(microbatch)
    number = np.arange(total)
    split = backward == "split"
    columns = np.empty((3, num_ranks, (3 if split else 2) * total), np.int64)  # kind, stage and microbatch
    for rank in range(num_ranks):
        warmup = (1 if split else 2) * (num_ranks - 1 - rank) + (chunks - 1) * len(groups[0])
        lanes = ((F, -warmup), (I, 0), (W, rank)) if split else ((F, -warmup), (B, 0))
        for turn, (letter, late) in enumerate(lanes):
            # Op k of a kind stands behind those of the others that are due by then; in one slot by their turns.
            at = number.copy()
            for other, (_, lag) in enumerate(lanes):
                if other != turn:
                    at += np.clip(number + late - lag + (other < turn), 0, total)
            columns[0, rank, at] = letter
            columns[1, rank, at] = (chunk if letter == F else chunks - 1 - chunk) * num_ranks + rank
            columns[2, rank, at] = microbatch
    kind, stage, each = columns[:, columns[2] >= missing]
    size = len(kind) // num_ranks
    ranks, first = np.repeat(np.arange(num_ranks), size), np.arange(num_ranks + 1) * size
    made = Columns(kind, stage, each - missing, ranks, first)
    return Schedule.of_columns("interleaved-1f1b", circular(num_ranks, num_stages), made, (0,) * num_microbatches)


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
