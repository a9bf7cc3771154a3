"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from penstock.schedule import Op, Schedule, one_to_one


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

        rank 0 | F0 F1 F2 .  .  .  .  B0 B1 B2
        rank 1 | .  F0 F1 F2 .  .  B0 B1 B2
        rank 2 | .  .  F0 F1 F2 B0 B1 B2

    Bubble (p - 1)(f + b); peak N activations on every rank.
    """
    rows = [[Op(kind, rank, m) for kind in "FB" for m in range(num_microbatches)] for rank in range(num_ranks)]
    return Schedule.of("gpipe", one_to_one(num_ranks), rows, num_microbatches)
