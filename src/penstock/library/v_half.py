"""V-Half and V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): a V that holds less.

Both repeat one microbatch's pattern every six slots of unit time: two F, two I and two W fill a rank. The
pattern says when each F and I of a microbatch runs; the shorter an activation's life in it, the less memory.
Each W takes the first slot that the pattern leaves free.

The pattern alone leaves slots empty while the pipeline fills and drains. So its ops are moved to earlier slots
as far as dependencies and the pattern's own peak memory allow (the paper's "squeeze"), first with the W in
place, then without, after which the W are placed anew. The authors' generator moves only what lies outside the
steady phase; here every op may move, which never came out worse and with few microbatches comes out better.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from penstock.schedule import Op, Schedule, v_shape

Slots = dict[int, Op]
"""What a rank runs in each slot of unit time; slots without an op are bubbles."""

_PERIOD = 6
_HELD = {"F": 1, "I": 0, "W": -1}
"""What an op adds to the stage activations its rank holds."""


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """About half of 1F1B's activations: stages i and 2p - 1 - i on rank i.

    Two ranks, stages 0 1 1 0 going down and up:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 ...
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 ...

    A microbatch takes slots 2i, 3p - i - 2 (F), 3p + k + 2i - 1, 6p + k - i - 2 (I) of rank i, with k = 3 for an
    even p, else 0. Inside a rank's span the bubble is 3p - 7 stage times for an even p above 2, 3p - 4 for an
    odd p above 1, where f = i = w and N >= p; none for p = 2 and N > 2. Peak p + 2 stage activations for an even
    p, p + 1 for an odd one, fewer where N is below that half.
    """
    shift = 0 if num_ranks % 2 else 3
    pattern = [
        (2 * i, 3 * num_ranks - i - 2, 3 * num_ranks + shift + 2 * i - 1, 6 * num_ranks + shift - i - 2)
        for i in range(num_ranks)
    ]
    return _from_pattern("v-half", pattern, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """The least activations such a pattern can hold, about a third of 1F1B's.

    Two ranks, stages 0 1 1 0 going down and up:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 0W0 3I1 0F3 3W1 ...
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2I1 1I1 ...

    A microbatch takes slots i, 2p - i - 1 (F), 2p + k + i, 4p + k - i - 1 (I) of rank i, with k = 2 where 3
    divides p, else 0. Where f = i = w and N >= p, the bubble inside a rank's span is 4p - 5 stage times for
    p mod 3 = 1, 4p - 7 for 0, at most 4p - 6 for 2; the authors' own order leaves 4p - 5 for 2 as well. Where the
    times differ, each microbatch adds a bubble. Peak 2(ceil(p/3) + 1) stage activations, two less where
    p mod 3 = 1.
    """
    shift = 0 if num_ranks % 3 else 2
    pattern = [
        (i, 2 * num_ranks - i - 1, 2 * num_ranks + shift + i, 4 * num_ranks + shift - i - 1) for i in range(num_ranks)
    ]
    return _from_pattern("v-min", pattern, num_microbatches)


def _from_pattern(name: str, pattern: list[tuple[int, int, int, int]], num_microbatches: int) -> Schedule:
    """The schedule of a pattern: per rank, the slots of microbatch 0's F and I, down the V and up, in that order."""
    num_ranks = len(pattern)
    rows = []
    for rank, slots in enumerate(pattern):
        near, far = rank, 2 * num_ranks - 1 - rank
        steps = list(zip(slots, (("F", near), ("F", far), ("I", far), ("I", near)), strict=True))
        row = {_PERIOD * m + slot: Op(*step, m) for m in range(num_microbatches) for slot, step in steps}
        rows.append(_with_weights(row))
    cap = max(max(_levels(row)) for row in rows)
    rows = _squeeze(rows, cap, first=0)
    last_read = max(slot for slot, op in rows[0].items() if (op.kind, op.stage) == ("F", 0))
    bare = [{slot: op for slot, op in row.items() if op.kind != "W"} for row in rows]
    rows = [_with_weights(row) for row in _squeeze(bare, cap, first=last_read)]
    order = [[row[slot] for slot in sorted(row)] for row in rows]
    return Schedule.of(name, v_shape(num_ranks), order, num_microbatches)


def _with_weights(row: Slots) -> Slots:
    """The row with the W of every I in the first free slots behind it, in the order of the I."""
    filled = dict(row)
    late: deque[Op] = deque()
    slot, last = min(row), max(row)
    while slot <= last or late:
        if slot not in row:
            if late:
                filled[slot] = late.popleft()._replace(kind="W")
        elif row[slot].kind == "I":
            late.append(row[slot])
        slot += 1
    return filled


def _levels(row: Slots) -> list[int]:
    """Stage activations held after each slot, from F to W."""
    return list(accumulate(_HELD[row[slot].kind] if slot in row else 0 for slot in range(max(row) + 1)))


def _squeeze(rows: list[Slots], cap: int, first: int) -> list[Slots]:
    """Moves ops from slot `first` on to the earliest free slot of their rank that comes after all they need and
    keeps the rank under `cap` activations; rows without W are weighed with theirs where those would fall."""
    slot_of = {op: slot for row in rows for slot, op in row.items()}
    num_stages = 2 * len(rows)
    bare = not any(op.kind == "W" for op in rows[0].values())
    moved = [dict(row) for row in rows]
    levels = [_levels(row) for row in rows]
    for slot, rank in sorted((slot, rank) for rank, row in enumerate(rows) for slot in row if slot >= first):
        op, row, level = rows[rank][slot], moved[rank], levels[rank]
        ready = 1 + max((slot_of[needed] for needed in _needed(op, num_stages)), default=-1)
        del row[slot]
        for earlier in (free for free in range(ready, slot + 1) if free not in row):
            row[earlier] = op
            if earlier == slot:
                break
            if bare:
                fits = max(_levels(_with_weights(row))) <= cap
            else:
                fits = op.kind != "F" or max(level[earlier:slot]) < cap
            if fits:
                slot_of[op] = earlier
                level[earlier:slot] = [held + _HELD[op.kind] for held in level[earlier:slot]]
                break
            del row[earlier]
    return moved


def _needed(op: Op, num_stages: int) -> list[Op]:
    """What must come before `op`: what it depends on, and the same op of the microbatch before."""
    kind, stage, m = op
    needed = [Op(kind, stage, m - 1)] if m else []
    if kind == "F" and stage:
        needed.append(Op("F", stage - 1, m))
    elif kind == "I":
        needed.append(Op("F", stage, m))
        if stage + 1 < num_stages:
            needed.append(Op("I", stage + 1, m))
    elif kind == "W":
        needed.append(Op("I", stage, m))
    return needed
