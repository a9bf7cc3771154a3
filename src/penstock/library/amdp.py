"""AMDP: asynchronous multi-directional pipelines (paper under review, sections 3.1 to 3.4).

As in PipeDream the pipelines never flush, but each lets only two microbatches in before its first backward, so
that a microbatch meets at most one update between its F and its B. One such pipeline keeps a rank busy 2/d of the
time; d/2 of them, laid over the ranks in both directions, fill each other's bubbles.

Where AMDP's updates stand: all ranks' at one moment, so that they cost their own time once and no more.

The pipelines are tightly coupled, each waiting for the others' ranks. An update that runs on one rank as soon as it
can holds up one pipeline, the next rank's a moment later the same one again. Where all ranks update at the same
moment, nobody waits for anybody:

    each when it can    rank 0 | F F B B F U B F B        all at once    rank 0 | F F B B F B U F B
                        rank 1 | F F B U B F B F B                       rank 1 | F F B B F B U F B

That moment is when the gradients of the window are there on every stage, the first one's being the last. No
update comes so late that a forward would miss it which must not (`amdp_order`), or between the F and the B of the
last stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, inf, isfinite

from penstock.cost import Costs, Links
from penstock.engine.tolerance import EPSILON
from penstock.library.amdp_order import OrderOptions, Pipelines, RanRows, StageTimes, ran_with
from penstock.library.options import at_least, whole_multiple
from penstock.schedule import Op, Schedule, ScheduleError, Updates, Windows, known_to, with_tentative_updates
from penstock.schedule.op import PREDICT
from penstock.schedule.placement import multi_directional
from penstock.schedule.updates import NEWEST, OWNER, TENTATIVE, with_ops_at
from penstock.schedule.weight_versions import updates_ahead

_TRIED_BLOCKS, _TRIED_WINDOWS = 32, 4
"""How much of a run is timed, at least, to tell which way of ordering is best."""
_WORTH_IT = 0.01


def amdp(
    num_ranks: int,
    num_microbatches: int,
    f: float | Sequence[float] = 1.0,
    b: float | Sequence[float] = 2.0,
    window: int | None = None,
    max_mismatch: int = 1,
    u: float | Sequence[float] = 0.0,
    message: float = 0.0,
    update_message: float = 0.0,
    rule: str = NEWEST,
) -> Schedule:
    """d ranks, d/2 pipelines, microbatch m on pipeline m mod d/2, in blocks of d microbatches.

    Stage i of an even pipeline j lies on rank (2j + i) mod d, of an odd one on rank (2j - i + d + 1) mod d.
    Four ranks, six microbatches:

        rank 0 | 0F0 0F2 0F4 3F1 3B1 3F3 3B3 .   0B0 .   0B2 ...
        rank 1 | .   1F0 2F1 1F2 2F3 1F4 2B1 1B0 2B3 1B2 2F5 ...
        rank 2 | .   1F1 2F0 1F3 2F2 1F5 2B0 1B1 2B2 1B3 2F4 ...
        rank 3 | 0F1 0F3 0F5 3F0 3B0 3F2 3B2 .   0B1 .   0B3 ...

    Where two pipelines want one rank, the earlier block goes first, and within it the op that was ready first.
    At the boundary of two blocks stage 0 reads floor(b/f) microbatches more, so that forwards of the next block
    fill the bubbles at the end of this one and at its own beginning. Where another way (b/f rounded up, backwards
    first, times taken as even) is more than a hundredth faster over the first blocks, it is that way.

    Ranks are busy 0.99 of the time at d = 4, 8, 12, 16 over 40 blocks with b = 2f; 0.85 without the reads ahead.
    So "d/2 pipelines fully eliminate bubbles" (section 3.2) holds for b = f and d a multiple of 4, by this order of
    blocks; first in, first out over all blocks alike, as the paper has it, already leaves bubbles at d = 8. Where
    d/2 is odd, one direction has a pipeline more and about 0.9 is reached. Peak d + 1 activations at b = f and d a
    multiple of 4, up to half as many again at b = 2f.

    With a `window` the updates are ops of the order (section 3.3), all ranks' at one moment: when the gradients of
    the window are there on every stage. So an update costs its time once; where each runs in the next bubble of its
    rank, as in the paper, it costs up to d/2 times that. Two rules beyond the paper make the bound hold for any
    times:

    - A forward of microbatch m waits for the update that closes the window of microbatch m - d. So only the first d
      microbatches of a window may meet an update, and only one. Without this the reads ahead break both: where
      b = 2f two updates with windows of d, and the first 3d/2 microbatches of longer ones.
    - On the last stage no update comes between a microbatch's F and B: Lemma 1's min(2, d - i) - 1 holds on all.

    The gradients of two windows may be under way at once, never of three. Four ranks, windows of eight, rank 1:

        ... 2B7 1B6 1F10 2B9 1U0 2U1 2F11 1B8 1F12 2B11 1B10 2F13 ...

    By rule `tentative`, PREDICT stands a forward and a backward earlier than the first late forward that reads its
    weights, and GIVE another forward earlier. Without this lead the late forwards know more, but ranks wait for one
    another. Of orders that take equally long, the builder chooses the one whose late forwards miss least of their
    window's gradient.

    An odd d cannot be placed: d/2 is no number of pipelines, and two of opposite directions would have a stage's
    copies on one rank (2i = 2(j' - j) + 1 mod d then has a solution). d = 2 is one pipeline that reads ahead.

    Args:
        f, b, u: times of a stage's F, B and its owner's U: one for all, or one per stage.
            Their ratios shape the order.
        window: microbatches that an update gathers, a multiple of the d of a block; without it updates are left out.
        max_mismatch: most updates between a microbatch's F and B on any stage; 0 drains the pipelines at each update.
        message: how long an activation or gradient takes from rank to rank, in the unit of f and b.
        update_message: how long a stage's gradients take to its owner, and its parameters back.
        rule: which weights ops read, if there is a window, as in `Updates`.
    """
    whole_multiple("amdp", "ranks", num_ranks, "that each pipeline takes", 2)
    updates = None
    if window is not None:
        whole_multiple("amdp", "a window", window, "microbatches of a block", num_ranks)
        at_least("amdp", "update as max_mismatch", max_mismatch, 0)
        updates = Updates(window, max_mismatch, rule)
    times = StageTimes(
        _per_stage("f", f, num_ranks),
        _per_stage("b", b, num_ranks),
        *_per_stage("message", message, 1, zero=True),
        *_per_stage("update_message", update_message, 1, zero=True),
    )
    maker = _Maker(num_ranks, num_microbatches, times, _per_stage("u", u, num_ranks, zero=True), updates)
    return maker.schedule(maker.best_options())


class _Maker:
    """Makes the schedule by one way or another, and tells which is best."""

    def __init__(
        self, num_ranks: int, num_microbatches: int, times: StageTimes, u: tuple[float, ...], updates: Updates | None
    ) -> None:
        self._placement = multi_directional(num_ranks)
        self._num_microbatches, self._times, self._updates = num_microbatches, times, updates
        window = 0 if updates is None else updates.window
        self._is_tentative = updates is not None and updates.rule == TENTATIVE
        self._num_tried = min(num_microbatches, max(_TRIED_BLOCKS * num_ranks, _TRIED_WINDOWS * window))
        self._costs = Costs(times.f, times.b, [0.0] * num_ranks).with_other({("U", s): ms for s, ms in enumerate(u)})

    def best_options(self) -> OrderOptions:
        """The paper's way, or the one that is faster by more than a little, over the first blocks.

        By rule `tentative`, of the ways that take no longer, the one whose late forwards know most of their window.
        """
        from penstock.simulation import simulate  # here, since other schedules do without

        tried: list[tuple[float, Schedule, OrderOptions]] = []
        least = inf
        for options in self._candidates():
            made = self.schedule(options, self._num_tried)
            took = simulate(made, self._costs, links=Links(default=self._times.message)).makespan
            tried.append((took, made, options))
            if took < least * (1 - _WORTH_IT):
                best, least = options, took
        if self._is_tentative:
            *_, best = min((each for each in tried if each[0] <= least + EPSILON), key=lambda each: _missed(each[1]))
        return best

    def schedule(self, options: OrderOptions, num_microbatches: int | None = None) -> Schedule:
        num = self._num_microbatches if num_microbatches is None else num_microbatches
        placement, updates = self._placement, self._updates
        ran = ran_with(placement.pipelines, num, options, updates)
        rows: Sequence[Sequence[Op]] = ran.rows
        if updates is not None:
            windows = Windows(updates.window, num, placement.num_pipelines)
            rows = with_updates_at_once(ran, placement.pipelines, windows, updates, options.times)
        pipeline_of = tuple(m % placement.num_pipelines for m in range(num))
        made = Schedule("amdp", placement, tuple(map(tuple, rows)), pipeline_of, updates=updates)
        if not self._is_tentative:
            return made
        f, b = (sum(each) / placement.num_stages for each in (self._times.f, self._times.b))
        message = max(f, self._times.update_message)
        return with_tentative_updates(made, lambda op: b if op.kind == PREDICT else options.times.of(op), message)

    def _candidates(self) -> Iterator[OrderOptions]:
        f, b = self._times.f, self._times.b
        ratio = sum(b) / sum(f)
        even = replace(self._times, f=(sum(f) / len(f),) * len(f), b=(sum(b) / len(b),) * len(b))
        uneven = max(f) > min(f) or max(b) > min(b)
        drains = self._updates is not None and self._updates.max_mismatch == 0
        for read_ahead in sorted({int(ratio + EPSILON), ceil(ratio - EPSILON)}):
            for times in (self._times, even) if uneven else (self._times,):
                for backward_first in (False, True):
                    for by_turns in (True, False) if drains else (True,):
                        yield OrderOptions(times, read_ahead, backward_first, by_turns)


def _missed(schedule: Schedule) -> int:
    """How many backwards of the window before theirs late forwards don't know, summed over late forwards."""
    assert schedule.updates is not None
    known, window = known_to(schedule), schedule.updates.window
    return sum(
        window - len(known.get((stage, m // window - 1), ()))
        for stage in range(schedule.num_stages)
        for m, ahead in updates_ahead(schedule, stage).items()
        if ahead > 0
    )


def _per_stage(name: str, given: float | Sequence[float], num_stages: int, zero: bool = False) -> tuple[float, ...]:
    """One time per stage, of a number for all or one for each."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        times = tuple(given)
    else:
        times = (given,) * num_stages
    if len(times) != num_stages:
        raise ScheduleError(
            f"amdp: {name} has {len(times)} times; give one number, or one per stage: {num_stages}", rule="options"
        )
    for time in times:
        real = isinstance(time, int | float) and isfinite(time)
        if not real or time < 0 or (time == 0 and not zero):
            least = "of at least 0" if zero else "above 0"
            raise ScheduleError(f"amdp: {name} is {given!r}; give a time {least}", rule="options")
    return times


def with_updates_at_once(
    ran: RanRows, pipelines: Pipelines, windows: Windows, updates: Updates, times: StageTimes
) -> list[tuple[Op, ...]]:
    """The rows with all updates in them.

    An update goes before the first op that starts at its moment or later, so all rows are in one order of time: an
    owner's after the backwards that it waits for, and not after its copies'. Those are meant to come later than it by
    what parameters take to them.
    """
    num_stages, num_pipelines = len(pipelines[0]), len(pipelines)
    reach = num_stages * (updates.max_mismatch or 0)
    placed: list[list[tuple[int, int, bool, Op]]] = [[] for _ in ran.rows]
    starts = [[ran.starts[op] for op in row] for row in ran.rows]
    copies = {
        (stage, k): _Copy(ran.rows[rank], starts[rank], stage, k, pipelines)
        for k, ranks in enumerate(pipelines)
        for stage, rank in enumerate(ranks)
    }
    moment = 0.0
    for update in range(windows.num_updates):
        window = windows.microbatches(update)
        # A short last window may have its gradients earlier than the one before, and still updates after it.
        moment = max(moment, *(_summed(ran, times, stage, window, num_pipelines) for stage in range(num_stages)))
        for stage in range(num_stages):
            owner_latest = inf
            for k in reversed(range(num_pipelines)):
                u = Op("U", stage, windows.number(update, k))
                wanted = moment if k == OWNER else moment + times.update_message
                if stage == num_stages - 1:  # there not every slot may be taken; the one it ran in may
                    wanted = max(wanted, ran.starts[u])
                slot, time = copies[stage, k].slot(min(wanted, owner_latest), window.stop + reach)
                owner_latest = min(owner_latest, time)
                placed[pipelines[k][stage]].append((slot, update, k != OWNER, u))
    in_order = ([(slot, u) for slot, _, _, u in sorted(found)] for found in placed)
    return list(map(with_ops_at, ran.rows, in_order))


def _summed(ran: RanRows, times: StageTimes, stage: int, window: range, num_pipelines: int) -> float:
    """When the owner of a stage has the gradients of a window from all copies (ms)."""
    return max(
        ran.starts[Op("B", stage, m)] + times.b[stage] + (0.0 if m % num_pipelines == OWNER else times.update_message)
        for m in window
    )


class _Copy:
    """The ops of one copy of a stage in its rank's row, and the slots between which its updates may stand."""

    def __init__(
        self, row: Sequence[Op], starts: Sequence[float], stage: int, pipeline: int, pipelines: Pipelines
    ) -> None:
        self._starts = starts
        mine = [
            (step, op)
            for step, op in enumerate(row)
            if op.stage == stage and op.microbatch % len(pipelines) == pipeline
        ]
        self._forwards = [(op.microbatch, step) for step, op in mine if op.kind == "F"]
        begun = [0] * (len(row) + 1)
        for step, op in mine if stage == len(pipelines[0]) - 1 else ():
            begun[step + 1] = 1 if op.kind == "F" else -1
        self._open = list(accumulate(begun))
        """At each slot of the last stage the forwards whose backwards come later; no update may stand there."""

    def slot(self, time: float, first_to_wait: int) -> tuple[int, float]:
        """The last slot up to a time and before the forwards that wait for the update; when what follows starts."""
        slot = bisect_left(self._starts, time)
        place = bisect_left(self._forwards, (first_to_wait, -1))
        if place < len(self._forwards):
            slot = min(slot, self._forwards[place][1])
        while self._open[slot]:
            slot -= 1
        return slot, self._starts[slot] if slot < len(self._starts) else inf
