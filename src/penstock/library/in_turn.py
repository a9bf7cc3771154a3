"""Forwards and backwards in turn: GPipe, 1F1B and its interleaved and looped kin, and PipeDream, which never flushes.

GPipe (Huang et al. 2019) runs all forwards, then all backwards. 1F1B (PipeDream-Flush, DAPPLE) runs a backward as
early as possible, so that few activations are held. Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM) has several
stages per rank and smaller bubbles; with split backwards it is that of Qi et al. 2023 ("Zero Bubble Pipeline
Parallelism") and torch's InterleavedZeroBubble. Looped breadth-first (Lamy-Poirier 2023) runs each stage's
microbatches all at once.

PipeDream (Narayanan et al. 2019) and the rules by which others run its order are asynchronous: the optimizer steps
while microbatches are under way, so the pipeline fills once a run and drains once. A schedule here is the order of
ops over such a run, N being all its microbatches. With a `window` the updates are ops of it (U), each right after
the last backward of its window; without, F and B stand alone.

What sets the names apart is which version of the weights ops read (`Updates.rule`):

    name            a forward reads                         its backward reads         window
    pipedream       the newest                              what its forward read      1, or more
    vnag            the same, with NAdam as the optimizer                              1, or more
    spectrain       a prediction by momentum                another one                1, or more
    xpipe           a prediction by Adam's step             the newest                 1, or more
    pipedream-2bw   what the window before the last left    the same                   p at least
"""

from __future__ import annotations

import numpy as np

from penstock.library.options import Backward, at_least, check_backward, whole_multiple
from penstock.schedule import Op, Schedule, circular, one_to_one, with_updates
from penstock.schedule.columns import B, Columns, F, I, W, in_slots


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


def looped_bfs(num_ranks: int, num_microbatches: int, num_stages: int | None = None) -> Schedule:
    """All forwards of a rank's first stage, then of its next, then the backwards, last stage first.

    Two ranks, four stages (`2F0` is stage 2), three microbatches:

        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B0 2B1 2B2 0B0 0B1 0B2
        rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2

    The bubble is `interleaved-1f1b`'s, (p - 1)(f + b)/v in full-stage times, where N is at least p; with fewer
    microbatches every turn but one leaves p - N more. A rank holds all N activations of each of its stages: what
    that buys is that a stage's weights are used, and with sharded data parallelism fetched, once each way.

    Args:
        num_stages: over the whole model, v * num_ranks; two a rank by default.
    """
    num_stages = 2 * num_ranks if num_stages is None else num_stages
    whole_multiple("looped-bfs", "stages", num_stages, "ranks", num_ranks)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        row = [Op("F", stage, m) for stage in stages for m in range(num_microbatches)]
        row += [Op("B", stage, m) for stage in reversed(stages) for m in range(num_microbatches)]
        rows.append(row)
    return Schedule.of("looped-bfs", circular(num_ranks, num_stages), rows, num_microbatches)


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
