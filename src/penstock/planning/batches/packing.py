"""Bins of whole sequences, as many as there are microbatches: no sequence is cut, and none is left out.

in turn     as they arrive, each bin with about as many tokens
to shares   the longest first, each into the bin that lacks most of its share of the work
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.tolerance import EPSILON
from penstock.schedule import ScheduleError
from penstock.schedule.columns import Array

Bins = list[list[int]]
"""Of each bin the numbers of its sequences, ascending."""


class PackingError(ScheduleError):
    """Sequences that do not go into so many bins.

    Examples:
        >>> import penstock as ps
        >>> line = ps.cost.LengthLine(per_token=0.01)
        >>> costs = ps.cost.CostsByLength(f=[line] * 2, i=[line] * 2, w=[line] * 2)
        >>> try:
        ...     ps.planning.plan_batch([900, 100], ps.build("1f1b", 2, 4), costs)
        ... except ps.planning.PackingError as error:
        ...     print(error)
        2 sequences can't fill 4 microbatches with at least one each; give more, or fewer microbatches
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, rule="packing")


def pack_in_turn(lengths: Sequence[int] | Array, num_bins: int) -> Bins:
    """Consecutive sequences, so that bins end as near to even shares of the tokens as whole sequences let them.

    Raises:
        PackingError: fewer sequences than bins, or lengths below 1.
    """
    tokens = as_lengths(lengths, num_bins)
    ends = np.cumsum(tokens)
    middle = ends - tokens / 2
    bin_of = np.minimum((middle * num_bins / ends[-1]).astype(np.int64), num_bins - 1)
    # Each bin has a sequence at least: its number may exceed neither what comes before it nor leave too few behind.
    places = np.arange(len(tokens))
    first = np.searchsorted(bin_of, np.arange(num_bins))
    for k in range(1, num_bins):
        first[k] = max(first[k], first[k - 1] + 1)
    first = np.minimum(first, len(tokens) - num_bins + np.arange(num_bins))
    return [part.tolist() for part in np.split(places, first[1:])]


def pack_to_shares(
    lengths: Sequence[int] | Array,
    work: Sequence[float] | Array,
    shares: Sequence[float] | Array,
    token_limit: float | None = None,
) -> Bins:
    """The sequence with most work first, each into the bin that lacks most of its share, as long as it has room.

        work 8 5 4 3, shares 1 1:  [8 3] [5 4]           shares 1 3:  [4] [8 5 3]

    Args:
        work: ms of each sequence, or a row of them with one for each tower: then the bin is taken in which the tower
            that gets fullest by it lacks most. shares: of the work, by bin; their sum is the whole.
        token_limit: most tokens of a bin; none where not given.

    Raises:
        PackingError: fewer sequences than bins, lengths below 1, or the longest first finds no room under the limit.
    """
    wanted = np.asarray(shares, np.float64)
    tokens, ms = as_lengths(lengths, len(wanted)), np.asarray(work, np.float64)
    if ms.ndim == 1:
        ms = ms[:, None]
    if (
        ms.ndim != 2
        or len(ms) != len(tokens)
        or not ms.shape[1]
        or not np.isfinite(ms).all()
        or (ms < 0).any()
        or not (wanted > 0).all()
    ):
        raise PackingError("give the work of each sequence, at least 0, and the share of each bin, above 0")
    lacking = wanted[:, None] * (ms.sum(axis=0) / wanted.sum())  # bins, towers
    room = np.full(len(wanted), np.inf if token_limit is None else float(token_limit) * (1 + EPSILON))
    bins: Bins = [[] for _ in wanted]
    for sequence in np.argsort(-ms.max(axis=1), kind="stable").tolist():
        length, own = tokens[sequence], ms[sequence]
        left = lacking[:, 0] if len(own) == 1 else (lacking - own)[:, own > 0].min(axis=1, initial=np.inf)
        k = int(np.argmax(np.where(room >= length, left, -np.inf)))
        if room[k] < length:
            raise PackingError(
                f"a sequence of {length} tokens finds no bin with room under the limit of {token_limit:g}: "
                f"{len(tokens)} sequences have {tokens.sum()} tokens, and there are {len(wanted)} bins; raise it"
            )
        bins[k].append(sequence)
        room[k] -= length
        lacking[k] -= own
    for empty in (own for own in bins if not own):
        largest = max(bins, key=len)
        empty.append(largest.pop())  # which came last: the least of them
    return [sorted(own) for own in bins]


def tapered_shares(num_bins: int, ramp: float, ends: float) -> Array:
    """Shares that rise over the first bins of a pipeline's step and fall over the last, the mean 1.

    Small ones at both ends fill and drain the pipeline fast: over even ones of 1f1b, 8 ranks and 32 microbatches, a
    step takes 1.153 in place of 1.219 of the work.

    Args:
        ramp: bins over which they rise. ends: the first one's share of those in the middle.
    """
    place = np.arange(num_bins)
    rising = np.minimum(place, num_bins - 1 - place) / max(ramp, 1.0)
    shares = np.minimum(1.0, ends + (1 - ends) * rising)
    found: Array = shares / shares.mean()
    return found


def as_lengths(lengths: Sequence[int] | Array, num_bins: int) -> Array:
    """Raises PackingError."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or (tokens < 1).any():
        raise PackingError("give one length per sequence, a whole number above 0")
    if num_bins < 1 or len(tokens) < num_bins:
        raise PackingError(
            f"{len(tokens)} sequences can't fill {num_bins} microbatches with at least one each; give more, or fewer "
            "microbatches"
        )
    return tokens
