"""ZB-V (Qi et al. 2024): two stages per rank in a V, so that no bubble costs no more memory than 1F1B."""

from __future__ import annotations

from penstock.cost import Costs
from penstock.library.v_blocks import shortest
from penstock.schedule import Op, Schedule, v_shape


def zb_v(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Stages i and 2p - 1 - i on rank i: the loss is on rank 0, where the input is too.

    Two ranks, stages 0 1 1 0 going down and up:

        rank 0 | 0F0 0F1 0F2 .   3F0 3I0 3W0 3F1 ...
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 ...

    Warm-up on rank i: 2(p - i) - 1 forwards of its first stage, i times (second, first), then p - i times
    (forward and backward of the second). No bubble inside a rank's span where f = i = w; peak 2p stage
    activations (p full stages).

    Args:
        costs: times per stage; where given, the pattern over the V that is shortest under them within that peak. At
            N = p = 8 and f = i = w = 1 it takes 55 where the order above takes 64.
    """
    last = 2 * num_ranks - 1
    rows = []
    for rank in range(num_ranks):
        row: list[Op] = []
        count: dict[tuple[str, int], int] = {}

        def add(kinds: str, chunk: int, rank: int = rank, row: list[Op] = row, count: dict = count) -> None:
            for kind in kinds:
                m = count.get((kind, chunk), 0)
                count[kind, chunk] = m + 1
                if m < num_microbatches:
                    row.append(Op(kind, rank if chunk == 0 else last - rank, m))

        for _ in range(2 * (num_ranks - rank) - 1):
            add("F", 0)
        for _ in range(rank):
            add("F", 1)
            add("F", 0)
        for _ in range(num_ranks - rank):
            add("FIW", 1)
        while count["F", 1] < max(num_microbatches, count["F", 0]):
            if count["F", 0] < num_microbatches:
                add("F", 0)
            add("IW", 0)
            add("FIW", 1)
        for _ in range(rank):
            add("I", 0)
            add("I", 1)
        for _ in range(num_ranks - rank):
            add("IW", 0)
        while count.get(("W", 1), 0) < num_microbatches:
            add("W", 1)
        while count.get(("W", 0), 0) < num_microbatches:
            add("W", 0)
        rows.append(row)
    schedule = Schedule.of("zb-v", v_shape(num_ranks), rows, num_microbatches)
    return schedule if costs is None else shortest(schedule, costs)
