"""What is known of one direction of a link and of one stage's ops, and when that changed.

A message of size n takes `latency + n / bandwidth`, and longer where packets were lost. Latency and bandwidth can be
told apart only where messages of different sizes passed; loss shows as a share of messages far above the others.

    ms of F + I + W, stage 3
     |                       x x x x x x x
     |                                          factors  F 1.3, I 1.3, W 1.3: costs from now on
     | x x x x x x x x x x x
     +------------------------------------- half iterations

A stage is watched as a whole, with the change points of links (changes.py), and each kind of op gets a factor of its
own: how many times as long it takes as before the first change. What the job assumed need not be right for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median

from penstock.control.changes import USUAL, Change, Detector, Watch, deviation, slope
from penstock.control.events import Link, OpTimes, Transfers, show_link
from penstock.cost import Costs


class Cause(StrEnum):
    """Why a link is late, as far as its messages tell.

    What helps differs: against latency more slack, and more receives posted; against a busy link less volume, or
    another path; against loss another path.

    Examples:
        >>> import penstock as ps
        >>> [cause.value for cause in ps.control.Cause]
        ['latency', 'bandwidth', 'occupancy', 'loss', 'delay']
    """

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    OCCUPANCY = "occupancy"
    """The link is busy with each message: because of its size, or for another reason that equal sizes do not show."""
    LOSS = "loss"
    DELAY = "delay"
    """Latency, bandwidth or occupancy: sizes are equal, and too few messages were under way together to tell
    which.
    """


_STEP = 16
"""Messages that a step has at least, in an iteration of several: half of them still tell how late they are."""


@dataclass(frozen=True)
class LinkEstimate:
    """One direction of a link during some iterations.

    Attributes:
        delay: median time of a message by itself, in ms.
        mean: mean time of a message, in ms, late ones included.
        late_share: share of messages that took far longer than others of their size, as lost packets cause it.
        by_size: the part of `delay`, in ms, that grows with a message's size; None where sizes do not tell.
        busy: the part of `delay`, in ms, during which the link is busy with the message, so that later ones wait;
            None where neither sizes nor messages under way together tell.
        held: share of messages that arrived together with the one before, as lost packets cause it in a stream.
    """

    delay: float
    mean: float
    late_share: float
    by_size: float | None
    busy: float | None
    held: float


_LEAST_SPREAD = 1.5
"""Largest size divided by smallest from which on latency and bandwidth are told apart."""
_FEWEST = 3
"""Messages of one size that a fit takes into account."""
LATE = 8.0
"""Deviations above its expected time from which on a message counts as late."""
COUNTED = 16
"""Messages over which the share of late ones is counted. One of four would say little."""
LATE_SHARE = 0.15
"""Share of late messages that indicates loss, if it lasts for several iterations. 1% of wild values stays far
below.
"""


def estimate(reports: Sequence[Transfers], least: float = 0.0) -> LinkEstimate:
    """Estimates one direction of a link from what its receiver reports of some iterations.

    What grows with size is told by the median slope through the median of each size, so outliers do not move it.

    Args:
        reports: one of each iteration.
        least: the smallest difference that matters, in ms.
    """
    messages = [message for report in reports for message in report.messages]
    times = [ms for _, ms in messages]
    rows: dict[float, list[float]] = {}
    for size, ms in messages:
        rows.setdefault(size, []).append(ms)
    middle = {size: median(each) for size, each in sorted(rows.items())}
    points = [(size, ms) for size, ms in middle.items() if len(rows[size]) >= _FEWEST]
    by_size = None
    if len(points) > 1 and points[-1][0] >= _LEAST_SPREAD * points[0][0]:
        by_size = max(0.0, slope(points) or 0.0) * median(size for size, _ in messages)
    rests = [ms - middle[size] for size, ms in messages]
    bound = max(LATE * deviation(rests), 0.5 * median(times), least)
    late = sum(rest > bound for rest in rests) / len(rests)
    busy = _busy(reports)
    held = fmean(report.held for report in reports)
    return LinkEstimate(median(times), fmean(times), late, by_size, by_size if busy is None else busy, held)


def _busy(reports: Iterable[Transfers]) -> float | None:
    """How long the link was busy with a message (ms) in the median iteration that tells."""
    measured = [report.busy for report in reports if report.busy is not None]
    return median(measured) if measured else None


def cause_of(before: LinkEstimate, after: LinkEstimate) -> Cause:
    """What changed most about a link between two estimates.

    It is loss if messages far above the others make up most of the change, or hold up others. Otherwise it is what
    explains more of the change of a message of median time: latency, or how long the link is busy with it.
    """
    rise = after.delay - before.delay
    in_late = (after.mean - after.delay) - (before.mean - before.delay)
    if abs(after.late_share - before.late_share) >= LATE_SHARE / 2 and abs(in_late) > abs(rise):
        return Cause.LOSS
    if after.held - before.held >= LATE_SHARE:
        return Cause.LOSS
    if after.by_size is not None and before.by_size is not None and after.by_size - before.by_size > abs(rise) / 2:
        return Cause.BANDWIDTH
    if after.busy is None:
        return Cause.DELAY
    return Cause.OCCUPANCY if abs(after.busy - (before.busy or 0.0)) > abs(rise) / 2 else Cause.LATENCY


@dataclass(frozen=True)
class LinkChange:
    """A verified change of one direction of a link.

    Attributes:
        link: the link, as (from, to).
        change: the levels before and after, in ms, or shares of late messages.
        cause: what it is attributed to, see `Cause`.
        num_iterations: iterations since it began.
        before: the estimate before.
        after: the estimate since.
        of_share: whether the levels are shares of late messages.
    """

    link: Link
    change: Change
    cause: Cause
    num_iterations: int
    before: LinkEstimate
    after: LinkEstimate
    of_share: bool = False

    def __str__(self) -> str:
        before, after = self.change.before, self.change.after
        if self.of_share:
            return (
                f"{after:.0%} of the messages of link {show_link(self.link)} are late instead of {before:.0%} (loss)"
            )
        return f"messages of link {show_link(self.link)} take {after:.3g} ms instead of {before:.3g} ({self.cause})"


class LinkWatch(Watch[Transfers, LinkChange]):
    """Follows one direction of a link by what its receiver reports.

    A late link delays every message. Where ranks share cores, some messages also wait for a core at their receiver,
    and others do not. So the least delay of half an iteration tells of the link, and the median tells of the machine.
    Small messages say nothing of bandwidth, so the least is taken over the larger half of the messages.

    A link that delays only some messages shows as loss: as a share of messages that are far later than others were
    before. Late messages widen the spread of all, so the spread of messages before them says which are late.
    """

    def __init__(self, link: Link, least: float, num_updates: int = 1) -> None:
        super().__init__(Detector(least))
        self.link = link
        self._num_updates = num_updates
        self._least = least
        self._late = Detector(LATE_SHARE)
        self.detectors.append(self._late)
        self._counted = 0, 0
        self._bound, self._is_lossy = 0.0, False

    @property
    def level(self) -> float:
        """The least delay (ms) of the larger messages of half an iteration, in the median since the last verified
        change; 0 before anything was measured.
        """
        return self.detector.level or 0.0

    @property
    def busy(self) -> float | None:
        """How long the link is busy with a message (ms) since the last verified change; None if unknown."""
        return _busy(self.reports)

    def again(self, change: LinkChange) -> LinkChange:
        """A change of this link, with its cause determined again from what is known now."""
        if not self.reports or change.cause is Cause.LOSS:
            return change
        return replace(change, cause=cause_of(change.before, estimate(self.reports, self._least)))

    def times(self, back: int) -> tuple[float, ...]:
        """The times (ms) of one iteration's messages, in order; `back` is 0 for the latest."""
        return self.reports[-1 - back % len(self.reports)].ms if self.reports else ()

    def restart(self) -> None:
        """Forgets everything, because messages take another path from now on."""
        self.detector.restart()
        self.take_for_usual()
        self.reports.clear()

    def take_for_usual(self) -> None:
        """From here on as many messages as now may be late: the link is not the reason."""
        self._late.restart()
        self._counted, self._is_lossy = (0, 0), False

    def _suspect(self, report: Transfers) -> tuple[Change, int] | None:
        found, self._is_loss, parts = None, False, _parts(report.messages, self._num_updates)
        for part in parts:
            change = self.detector.feed(_least(part))
            if change is not None:
                found, self._is_loss = change, False
                self.take_for_usual()
            elif self.detector.pending == 0 and self.reports:  # many messages above the level that stays are loss
                late = self._count_late(part)
                if late is not None:
                    found, self._is_loss, self._is_lossy = late, True, late.rose
        return None if found is None else (found, len(parts))

    def _verified(
        self, change: Change, num_iterations: int, before: Sequence[Transfers], after: Sequence[Transfers]
    ) -> LinkChange:
        old, new = estimate(before, self._least), estimate(after, self._least)
        cause = Cause.LOSS if self._is_loss else cause_of(old, new)
        return LinkChange(self.link, change, cause, num_iterations, old, new, self._is_loss)

    def _count_late(self, messages: Sequence[tuple[float, float]]) -> Change | None:
        """Takes the share of late messages, once there are enough for it to mean something."""
        late, num = self._counted
        if num == 0 and not self._is_lossy and not self._late.pending:
            single = [ms for report in self.reports for ms in report.ms]
            self._bound = self.level + max(self._least, 0.5 * self.level, LATE * deviation(single))
        late, num = late + sum(ms > self._bound for _, ms in messages), num + len(messages)
        if num < COUNTED:
            self._counted = late, num
            return None
        self._counted = 0, 0
        return self._late.feed(late / num)


def _parts(messages: Sequence[tuple[float, float]], num_updates: int) -> list[Sequence[tuple[float, float]]]:
    """The iteration's first and second half; as many parts as those of its steps, where it has updates in it; the
    whole iteration twice if it is too short to be divided.
    """
    num = 2 * max(1, min(num_updates, len(messages) // _STEP))
    cuts = [len(messages) * part // num for part in range(num + 1)]
    return [messages[a:b] for a, b in pairwise(cuts)] if len(messages) > num + 1 else [messages, messages]


def _least(messages: Sequence[tuple[float, float]]) -> float:
    """The least time (ms) of the messages that have a middling size or more."""
    middling = median(size for size, _ in messages)
    return min(ms for size, ms in messages if size >= middling)


COMPUTE = "compute"
"""The cause in decisions that slow ops lead to; the others are causes of links."""
_SAME = 0.05
"""A factor this near to 1 counts as 1: the stage is as it was."""

_AS_ASSUMED = 0.005
"""Share of its assumed time that an op may differ by and still count as taking just that."""

Factors = tuple[tuple[int, str, float], ...]
"""(stage, kind, factor): ops take `factor` times as long as assumed. Ops that are not named take as long as
assumed.
"""


@dataclass(frozen=True)
class ComputeChange:
    """A verified change of how long a stage's ops take.

    Attributes:
        rank: the rank whose ops changed.
        stage: the stage of these ops.
        change: what one op of each kind takes together, before and after, in ms.
        num_iterations: iterations since it began.
    """

    rank: int
    stage: int
    change: Change
    num_iterations: int

    cause = COMPUTE

    def __str__(self) -> str:
        before, after = self.change.before, self.change.after
        where = f"stage {self.stage} on rank {self.rank}"
        return f"ops of {where} take {after:.3g} ms instead of {before:.3g}, one of each kind together (compute)"


class ComputeWatch(Watch[OpTimes, ComputeChange]):
    """Follows one stage's op times.

    Attributes:
        rank, stage: whose.
        factors: by kind, how many times as long its ops take as before the first change. Kinds that did not change
            are left out.
    """

    def __init__(self, rank: int, stage: int, least: float) -> None:
        # Ops take more even times than messages: a smaller change means something.
        super().__init__(Detector(least, replace(USUAL, share=USUAL.share / 2)))
        self.rank, self.stage = rank, stage
        self.factors: dict[str, float] = {}
        self._before: dict[str, float] | None = None

    @property
    def latest(self) -> float | None:
        """The time of one of each kind (ms) in the latest iteration."""
        return sum(median(halves) for _, halves in self.reports[-1].ms) if self.reports else None

    def _suspect(self, report: OpTimes) -> tuple[Change, int] | None:
        found = None
        for half in (0, 1):
            found = self.detector.feed(sum(halves[half] for _, halves in report.ms)) or found
        return None if found is None else (found, 2)

    def _verified(
        self, change: Change, num_iterations: int, before: Sequence[OpTimes], after: Sequence[OpTimes]
    ) -> ComputeChange:
        if self._before is None:
            self._before = _levels(before)
        known = ((kind, ms, self._before.get(kind, 0.0)) for kind, ms in _levels(after).items())
        factors = {kind: ms / usual for kind, ms, usual in known if usual > 0}
        self.factors = {kind: factor for kind, factor in factors.items() if abs(factor - 1) > _SAME}
        return ComputeChange(self.rank, self.stage, change, num_iterations)


def _levels(reports: Sequence[OpTimes]) -> dict[str, float]:
    """The median of each kind."""
    times: dict[str, list[float]] = {}
    for kind, halves in (each for report in reports for each in report.ms):
        times.setdefault(kind, []).extend(halves)
    return {kind: median(each) for kind, each in times.items()}


def factors_of(ops: Iterable[OpTimes], costs: Costs, slowed: float = 1.0) -> Factors:
    """How many times as long as the costs say each kind of op took on each stage in one step. Kinds that took as long
    as the costs say are left out.

    Args:
        ops: of the step.
        costs: what ops were assumed to take.
        slowed: how many times as long all ops took in the step for a reason that is to be left out.
    """
    found = [
        (each.stage, kind, fmean(halves) / assumed / slowed)
        for each in ops
        for kind, halves in each.ms
        if (assumed := _assumed(costs, each.stage, kind)) > 0
    ]
    return tuple(sorted(each for each in found if abs(each[2] - 1) > _AS_ASSUMED and each[2] > 0))


def load_of(ops: Iterable[OpTimes], costs: Costs) -> float | None:
    """How many times as long as the costs say all ops of one step took together; None where none were reported."""
    rows = [(fmean(halves), _assumed(costs, each.stage, kind)) for each in ops for kind, halves in each.ms]
    assumed = sum(usual for _, usual in rows if usual > 0)
    return sum(ms for ms, usual in rows if usual > 0) / assumed if assumed else None


def _assumed(costs: Costs, stage: int, kind: str) -> float:
    """What the costs say that an op takes (ms); 0 for a stage or kind that they do not have."""
    rows = {"F": costs.f, "I": costs.i, "W": costs.w, "B": costs.b}
    return rows[kind][stage] if kind in rows and stage < costs.num_stages else 0.0


def scaled(costs: Costs, factors: Factors) -> Costs:
    """Costs whose ops take `factors` times as long as assumed. If only B was measured, I and W follow it; if I and W
    were, B follows them.
    """
    if not factors:
        return costs
    rows = {kind: list(row) for kind, row in (("F", costs.f), ("I", costs.i), ("W", costs.w), ("B", costs.b))}
    named = {(stage, kind) for stage, kind, _ in factors}
    for stage, kind, factor in factors:
        if kind in rows:
            rows[kind][stage] *= factor
    for stage in {stage for stage, _, _ in factors}:
        if (stage, "B") not in named and costs.i[stage] + costs.w[stage] > 0:
            rows["B"][stage] *= (rows["I"][stage] + rows["W"][stage]) / (costs.i[stage] + costs.w[stage])
        elif (stage, "B") in named and not {(stage, "I"), (stage, "W")} & named and costs.b[stage] > 0:
            ratio = rows["B"][stage] / costs.b[stage]
            rows["I"][stage] *= ratio
            rows["W"][stage] *= ratio
    return replace(costs, f=rows["F"], i=rows["I"], w=rows["W"], b=rows["B"])
