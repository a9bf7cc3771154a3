"""Trials: what a change gains is measured, and a change that gains less than was promised is taken back.

    ms a step
     |            x x x x                        before: the steps since the links changed that the change answers
     |                     o                     the first step with the change is left out: buffers, connections
     |                       o o o o o           after: the median of five, held against the median before
     | x x x x x                                 calm: the steps before the links changed; they say what noise is
     +------------------------------------------ steps
               |          |         |
          links change  switched  verdict

A change stays if steps became faster by more than noise explains. Noise is the deviation of the calm steps, and the
standard error of a median follows from it. Where steps are not faster than the calm ones, and what was to be answered
is no longer there, it was a burst that passed: then the change is taken back too. Before anything is tried, what is
promised must be more than a trial could tell from noise; else it would be taken back for nothing.

Where links change all the time no two steps had the same links, and medians of steps tell little. Each step is then
held against its own simulation, under the links that were measured in it. Where that explains most of how steps
differ, what is left is the noise, and what ran before is simulated under the links of each step since:

    gain of a step = (what ran before, simulated with the links of this step) + (what steps before took
                     longer than simulated, in the median) - (this step as measured)

Where it does not explain the steps, the medians decide, and a trial in which links changed says nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Protocol

from penstock.control.advice import Obstacle
from penstock.control.configuration import Configuration
from penstock.control.events import Link
from penstock.control.measured import LinksOfStep
from penstock.control.robust_statistics import deviation
from penstock.engine.tolerance import EPSILON

STEPS = 5
"""Steps of a trial that count, after the first one."""
EARLY = 3
"""Steps after which a change that is worse beyond doubt is taken back already."""
LATER = 16
"""Steps after which a change that stayed is looked at once more."""
TELLS = 3.0
"""Standard errors that a change must promise to be tried, and that steps must be slower by to be a reason."""
CLEAR = 0.25
"""A rise by this share of a step is clear: it does not wait because of changes that were taken back before."""
ANSWERS = 2.0
"""Standard errors that it must promise where steps have become slower."""
STANDS = 2.0
"""Standard errors by which it must be faster to stay."""
WORSE = 0.02
"""Share of the step by which a change may not be slower."""
MEDIAN = 1.2533
"""The standard error of a median is this times that of a mean, where noise is normal."""
EXPLAINS = 0.75
"""Share of the squared differences between steps that simulation must account for, for it to speak for them."""
_CALM, _SINCE, _LATEST = 32, 16, 8
_FEWEST = 6
"""Steps that are enough to say whether simulation explains them."""
_ONE_EVENT = 6
"""Steps between two changes up to which they count as one: the two directions of a link are verified one by one."""


NO_LINKS: Mapping[Link, float] = MappingProxyType({})


class StepSimulation(Protocol):
    """What a step would take (ms) by simulation with a configuration."""

    def __call__(
        self, configuration: Configuration, late: bool = True, sooner: Mapping[Link, float] = NO_LINKS
    ) -> float:
        """Simulates with the links that were measured in the step, some of them `sooner` by so many ms; or, if not
        `late`, with links that take no time.
        """


@dataclass(frozen=True)
class TimedStep:
    """A step as measured.

    Attributes:
        ms: what it took.
        simulated: what simulation says of it; None where links were not measured.
        links: what was measured of links in it.
    """

    ms: float
    simulated: StepSimulation | None = None
    links: LinksOfStep | None = None

    @property
    def least(self) -> Mapping[Link, float]:
        """The smallest delay (ms) of a message, by direction of each link."""
        return NO_LINKS if self.links is None else self.links.least


@dataclass(frozen=True)
class SimulationResidual:
    """How steps that simulation explains still differ from it.

    Attributes:
        offset: ms that a step takes longer than simulated, in the median.
        noise: the deviation (ms) of what steps take longer than simulated.
    """

    offset: float
    noise: float


def explained(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]] = ()
) -> SimulationResidual | None:
    """Whether simulation accounts for most of how steps differ.

    Args:
        before: steps, each as measured and as simulated, in ms. The offset is theirs.
        after: steps of another configuration, which must be as much longer than simulated as those before.

    Returns:
        None if there are too few steps; if they differ by no more than `WORSE` of their mean, so that
            there is nothing
        to explain; or if less than `EXPLAINS` of their squared differences is accounted for.
    """
    both = (*before, *after)
    if not before or len(both) < _FEWEST:
        return None
    offset, mean = median(ms - simulated for ms, simulated in before), fmean(ms for ms, _ in both)
    left = sum((ms - simulated - offset) ** 2 for ms, simulated in both)
    differ = sum((ms - mean) ** 2 for ms, _ in both)
    if differ < len(both) * (WORSE * mean) ** 2 or left > (1 - EXPLAINS) * differ:
        return None
    rows = [[ms - simulated for ms, simulated in row] for row in (before, after) if row]
    return SimulationResidual(offset, max(map(deviation, rows)))


class StepTimes:
    """The steps that ran one configuration: before the last verified change of links or ops, and since it began.

    Args:
        ran: the configuration, where steps are to be held against their simulation.
    """

    def __init__(self, ran: Configuration | None = None) -> None:
        self.ran = ran
        self._calm: deque[TimedStep] = deque(maxlen=_CALM)
        self._since: deque[TimedStep] = deque(maxlen=_SINCE)
        self._num_since: int | None = None
        self._rose = False

    def add(self, step: TimedStep) -> None:
        """Takes the next step."""
        if self._num_since is None:
            self._calm.append(step)
        else:
            self._since.append(step)
            self._num_since += 1

    def changed(self, num_steps: int, rose: bool) -> None:
        """A verified change began in the last `num_steps` steps; `rose`: links became later, or ops slower."""
        if self._num_since is not None and self._num_since <= _ONE_EVENT:
            self._rose = self._rose or rose
            return
        self._rose = rose
        if self._num_since is not None:  # what the last change led to is what is usual now
            self._calm = deque(self._since, maxlen=_CALM)
        self._num_since = min(num_steps, len(self._calm))
        moved = [self._calm.pop() for _ in range(self._num_since)]
        self._since = deque(reversed(moved), maxlen=_SINCE)

    def resume(self) -> None:
        """The configuration runs again, while links are later than in its steps so far."""
        self._calm.extend(self._since)
        self._since.clear()
        self._num_since, self._rose = 0, True

    @property
    def calm(self) -> Sequence[float]:
        """The steps (ms) before the change; all steps if there was none."""
        return tuple(step.ms for step in self._calm)

    @property
    def now(self) -> Sequence[float]:
        """How long steps take (ms) as they are now."""
        return tuple(step.ms for step in self.present)

    @property
    def present(self) -> Sequence[TimedStep]:
        """The steps as they are now: those since the change, without the one in which it happened; the latest steps
        if there was no change.
        """
        if self._num_since is None:
            return tuple(self._calm)[-_LATEST:]
        since = tuple(self._since)
        return since[1:] if 1 < len(since) == self._num_since else since

    @property
    def latest(self) -> Sequence[TimedStep]:
        """The latest steps, whether links changed among them or not."""
        return (*self._calm, *self._since)[-_SINCE:]

    @property
    def explained(self) -> SimulationResidual | None:
        """Whether simulation explains the latest of them."""
        return explained(both_ways(self.latest, self.ran))

    @property
    def are_enough(self) -> bool:
        """Whether it is known how much steps vary."""
        return self._rose or len(self._calm) >= _LATEST

    @property
    def noise(self) -> float:
        """The deviation (ms) of a step from those around it."""
        now = self.now if len(self.now) >= EARLY else ()
        return max((deviation(row) for row in (self.calm, now) if row), default=0.0)

    @property
    def rise(self) -> float | None:
        """How much longer steps take (ms) since links became later or ops slower; None if neither did."""
        if not self._rose or not self._calm or not self.now:
            return None
        return median(self.now) - median(self.calm)

    def error(self, num_after: int = STEPS) -> float:
        """Standard error (ms) of the difference between the median of these steps and that of so many others."""
        return error_of(self.noise, len(self.now), num_after)

    @property
    def are_clearly_slower(self) -> bool:
        """Whether steps became so much slower that this cannot be noise."""
        rise = self.rise
        return rise is not None and rise > max(CLEAR * median(self.calm), 2 * TELLS * self.error())

    def least_told(self, least_gain: float) -> float:
        """The least difference (ms) between steps that counts, and that their noise does not hide.

        Args:
            least_gain: share of a step that counts.
        """
        return max(least_gain * median(self.now), TELLS * self.error())

    def doubt(self, gain: float, least_gain: float) -> tuple[Obstacle, str] | None:
        """Why a trial of what promises to gain so much (ms) could not show it; None where it could, or nothing is
        known of steps.
        """
        if not self.now:
            return None
        if not self.are_enough:
            return Obstacle.NOISE, "too few steps have run to tell how much they vary"
        level, error, rise = median(self.now), self.error(), self.rise
        if rise is not None and rise <= self.least_told(least_gain):
            # A step that is no slower has nothing to gain back, whatever the simulation says.
            return Obstacle.ABSORBED, (
                f"measured steps are no slower for it beyond their noise of {self.noise:.3g} ms: "
                f"{median(self.calm):.4g} ms before, {level:.4g} since"
            )
        credible, needed = (gain, TELLS * error) if rise is None else (min(gain, rise), ANSWERS * error)
        if credible < max(needed, least_gain * level):
            return Obstacle.NOISE, (
                f"the best change promises {credible:.3g} of {level:.4g} ms a step, and with a noise of "
                f"{self.noise:.3g} ms a trial could not tell {needed:.3g} needed"
            )
        return None

    def would_tell(self, gain: float) -> bool:
        """Whether steps, each compared with its own simulation, would show such a gain (ms)."""
        found = self.explained
        return found is not None and gain >= TELLS * error_of(found.noise, len(self.latest))


def both_ways(
    steps: Sequence[TimedStep],
    ran: Configuration | None,
    late: bool = True,
    sooner: Mapping[Link, float] = NO_LINKS,
) -> Sequence[tuple[float, float]]:
    """Each step as measured and as simulated with `ran`, in ms. Steps that cannot be simulated are left out."""
    pairs = [(step.ms, step.simulated) for step in steps]
    return [
        (ms, simulated(ran, late, sooner)) for ms, simulated in pairs if simulated is not None and ran is not None
    ]


def error_of(noise: float, num_before: int, num_after: int = STEPS) -> float:
    """Standard error (ms) of the difference between two medians of steps with so much noise (ms)."""
    return MEDIAN * noise * (1 / max(1, num_before) + 1 / num_after) ** 0.5


@dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    Attributes:
        number: the number of the decision.
        iteration: the iteration after which this was known.
        kept: whether the change stays.
        why: the reason in words.
        before: median measured step before the change, in ms.
        after: median measured step with it, in ms.
        num_before: how many steps `before` rests on.
        num_after: how many steps `after` rests on.
        calm: median step before the links changed, in ms.
        noise: standard deviation of a step, in ms.
        promised: ms by which each step was to become shorter, by simulation.

    Examples:
        >>> import penstock as ps
        >>> verdict = ps.control.Verdict(1, 40, True, "steps are shorter", 330.0, 240.0, 5, 5, 212.0, 2.0, 85.0)
        >>> verdict.kept, verdict.before - verdict.after
        (True, 90.0)
    """

    number: int
    iteration: int
    kept: bool
    why: str
    before: float
    after: float
    num_before: int
    num_after: int
    calm: float
    noise: float
    promised: float

    def to_json(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(self).items()}

    def __str__(self) -> str:
        said = "stays" if self.kept else "is taken back"
        return (
            f"change {self.number} {said}: {self.before:.4g} ms a step before ({self.num_before} steps), "
            f"{self.after:.4g} with it ({self.num_after}); {self.why}"
        )


@dataclass(frozen=True)
class Gains:
    """What a change gained in each step, computed with the links of that step.

    Attributes:
        measured: the median gain of a step (ms); what ran before is simulated, what runs now is measured.
        simulated: the same with both simulated.
        error: the standard error of `measured` (ms).
    """

    measured: float
    simulated: float
    error: float


class ChangeTrial:
    """One change on trial, from the switch on.

    Args:
        number: of the decision. before: the steps that ran what ran before.
        promised: ms that each step is to become shorter by; 0 for going back to what is no slower.
        cause: the links that were late, and by how much (ms), by which the change was called for.
        runs: what runs now, where steps are to be held against their simulation.
    """

    def __init__(
        self,
        number: int,
        before: StepTimes,
        promised: float,
        cause: Mapping[Link, float],
        runs: Configuration | None = None,
    ) -> None:
        self.number, self.before, self.promised, self.cause = number, before, promised, dict(cause)
        self.runs = runs
        self.void = False
        """Whether links changed since the switch, so that steps before and after it had different ones."""
        self._after: list[TimedStep] = []
        self._has_begun = self._decided = False

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet if the change stays."""
        return not self._decided

    def add(self, iteration: int, step: TimedStep, is_there: bool) -> Verdict | None:
        """Takes a step that ran the change.

        Args:
            is_there: whether what the change answers is still seen.

        Returns:
            The verdict, with the step that it is known after; once more where a change that stayed turns out to be
            slower after all.
        """
        if not self._has_begun:  # buffers and connections change in the first step
            self._has_begun = True
            return None
        self._after.append(step)
        num = len(self._after)
        if self._decided:
            return self._look_again(iteration) if num == LATER else None
        if num == EARLY and not self.void and self._is_slower_beyond_doubt():
            return self._end(iteration, False, "it is slower beyond doubt")
        return self._judge(iteration, is_there) if num == STEPS else None

    @property
    def _level(self) -> float:
        return median(self.before.now) if self.before.now else 0.0

    @property
    def _ms(self) -> Sequence[float]:
        return [step.ms for step in self._after]

    def _gains(self) -> Gains | None:
        """The gain of each step since the switch, with the links that it had; None if simulation does not
        explain the steps.
        """
        ran, runs = self.before.ran, self.runs
        before, after = both_ways(self.before.latest, ran), both_ways(self._after, runs)
        if ran is None or len(after) < len(self._after):
            return None
        found = explained(before, after) or self._explained_by_delays(before, after)
        if found is None:
            return None
        instead = both_ways(self._after, ran, sooner=self._added())
        return Gains(
            median(simulated + found.offset - ms for ms, simulated in instead),
            median(old - new for (_, old), (_, new) in zip(instead, after, strict=True)),
            error_of(found.noise, len(before), len(after)),
        )

    def _added(self) -> Mapping[Link, float]:
        """What delegates may add (ms) to the delays of links that they have carried since the switch.

        These delays are now measured on another path. What most of them increased by is attributed to the delegates,
        and not to the links.
        """
        if self.before.ran is None or self.runs is None:
            return NO_LINKS
        moved = sorted(set(self.runs.delegated) - set(self.before.ran.delegated))
        rows = [[step.least for step in row] for row in (self.before.present[-len(self._after) :], self._after)]
        rises = [
            _rise(*([least[way] for least in row] for row in rows))
            for link in moved
            for way in (link, link[::-1])
            if all(row and all(way in least for least in row) for row in rows)
        ]
        return dict.fromkeys(moved, max(0.0, median(rises) if rises else 0.0))

    def _explained_by_delays(
        self, before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
    ) -> SimulationResidual | None:
        """If links changed since the switch, it is enough that delays account for most of the time that steps have
        taken more since then than without delays, and that this is more than noise.
        """
        if not self.void or len(before) < EARLY or not after:
            return None
        rows = [[ms - simulated for ms, simulated in row] for row in (before, after)]
        offset, noise = median(rows[0]), max(map(deviation, rows))
        longer = both_ways(self._after, self.runs, late=False)
        without = median(ms - simulated for ms, simulated in longer) - offset
        left = median(rows[1]) - offset
        least = max(WORSE * self._level, ANSWERS * error_of(noise, len(before), len(after)))
        return SimulationResidual(offset, noise) if without > least and abs(left) <= without / 2 else None

    def _is_slower_beyond_doubt(self) -> bool:
        if min(self._ms) <= self._level * (1 + WORSE) + TELLS * self.before.error(EARLY):
            return False
        by_links = self._gains()
        return by_links is None or by_links.measured < 0

    def _judge(self, iteration: int, is_there: bool) -> Verdict:
        by_links = self._gains()
        if by_links is not None:
            return self._judge_by_links(iteration, by_links, is_there)
        if self.void:
            return self._end(iteration, False, "links changed before it could be told")
        after, before, error = median(self._ms), self._level, self.before.error(len(self._after))
        calm = median(self.before.calm) if self.before.calm else before
        if self.promised <= 0:
            kept = after <= before * (1 + WORSE)
            return self._end(iteration, kept, "it is no slower" if kept else "it is slower")
        if after > before * (1 + WORSE):
            return self._end(iteration, False, "it is slower")
        if after >= before - STANDS * error - EPSILON * before:
            return self._end(iteration, False, f"that is not faster by more than noise ({self.before.noise:.3g} ms)")
        if self.cause and not is_there and after > calm * (1 + WORSE):
            return self._end(iteration, False, f"what it answered has passed, and {calm:.4g} ms were usual before")
        return self._end(iteration, True, f"simulated gain {self.promised:.3g} ms, measured {before - after:.3g}")

    def _judge_by_links(self, iteration: int, gains: Gains, is_there: bool) -> Verdict:
        after, gain = median(self._ms), gains.measured
        noise = STANDS * gains.error + EPSILON * after
        comparison = (
            f"with the links of these steps the simulated gain is {gains.simulated:.3g} ms, the measured {gain:.3g}"
        )
        if self.cause and not is_there:
            comparison = f"what it answered has passed: {comparison}"
        if gain < -WORSE * after:
            return self._end(iteration, False, f"it is slower: {comparison}")
        if self.promised <= 0 or gain > noise or gains.simulated <= noise:
            # Where nothing is to be gained with these links, when to go back is chosen as at any other time.
            return self._end(iteration, True, comparison)
        return self._end(iteration, False, f"that is not faster by more than noise: {comparison}")

    def _look_again(self, iteration: int) -> Verdict | None:
        by_links = self._gains()
        if by_links is not None:
            is_slower = by_links.measured < -WORSE * median(self._ms)
        else:
            is_slower = not self.void and median(self._ms) > self._level * (1 + WORSE)
        return self._end(iteration, False, "it is slower after all") if is_slower else None

    def _end(self, iteration: int, kept: bool, why: str) -> Verdict:
        self._decided = True
        calm = median(self.before.calm) if self.before.calm else self._level
        return Verdict(
            self.number,
            iteration,
            kept,
            why,
            self._level,
            median(self._ms) if self._after else self._level,
            len(self.before.now),
            len(self._after),
            calm,
            self.before.noise,
            self.promised,
        )


def _rise(before: Sequence[float], after: Sequence[float]) -> float:
    """By how much the second median exceeds the first, beyond noise."""
    noise = max(deviation(before), deviation(after))
    return median(after) - median(before) - ANSWERS * error_of(noise, len(before), len(after))


@dataclass(frozen=True)
class RevertedChange:
    """A change that was taken back: what it was, and the cause that it was to answer."""

    number: int
    what: object
    cause: Mapping[Link, float]

    def bars(self, what: object, cause: Mapping[Link, float]) -> bool:
        """Whether `what` is the same change for the same cause: the same links, at most twice or half as late."""
        if what != self.what or set(cause) != set(self.cause):
            return False
        return all(self.cause[link] / 2 <= ms <= 2 * self.cause[link] for link, ms in cause.items())
