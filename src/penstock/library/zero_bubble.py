"""The zero-bubble family on one stage per rank: ZB-H1, ZB-H2 (Qi et al. 2023) and PipeMorph's ZB.

The backward is split: I passes the gradient on at once, W waits for a moment when nothing else can run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.cost import Costs
from penstock.library.options import at_least, warmup_counts
from penstock.schedule import Op, Schedule, one_to_one
from penstock.schedule.columns import F, I, W, in_slots


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with every W delayed by i microbatches on rank i.

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 ...
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 ...
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 ...

    Bubble (p - 1)(f + i - w) where w is at most f and i, a third of 1F1B's at f = i = w; peak at most p
    activations.
    """
    rank, m = np.arange(num_ranks)[:, None], np.arange(num_microbatches)
    columns = in_slots(((F, m - (num_ranks - 1 - rank)), (I, m + 0 * rank), (W, m + rank)))
    return Schedule.of_columns("zb-h1", one_to_one(num_ranks), columns, (0,) * num_microbatches)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm-up of 2(p - i) - 1 forwards on rank i: no bubble inside a rank's span where f = i = w.

        rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 F5 ...
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 ...
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 ...

    Makespan is (p - 1)f above the busy time where N >= p, (2p - N - 1)f where N is smaller; peak min(2p - 1, N)
    activations. The order is the greedy one (I, then F, then W) under that peak.
    """
    warmup = [2 * (num_ranks - rank) - 1 for rank in range(num_ranks)]
    return greedy("zb-h2", num_ranks, num_microbatches, warmup, 2 * num_ranks - 1)


def zb(
    num_ranks: int,
    num_microbatches: int,
    warmup: Sequence[int] | None = None,
    max_in_flight: float | None = None,
) -> Schedule:
    """PipeMorph's schedule (section 4.3): warm-up counts x_i, then any ready op, I before F before W.

    warmup = 5, 3, 1:

        rank 0 | F0 F1 F2 F3 F4 I0 F5 I1 ...
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 ...
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 ...

    The more x_i exceeds x_(i+1) (their slack), the later the link between them may be: Theorem 1.

    Corrections to the paper's Algorithms 3 and 4: time advances from event to event instead of by steps,
    an op is ready when its producer has ended (not when it started), counts above N are clipped to N (the
    printed form deadlocks), and with `max_in_flight` forwards also respect a cap.

    Args:
        warmup: x_i, one per rank, never rising; by default 2(p - i) - 1.
        max_in_flight: most stage activations a rank may hold, freed at W; None for no limit, as in the paper.
    """
    default = [2 * (num_ranks - rank) - 1 for rank in range(num_ranks)]
    counts = warmup_counts("zb", default if warmup is None else warmup, num_ranks, num_microbatches)
    if max_in_flight is not None and max_in_flight < max(counts):
        at_least(
            f"zb with warm-up counts {counts}",
            "activations in flight (max_in_flight)",
            int(max_in_flight),
            max(counts),
        )
    return greedy("zb", num_ranks, num_microbatches, counts, max_in_flight)


def greedy(
    name: str, num_ranks: int, num_microbatches: int, warmup: Sequence[int], max_in_flight: float | None
) -> Schedule:
    """Runs the decision core over unit costs from an order that holds just `warmup` activations per rank, and
    keeps the order in which the ops ran."""
    counts = [min(count, num_microbatches) for count in warmup]
    rows = []
    for rank in range(num_ranks):
        row = [Op("F", rank, m) for m in range(counts[rank])]
        for m in range(num_microbatches):
            row += [Op("I", rank, m), Op("W", rank, m)]
            if counts[rank] + m < num_microbatches:
                row.append(Op("F", rank, counts[rank] + m))
        rows.append(row)
    seed = Schedule.of(name, one_to_one(num_ranks), rows, num_microbatches, max_in_flight)
    cap = float(2 * num_microbatches) if max_in_flight is None else max_in_flight
    costs = Costs.uniform(num_ranks, freed_by_input=0.0)
    from penstock.simulation import simulate  # here, since other schedules do without

    return simulate(seed, costs, dispatch="dynamic", memory_limit=cap, warmup=counts).executed()
