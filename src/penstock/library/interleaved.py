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
    """1F1B over v stages per rank, stage s on rank s mod p, microbatches in groups of p.

    Two ranks, four stages (`2F0` is stage 2):

        rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 0F3 2B1 2F2 ...
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 ...

    Rank i runs 2(p - 1 - i) + (v - 1)p forwards before its first backward.
    Bubble (p - 1)(f + b)/v in full-stage times; needs N mod p = 0.

    With split backwards rank i runs (p - 1 - i) + (v - 1)p forwards first, and each W when i more I have run, as
    `zb-h1` does. Bubble (p - 1)(f + i - w)/v where w is at most f and i; peak vp stage activations.

    Args:
        num_stages: over the whole model, v * num_ranks; two a rank by default.
        backward: "whole", or "split" into I and W.
    """
    check_backward("interleaved-1f1b", backward)
    num_stages = 2 * num_ranks if num_stages is None else num_stages
    whole_multiple("interleaved-1f1b", "stages", num_stages, "ranks", num_ranks)
    whole_multiple("interleaved-1f1b", "microbatches", num_microbatches, "ranks", num_ranks)
    chunks = num_stages // num_ranks
    total = num_microbatches * chunks
    number = np.arange(total)
    group, place = np.divmod(number, num_ranks * chunks)
    chunk, within = np.divmod(place, num_ranks)
    microbatch = group * num_ranks + within
    split = backward == "split"
    size = (3 if split else 2) * total
    columns = np.empty((3, num_ranks, size), np.int64)  # kind, stage and microbatch
    for rank in range(num_ranks):
        warmup = (1 if split else 2) * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks
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
    kind, stage, each = columns.reshape(3, -1)
    ranks, first = np.repeat(np.arange(num_ranks), size), np.arange(num_ranks + 1) * size
    made = Columns(kind, stage, each, ranks, first)
    return Schedule.of_columns("interleaved-1f1b", circular(num_ranks, num_stages), made, (0,) * num_microbatches)
