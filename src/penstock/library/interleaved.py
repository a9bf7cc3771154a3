"""Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM): several stages per rank, smaller bubbles; and with split
backwards (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; torch's InterleavedZeroBubble)."""

from __future__ import annotations

import numpy as np

from penstock.library.deepest_first import Backward, check_backward
from penstock.library.options import whole_multiple
from penstock.schedule import Schedule, circular
from penstock.schedule.columns import B, Columns, F, I, W


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
