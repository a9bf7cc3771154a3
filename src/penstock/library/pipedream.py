"""PipeDream (Narayanan et al. 2019) and PipeDream-2BW (2021): 1F1B that never flushes.

Both are asynchronous: the optimizer steps while microbatches are under way, so the pipeline fills once a run
and drains once. A schedule here is the order of F and B over such a run, N being all its microbatches. The
updates between them, and the weight versions that each rule keeps, are no part of the order.
"""

from __future__ import annotations

from penstock.library.one_f_one_b import one_f_one_b
from penstock.schedule import Schedule


def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank i lets p - i microbatches in, then runs one backward and one forward in turn to the end of the run.

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

    No bubble once full: (p - 1)(f + b) over the whole run. Peak min(p - i, N) activations. The order is that of
    `1f1b`; what sets PipeDream apart is that a step of the optimizer may follow any B (not present in the order).
    Rank i then needs p - i versions of its weights, so that B finds those its F read.
    """
    return one_f_one_b(num_ranks, num_microbatches).renamed("pipedream")


def pipedream_2bw(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeDream's order, meant for updates once a window of at least p microbatches.

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

    Bubble and peak are those of `pipedream`. As a window is no shorter than the pipeline, two versions of the
    weights are enough. The updates are not present in the order.
    """
    return one_f_one_b(num_ranks, num_microbatches).renamed("pipedream-2bw")
