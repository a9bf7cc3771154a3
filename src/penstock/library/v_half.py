"""V-Half and V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): a V that holds less.

Both repeat one microbatch's pattern every six slots of unit time: two F, two I and two W fill a rank. The
pattern says when each F and I of a microbatch runs; the shorter an activation's life in it, the less memory.
Each W takes the first slot that the pattern leaves free (see `v_blocks`).
"""

from __future__ import annotations

from penstock.cost import Costs
from penstock.library.v_blocks import from_pattern, shortest
from penstock.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """About half of 1F1B's activations: stages i and 2p - 1 - i on rank i.

    Two ranks, stages 0 1 1 0 going down and up:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 ...
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 ...

    A microbatch takes slots 2i, 3p - i - 2 (F), 3p + k + 2i - 1, 6p + k - i - 2 (I) of rank i, with k = 3 for an
    even p, else 0. Inside a rank's span the bubble is 3p - 7 stage times for an even p above 2, 3p - 4 for an
    odd p above 1, where f = i = w and N >= p; none for p = 2 and N > 2. Peak p + 2 stage activations for an even
    p, p + 1 for an odd one, fewer where N is below that half.

    Args:
        costs: times per stage; where given, the pattern that is shortest under them within that peak.
    """
    shift = 0 if num_ranks % 2 else 3
    pattern = [
        (2 * i, 3 * num_ranks - i - 2, 3 * num_ranks + shift + 2 * i - 1, 6 * num_ranks + shift - i - 2)
        for i in range(num_ranks)
    ]
    schedule = from_pattern("v-half", pattern, num_microbatches)
    return schedule if costs is None else shortest(schedule, costs)


def v_min(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """The least activations such a pattern can hold, about a third of 1F1B's.

    Two ranks, stages 0 1 1 0 going down and up:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 0W0 3I1 0F3 3W1 ...
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2I1 1I1 ...

    A microbatch takes slots i, 2p - i - 1 (F), 2p + k + i, 4p + k - i - 1 (I) of rank i, with k = 2 where 3
    divides p, else 0. Where f = i = w and N >= p, the bubble inside a rank's span is 4p - 5 stage times for
    p mod 3 = 1, 4p - 7 for 0, at most 4p - 6 for 2; the authors' own order leaves 4p - 5 for 2 as well. Where the
    times differ, each microbatch adds a bubble. Peak 2(ceil(p/3) + 1) stage activations, two less where
    p mod 3 = 1.

    Args:
        costs: times per stage; where given, the pattern that is shortest under them within that peak.
    """
    shift = 0 if num_ranks % 3 else 2
    pattern = [
        (i, 2 * num_ranks - i - 1, 2 * num_ranks + shift + i, 4 * num_ranks + shift - i - 1) for i in range(num_ranks)
    ]
    schedule = from_pattern("v-min", pattern, num_microbatches)
    return schedule if costs is None else shortest(schedule, costs)
