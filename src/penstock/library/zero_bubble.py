"""The zero-bubble family: ZB-H1, ZB-H2 and PipeMorph's ZB on one stage per rank, ZB-V, V-Half and V-Min on two.

The backward is split: I passes the gradient on at once, W waits for a moment when nothing else can run (Qi et al.
2023).

ZB-V, V-Half and V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory") lay their stages in a V. ZB-V
has no bubble and no more memory than 1F1B. V-Half and V-Min hold less. They are patterns: what one microbatch does,
repeated every six slots of unit time and squeezed.

Two F, two I and two W fill a rank's six slots, so a pattern may be repeated where the F and I of a rank fall into
different slots modulo six. Each W takes the first slot that the pattern leaves free.

The pattern alone leaves slots empty while the pipeline fills and drains. So its ops are moved to earlier slots
as far as dependencies and the pattern's own peak memory allow (the paper's "squeeze"), first with the W in
place, then without, after which the W are placed anew. The authors' generator moves only what lies outside the
steady phase; here every op may move, which never came out worse and with few microbatches comes out better.

Which pattern is best depends on the costs and on the memory there is: ZB-V, V-Half and V-Min are three choices of how
many slots a microbatch takes from rank to rank, down the V and up, forward and backward. `shortest` tries them all.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from penstock.cost import Costs
from penstock.library.options import at_least, warmup_counts
from penstock.schedule import Op, Schedule, one_to_one, peak_in_flight, v_shape
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


Pattern = list[tuple[int, int, int, int]]
"""Per rank, the slots of microbatch 0's F and I, down the V and up, in that order."""

Slots = dict[int, Op]
"""What a rank runs in each slot of unit time; slots without an op are bubbles."""

_PERIOD = 6
_HELD = {"F": 1, "I": 0, "W": -1}
"""What an op adds to the stage activations its rank holds."""

_MOST_TRIED = 40
_MOST_OPS = 30_000
"""Patterns that `shortest` tries at most, and the ops that all of them may have together."""


def shortest(schedule: Schedule, costs: Costs) -> Schedule:
    """Of the schedules of all patterns whose peak is at most that of `schedule`, a V, and of itself, the shortest.

    Raises:
        CostError: costs for another number of stages.
    """
    from penstock.simulation import simulate  # here, since other schedules do without

    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    best, least, cap = schedule, simulate(schedule, costs).makespan, max(peak_in_flight(schedule))
    fitting = sorted(
        (max(slots[3] for slots in pattern), pattern)
        for pattern in _patterns(num_ranks)
        if _lifetimes(pattern) <= cap + 1
    )
    num_tried = max(4, min(_MOST_TRIED, _MOST_OPS // (6 * num_ranks * num_microbatches)))
    for _, pattern in fitting[:: max(1, len(fitting) // num_tried)]:
        made = from_pattern(schedule.name, pattern, num_microbatches)
        if max(peak_in_flight(made)) <= cap and (makespan := simulate(made, costs).makespan) < least:
            best, least = made, makespan
    return best


def _patterns(num_ranks: int) -> list[Pattern]:
    """All whose steps from rank to rank are alike, at most five slots each, and that can be repeated."""
    found = []
    ranks, last = range(num_ranks), num_ranks - 1
    for down, up, back_down, back_up in itertools.product(range(1, _PERIOD), repeat=4):
        for turn, pause in itertools.product(range(1, 4), range(_PERIOD)):
            middle = down * last + turn
            back = middle + up * last + 1 + pause
            middle_back = back + back_down * last + 1
            pattern = [
                (down * r, middle + up * (last - r), back + back_down * r, middle_back + back_up * (last - r))
                for r in ranks
            ]
            if all(len({slot % _PERIOD for slot in slots}) == len(slots) for slots in pattern):
                found.append(pattern)
    return found


def _lifetimes(pattern: Pattern) -> int:
    """About how many activations a rank holds: those of microbatches that follow within the life of one."""
    return max(
        -((first - last - 2) // _PERIOD) - ((second - third - 2) // _PERIOD) for first, second, third, last in pattern
    )


def from_pattern(name: str, pattern: Pattern, num_microbatches: int) -> Schedule:
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
