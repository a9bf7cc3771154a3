"""The steps that one configuration ran: the usual ones, and those since something became late.

    ms |              x x x x x     o o      usual   before the onset
       |                                     since   clean steps from the onset on
       | x x x x x x                         o       between a decision and the step after its switch: in neither
       +------------------------------
                     |           |
                   onset      decision

While links and ops are as they were, `Evidence` watches for steps that become slower by themselves. Steps that it has
forgotten are usual ones. While steps stay slower, the usual steps from before are kept. The cause may be found many
steps later, since links between nodes are only probed now and then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from types import MappingProxyType

from penstock.control.configuration import Configuration
from penstock.control.events import Link
from penstock.control.evidence import BURST, EXPLAINED, FEWEST, Evidence
from penstock.control.measured import LinksOfStep
from penstock.control.robust_statistics import deviation

_MOST = 32
"""Steps that are remembered of either kind."""
_ABOUT = 6
"""By how many steps the onset of slower steps may be off."""
PRESENT = 16
"""Latest steps that say how long steps take at present."""
NO_LINKS: Mapping[Link, float] = MappingProxyType({})


class OpsFrom(StrEnum):
    """Which op times a step is simulated with."""

    JOB = "job"
    """Those that the job assumes."""
    VERIFIED = "verified"
    """Those after all verified changes of stages."""
    STEP = "step"
    """Those that were measured in the step itself."""


StepSimulation = Callable[..., float]
"""Simulates a step (ms) with the links that were measured in it. Takes a configuration; by how much (ms) links are
`sooner` than measured, none by default; and an `OpsFrom`, verified op times by default.
"""


@dataclass(frozen=True)
class TimedStep:
    """A step as measured.

    Attributes:
        ms: how long it took.
        simulated: its simulation; None where links were not measured.
        links: the links in it, as measured.
        load: how many times as long as assumed its ops took together; None where that was not measured.
        is_reported: whether links and ops were measured in this step itself, rather than in one before it.
    """

    ms: float
    simulated: StepSimulation | None = None
    links: LinksOfStep | None = None
    load: float | None = None
    is_reported: bool = True


class Steps:
    """The clean steps of a configuration.

    Args:
        ran: the configuration.

    Attributes:
        ran: the configuration.
        fewest, burst: `FEWEST` and `BURST`, in steps as they are measured.
        is_open: whether it is asked if steps are slower because of something that is late.
        num_open: for how many steps it has been asked.
        num_slower: since how many steps they are slower without a known cause; 0 where they are not.
        usual: steps before the onset, or before the steps that look slower.
        since: steps from then on.
    """

    def __init__(self, ran: Configuration) -> None:
        self.fewest, self.burst = -(-FEWEST // ran.num_updates), -(-BURST // ran.num_updates)
        self.ran, self.is_open, self.num_open, self.num_slower = ran, False, 0, 0
        self.usual: deque[TimedStep] = deque(maxlen=_MOST)
        self.since: deque[TimedStep] = deque(maxlen=_MOST)
        self._evidence = Evidence(())

    def add(self, step: TimedStep) -> None:
        """Takes the next clean step."""
        if not self.is_open and not self.num_slower and len(self.since) == _MOST:
            self.usual.append(self.since.popleft())
        self.since.append(step)
        self.num_open += self.is_open
        self.num_slower += bool(self.num_slower)
        self._evidence.add(step.ms)
        if not self.is_open and (self._evidence.num == 0 or len(self.usual) < self.fewest):
            self.settle()

    def settle(self) -> None:
        """Counts all steps so far among the usual ones."""
        self.usual.extend(self.since)
        self.num_slower = 0
        self._begin(())

    def stay_slower(self) -> None:
        """The steps since the usual ones are slower, and nobody knows the cause."""
        self.num_slower = self.num_slower or len(self.since)

    def open(self, num_steps: int) -> None:
        """Something that became late in the last `num_steps` steps asks whether steps are slower for it.

        If a question is open and steps are slower already, the question keeps its usual steps. If steps became slower
        within the last `num_steps` for no known cause, the late thing is taken as the cause, and the usual steps from
        before the slow ones are kept.
        """
        goes_on = self.is_open or 0 < self.num_slower <= num_steps + _ABOUT
        if goes_on and self.evidence >= EXPLAINED and len(self.since) > self.burst:
            rows, num = [*self.since], min(num_steps, len(self.since))
        else:
            rows = [*self.usual, *self.since]
            num = min(num_steps, len(rows))
            self.usual = deque(rows[: len(rows) - num], maxlen=_MOST)
        self.is_open, self.num_open, self.num_slower = True, num, 0
        self._begin(rows[len(rows) - num :])

    def close(self) -> None:
        """Nothing is late any more. The steps since the onset count on neither side from now on."""
        if self.is_open:
            self.is_open = False
            self._begin(())

    def _begin(self, since: Sequence[TimedStep]) -> None:
        self.since = deque(since, maxlen=_MOST)
        self._evidence = Evidence(times(self.usual), times(since))

    @property
    def evidence(self) -> float:
        """The evidence that steps are slower than the usual ones."""
        return self._evidence.value

    @property
    def can_tell(self) -> bool:
        """Whether there are enough steps on both sides."""
        return len(self.usual) >= self.fewest and len(self.since) > self.burst

    @property
    def known(self) -> Sequence[TimedStep]:
        """The latest steps, whether something turned late among them or not."""
        return (*self.usual, *self.since)[-PRESENT:]

    @property
    def reported(self) -> Sequence[TimedStep]:
        """The latest steps whose own links and ops were measured."""
        return [step for step in (*self.usual, *self.since) if step.is_reported][-PRESENT:]

    @property
    def present(self) -> Sequence[TimedStep]:
        """The steps as they are now: those since the onset, without the one in which it was, or the latest."""
        if self.is_open:
            rows = tuple(self.since)
            return (rows[1:] if len(rows) > self.fewest else rows)[-PRESENT:]
        return self.known

    @property
    def level(self) -> float | None:
        """How long a step takes now (ms), in the median; None where no step is known."""
        return median(times(self.present)) if self.present else None

    @property
    def calm(self) -> float | None:
        """How long a usual step takes (ms), in the median; None where none is known."""
        return median(times(self.usual)) if self.usual else None

    @property
    def latest(self) -> float | None:
        """How long the steps after the usual ones take (ms), in the median; None where no step is known."""
        return median(times(list(self.since)[len(self.since) > self.fewest :])) if self.since else self.calm

    @property
    def rise(self) -> float:
        """How much longer they take (ms) than usual ones."""
        return (self.latest or 0.0) - (self.calm or 0.0) if self.usual else 0.0

    def excess(self, others: Iterable[TimedStep]) -> float:
        """How much longer (ms) other steps took in all than these do, each compared with its own simulation."""
        rows = [step.ms - step.simulated(self.ran) for step in self.present if step.simulated is not None]
        usual = median(rows) if rows else math.inf
        found = (step.ms - step.simulated(self.ran) - usual for step in others if step.simulated is not None)
        return sum(max(0.0, each) for each in found)

    @property
    def noise(self) -> float:
        """The deviation (ms) of a step from those around it."""
        rows = [times(row) for row in (self.usual, self.present) if len(row) >= self.fewest]
        return max(map(deviation, rows), default=0.0)


def times(steps: Iterable[TimedStep]) -> list[float]:
    """How long each step took (ms)."""
    return [step.ms for step in steps]
