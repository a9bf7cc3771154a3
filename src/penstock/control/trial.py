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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from penstock.control.events import Link
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
ANSWERS = 2.0
"""Standard errors that it must promise where steps have become slower."""
STANDS = 2.0
"""Standard errors by which it must be faster to stay."""
WORSE = 0.02
"""Share of the step by which a change may not be slower."""
MEDIAN = 1.2533
"""The standard error of a median is this times that of a mean, where noise is normal."""
_CALM, _SINCE, _LATEST = 32, 16, 8
_ONE_EVENT = 6
"""Steps between two changes up to which they count as one: the two directions of a link are verified one by one."""


class StepTimes:
    """The steps that ran one configuration: before the last verified change of links or ops, and since it began."""

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=_CALM)
        self._since: deque[float] = deque(maxlen=_SINCE)
        self._num_since: int | None = None
        self._rose = False

    def add(self, ms: float) -> None:
        """Takes the time of the next step."""
        if self._num_since is None:
            self._calm.append(ms)
        else:
            self._since.append(ms)
            self._num_since += 1

    def changed(self, num_steps: int, rose: bool) -> None:
        """A change was verified that began in the last `num_steps` steps; `rose`: links got later, or ops slower."""
        if self._num_since is not None and self._num_since <= _ONE_EVENT:
            self._rose = self._rose or rose
            return
        self._rose = rose
        if self._num_since is not None:  # what the last change led to is what is usual now
            self._calm = deque(self._since, maxlen=_CALM)
        self._num_since = min(num_steps, len(self._calm))
        moved = [self._calm.pop() for _ in range(self._num_since)]
        self._since = deque(reversed(moved), maxlen=_SINCE)

    @property
    def calm(self) -> Sequence[float]:
        """The steps before the change; all where there was none."""
        return tuple(self._calm)

    @property
    def now(self) -> Sequence[float]:
        """The steps as they are now: those since the change, without the one that was slow in part; the latest
        where there was no change."""
        if self._num_since is None:
            return tuple(self._calm)[-_LATEST:]
        since = tuple(self._since)
        return since[1:] if 1 < len(since) == self._num_since else since

    @property
    def are_enough(self) -> bool:
        """Whether it is known how much steps vary."""
        return self._rose or len(self._calm) >= _LATEST

    @property
    def noise(self) -> float:
        """The deviation (ms) of a step from those around it."""
        now = self.now if len(self.now) >= EARLY else ()
        return max((deviation(row) for row in (self._calm, now) if row), default=0.0)

    @property
    def rise(self) -> float | None:
        """How much longer steps take (ms) since links became later, or ops slower; None where none did."""
        if not self._rose or not self._calm or not self.now:
            return None
        return median(self.now) - median(self._calm)

    def error(self, num_after: int = STEPS) -> float:
        """Standard error (ms) of the difference between the median of these steps and that of so many others."""
        num_before = max(1, len(self.now))
        return MEDIAN * self.noise * (1 / num_before + 1 / num_after) ** 0.5


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


class ChangeTrial:
    """One change on trial, from the switch on.

    Args:
        number: of the decision. before: the steps that ran what ran before.
        promised: ms that each step is to become shorter by; 0 for going back to what is no slower.
        cause: the links that were late, and by how much (ms), by which the change was called for.
    """

    def __init__(self, number: int, before: StepTimes, promised: float, cause: Mapping[Link, float]) -> None:
        self.number, self.before, self.promised, self.cause = number, before, promised, dict(cause)
        self.void = False
        self._after: list[float] = []
        self._num_ran = 0
        self._decided = False

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet if the change stays."""
        return not self._decided

    def add(self, iteration: int, ms: float, is_there: bool) -> Verdict | None:
        """Takes a step that ran the change.

        Args:
            is_there: whether what the change answers is still seen.

        Returns:
            The verdict, with the step that it is known after; once more where a change that stayed turns out to be
            slower after all.
        """
        self._num_ran += 1
        if self._num_ran > 1 and not self.void:
            self._after.append(ms)
        if self._decided:
            return self._look_again(iteration)
        num = len(self._after)
        if self.void and self._num_ran > STEPS:
            return self._end(iteration, False, "links changed before it could be told")
        if num == EARLY and min(self._after) > self._level * (1 + WORSE) + TELLS * self.before.error(EARLY):
            return self._end(iteration, False, "it is slower beyond doubt")
        if num < STEPS or self.void:
            return None
        return self._judge(iteration, is_there)

    @property
    def _level(self) -> float:
        return median(self.before.now) if self.before.now else 0.0

    def _judge(self, iteration: int, is_there: bool) -> Verdict:
        after, before, error = median(self._after), self._level, self.before.error(len(self._after))
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

    def _look_again(self, iteration: int) -> Verdict | None:
        if self.void or len(self._after) != LATER or median(self._after) <= self._level * (1 + WORSE):
            return None
        return self._end(iteration, False, "it is slower after all")

    def _end(self, iteration: int, kept: bool, why: str) -> Verdict:
        self._decided = True
        calm = median(self.before.calm) if self.before.calm else self._level
        return Verdict(
            self.number,
            iteration,
            kept,
            why,
            self._level,
            median(self._after) if self._after else self._level,
            len(self.before.now),
            len(self._after),
            calm,
            self.before.noise,
            self.promised,
        )


@dataclass(frozen=True)
class TakenBack:
    """A change that was taken back: what it was, and what it was to answer."""

    number: int
    what: object
    cause: Mapping[Link, float]

    def bars(self, what: object, cause: Mapping[Link, float]) -> bool:
        """Whether `what` is the same change for the same cause: the same links, at most twice or half as late."""
        if what != self.what or set(cause) != set(self.cause):
            return False
        return all(self.cause[link] / 2 <= ms <= 2 * self.cause[link] for link, ms in cause.items())
