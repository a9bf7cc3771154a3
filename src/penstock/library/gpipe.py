"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

import numpy as np

from penstock.schedule import Schedule, one_to_one
from penstock.schedule.columns import B, F, in_slots


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
