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

`Evidence` is the one sequential test for every question about steps. It tells whether steps are slower now, and
whether a change helped or did harm.

    reference    97  103   99  101   98  100     steps that ran before
    new steps   131, rank 7 of 7;  128, rank 7 of 8;  96, rank 1 of 9;  130, rank 9 of 10;  ...

Where nothing has changed, a new step is as likely to take any rank among the steps so far as any other, however
noisy the machine is and whatever shape its noise has. So a bet on high ranks wins nothing over many steps. The test
stakes 1, bets on each new step, and multiplies; the evidence is the stake as it has grown. By chance the evidence
reaches x at most about once in x steps, so one may look at the evidence after every step, and it adds up while a
question is open. If the evidence falls to 1, the test starts anew and forgets the steps that spoke for nothing. A
change that comes late is therefore seen as soon as one that comes at once.

Ranks are bounded, so a wild step weighs no more than a slow one, and the bets are two at once: half of the stake wins
most where steps overlap, nearly all of it where they lie apart.

References: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (conformal test martingales); Shin,
Ramdas and Rinaldo, E-detectors (arXiv 2203.03532).

`ReportSampler` says which steps the ranks report in full. Of all other steps only the time is known, which costs the
ranks nothing.

step       0 to 15   16   17 ... 23   24   ...   41 takes longer than the 16 before it   42   43   44   45
reported   all       x                x          x                                       x    x    x    x
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Literal

from penstock.control.changes import deviation
from penstock.control.configuration import Configuration
from penstock.control.events import Link
from penstock.control.measured import LinksOfStep

STAKES = (0.5, 0.95)
"""Shares of the stake that are bet on each step; the evidence is their mean."""
FEWEST = 3
"""Clean steps on either side without which nothing is decided, no verdict is given, and a report calls nothing
measured.
"""
BURST = 3
"""Slow steps that lead to nothing: a burst is over before a change for it could run."""
EXPLAINED, UNEXPLAINED = 3.0, 30.0
"""Evidence that steps are slower from which on a change is tried: where simulation says as much, and where it does
not; from the latter on a rise without a known cause is reported. Each decision among the latest `WINDOW` steps
doubles what a change takes, and one that was taken back doubles it twice.
"""
WINDOW = 1024
FACTOR = 2.5
"""Simulation explains a rise if the rise is at most so many times as large as simulated, and not smaller by more."""
HELPED, HARMED = 4.0, 4.0
"""Evidence with which a change stays, or is taken back."""
HARMED_LATER = 20.0
"""Evidence with which a change that stayed is taken back after all: it is asked for with many steps more."""


class Evidence:
    """Evidence that values are higher than those of a reference, or lower.

    Args:
        reference: values from before.
        values: values since, added one by one.
        sign: 1 to bet on higher values, -1 to bet on lower ones.

    Attributes:
        value: what a stake of 1 has grown to, at least 1.
        most: the largest stake since the test last started anew. By chance the largest stake, too, reaches x at most
            about once in x cases.
        num: values since the test last started anew.

    Examples:
        >>> from penstock.control.steps import Evidence
        >>> round(Evidence([97, 103, 99, 101, 98, 100], [131, 128, 130, 129]).value, 1)
        5.0
        >>> Evidence([97, 103, 99, 101, 98, 100], [99.5, 97.5, 102, 98.5]).value
        1.0
    """

    def __init__(self, reference: Iterable[float], values: Iterable[float] = (), sign: int = 1) -> None:
        self._sign = sign
        self._reference = sorted(sign * each for each in reference)
        self._start()
        for each in values:
            self.add(each)

    def _start(self) -> None:
        self.value, self.most, self.num = 1.0, 1.0, 0
        self._known, self._stakes = list(self._reference), [1.0] * len(STAKES)

    def add(self, value: float) -> None:
        """Bets on the rank of the next value."""
        value *= self._sign
        below, not_above = bisect_left(self._known, value), bisect_right(self._known, value)
        rank = (below + not_above + 1) / 2 / (len(self._known) + 1)  # 0 to 1; equal values share their ranks
        insort(self._known, value)
        self._stakes = [
            stake * (1 + share * (2 * rank - 1)) for stake, share in zip(self._stakes, STAKES, strict=True)
        ]
        self.value, self.num = sum(self._stakes) / len(STAKES), self.num + 1
        self.most = max(self.most, self.value)
        if self.value <= 1:
            self._start()


def chance(evidence: float) -> str:
    """What evidence means, in words: by chance it reaches x at most about once in x cases."""
    return f"chance alone makes such steps once in {evidence:.3g} cases"


def explains(simulated: float, measured: float) -> bool:
    """Whether a simulated difference (ms) explains a measured one: they are of the same size, within `FACTOR`."""
    return 0 < measured <= FACTOR * simulated and simulated <= FACTOR * measured


_MOST = 32
"""Steps that are remembered of either kind."""
_ABOUT = 6
"""By how many steps the onset of slower steps may be off."""
PRESENT = 16
"""Latest steps that say how long steps take at present."""
SLOWER_STEP = 0.05
"""Share of a step by which steps must rise without a known cause, to be reported and to have links probed."""
_CLEARLY = 3.0
"""Deviations of a usual step by which steps are clearly slower."""
NO_LINKS: Mapping[Link, float] = MappingProxyType({})


OpsFrom = Literal["job", "verified", "step"]
"""Which op times a step is simulated with: those that the job assumes, those after all verified changes of stages, or
those that were measured in the step itself.
"""
StepSimulation = Callable[..., float]
"""Simulates a step (ms) with the links that were measured in it. Takes a configuration; by how much (ms) links are
`sooner` than measured, none by default; an `OpsFrom`, verified op times by default; and how many times as long ops
took in the step as they would take in the simulation, 1 by default.
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
        """The evidence that steps are slower than the usual ones.

        Where few usual steps are known, a slow step is soon like most other steps, and evidence falls. So while the
        question is open, the most evidence since the test last started anew counts.
        """
        return self._evidence.most if self.is_open else self._evidence.value

    @property
    def looks_slower(self) -> bool:
        """Whether the latest steps are all clearly slower than usual ones. Then probes are worth their time, though
        the evidence may be too little for a report.
        """
        num = max(2, self.burst)
        latest = times(self.since)[-num:]
        if self.calm is None or len(self.usual) < PRESENT or len(latest) < num:
            return False
        return min(latest) >= self.calm + max(SLOWER_STEP * self.calm, _CLEARLY * deviation(times(self.usual)))

    @property
    def num_slow_in_a_row(self) -> int:
        """How many of the latest steps, in a row, are nearer to the slow ones than to the usual ones."""
        if self.calm is None or self.latest is None:
            return 0
        bound = (self.calm + self.latest) / 2
        return next((num for num, step in enumerate(reversed(self.since)) if step.ms < bound), len(self.since))

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
        return (*self.usual, *self.since)[-PRESENT:]

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


CLOSELY = 16
"""Steps from the start, or from a switch on, of which all are reported."""
REST = 8
"""While nothing changes, one step in so many is reported."""
ALARM = 4
"""Steps that are reported after one that took longer than the `CLOSELY` before it, which is reported as well."""
SLOWER = 1.1
"""A step counts as longer if it takes at least so many times as long as the longest of those before. With less, every
17th step of a noisy machine would be one. What makes steps longer by less is seen in the next step that is reported.
"""


class ReportSampler:
    """Finds after each step whether the ranks report the step. All ranks are told the same times, so all agree.

    Args:
        num_updates: how many steps are measured as one: those of a pass, where updates are among a schedule's ops.

    Examples:
        >>> from penstock.control.steps import ReportSampler
        >>> sampler, reported = ReportSampler(), []
        >>> for step in range(40):
        ...     reported += [step] if sampler.ended(120.0 if step == 33 else 100.0, False) else []
        >>> reported[16:]
        [16, 24, 32, 33, 34, 35, 36, 37]
    """

    def __init__(self, num_updates: int = 1) -> None:
        self._is_reported = True
        self._rest = max(1, REST // num_updates)
        self._num, self._closely_until = 0, CLOSELY
        self._recent: deque[float] = deque(maxlen=CLOSELY)

    def ended(self, ms: float, asked: bool) -> bool:
        """Whether the step that has ended is reported.

        Args:
            ms: how long the step took.
            asked: whether a rank asks for the next one.
        """
        is_alarm = len(self._recent) == CLOSELY and ms > SLOWER * max(self._recent)
        is_reported = self._is_reported or is_alarm
        if is_alarm:
            self._closely_until = max(self._closely_until, self._num + 1 + ALARM)
        self._recent.append(ms)
        self._num += 1
        self._is_reported = asked or self._num < self._closely_until or self._num % self._rest == 0
        return is_reported

    def switched(self) -> None:
        """Something else runs from the next step on."""
        self._closely_until, self._is_reported = self._num + CLOSELY, True
        self._recent.clear()
