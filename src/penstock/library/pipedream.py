"""PipeDream (Narayanan et al. 2019), and rules by which others run its order: 1F1B that never flushes.

All are asynchronous: the optimizer steps while microbatches are under way, so the pipeline fills once a run and
drains once. A schedule here is the order of ops over such a run, N being all its microbatches. With a `window` the
updates are ops of it (U), each right after the last backward of its window; without, F and B stand alone.

What sets the names apart is which version of the weights ops read (`Updates.rule`):

    name            a forward reads                         its backward reads         window
    pipedream       the newest                              what its forward read      1, or more
    vnag            the same, with NAdam as the optimizer                              1, or more
    spectrain       a prediction by momentum                another one                1, or more
    xpipe           a prediction by Adam's step             the newest                 1, or more
    pipedream-2bw   what the window before the last left    the same                   p at least
"""

from __future__ import annotations

from penstock.library.in_turn import in_turn
from penstock.library.options import at_least
from penstock.schedule import Schedule, with_updates


def pipedream(
    num_ranks: int, num_microbatches: int, window: int | None = None, in_flight: int | None = None
) -> Schedule:
    """Rank i lets p - i microbatches in, then runs one backward and one forward in turn to the end of the run.

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

        with window=1, rank 0: F0 F1 F2 B0 U0 F3 B1 U1 ...    rank 2: F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

    No bubble once full: (p - 1)(f + b) over the whole run. Peak min(p - i, N) activations. F and B stand as in
    `1f1b`; what sets PipeDream apart is that the optimizer steps after any B: with `window=1`, p - 1 - i updates
    fall between a microbatch's F and B on rank i. Rank i then needs p - i versions of its weights, so that B finds
    those its F read.

    Args:
        window: microbatches an update gathers, 1 for PipeDream's own; without it the updates are left out.
        in_flight: most microbatches that the first stage reads before its first backward, p by default. With n of
            them min(n, p - i) - 1 updates fall between F and B on rank i (AMDP, Lemma 1), at the price of bubbles.
    """
    return _never_flushed("pipedream", num_ranks, num_microbatches, window, in_flight)


def pipedream_2bw(num_ranks: int, num_microbatches: int, window: int | None = None) -> Schedule:
    """PipeDream's order with an update once a window of at least p microbatches (PipeDream-2BW, 2021).

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

        with window=3, rank 0: F0 F1 F2 B0 F3 B1 F4 B2 U0 F5 B3 ...    rank 2: F0 B0 F1 B1 F2 B2 U0 F3 B3 ...

    Bubble and peak are those of `pipedream`. As a window is no shorter than the pipeline, at most one update falls
    between a microbatch's F and B, and two versions of the weights are enough.

    Args:
        window: microbatches an update gathers, at least p; without it the updates are left out.
    """
    if window is not None:
        at_least("pipedream-2bw", "microbatches in a window, one per rank,", window, num_ranks)
    return _never_flushed("pipedream-2bw", num_ranks, num_microbatches, window)


def spectrain(num_ranks: int, num_microbatches: int, window: int | None = None) -> Schedule:
    """PipeDream's order; F and B read weights predicted by the optimizer's momentum (SpecTrain, Chen et al. 2018).

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

    Both aim at the weights with which the microbatch's way back through the pipeline ends, so they agree without a
    version being kept for each.

    Args:
        window: microbatches an update gathers, 1 for SpecTrain's own; without it the updates are left out.
    """
    return _never_flushed("spectrain", num_ranks, num_microbatches, window)


def xpipe(num_ranks: int, num_microbatches: int, window: int | None = None) -> Schedule:
    """PipeDream's order; F reads weights predicted by Adam's step (XPipe, Guan et al. 2019), B the newest.

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

    How many steps ahead is read off the schedule: the updates of the copy between the F and its microbatch's own.

    Args:
        window: microbatches an update gathers (XPipe's are the microbatches of a mini-batch); without it the updates
            are left out.
    """
    return _never_flushed("xpipe", num_ranks, num_microbatches, window)


def vnag(num_ranks: int, num_microbatches: int, window: int | None = None) -> Schedule:
    """`pipedream` for the optimizer NAdam, whose step looks ahead (Ajanthan et al. 2025).

        rank 0 | F0 F1 F2 .  .  .  B0 F3 B1 ...
        rank 1 | .  F0 F1 .  .  B0 F2 B1 F3 ...
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 ...

    Args:
        window: microbatches an update gathers, 1 for the paper's own; without it the updates are left out.
    """
    return _never_flushed("vnag", num_ranks, num_microbatches, window)


def _never_flushed(
    name: str, num_ranks: int, num_microbatches: int, window: int | None, in_flight: int | None = None
) -> Schedule:
    """The order that all share; `name` is that of the rule too.

    Between a microbatch's F and B there are as many backwards as microbatches were let in, but itself: so many
    windows may close there.
    """
    num_read = num_ranks if in_flight is None else in_flight
    at_least(name, "microbatch in flight", num_read, 1)
    schedule = in_turn(name, num_ranks, num_microbatches, num_read)
    if window is None:
        return schedule
    at_least(name, "microbatch in a window", window, 1)
    return with_updates(schedule, window, -(-(min(num_read, num_ranks) - 1) // window), rule=name)
