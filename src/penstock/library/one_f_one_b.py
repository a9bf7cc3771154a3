"""1F1B (PipeDream-Flush, DAPPLE): a backward as early as possible, so that few activations are held."""

from __future__ import annotations

import numpy as np

from penstock.schedule import Schedule, one_to_one
from penstock.schedule.columns import B, F, in_slots


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
