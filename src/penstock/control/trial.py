"""Trials: each change is on trial, and one that does not make steps faster is taken back.

    ms a step
     |            x x x x                        before: clean steps since the links changed that the change answers
     |                     o  o                  from the decision to the first step with the change: its price
     |                          o o o o o        after: clean steps with the change
     | x x x x x                                 calm: steps before the links changed
     +------------------------------------------ steps
               |          |     |        |
          links change  decided switched verdict

After every step the one test (`Evidence`) is asked whether steps are faster than before, and whether they are slower.
Where neither is shown within `MOST` steps, the change stays if there is some evidence that they are faster. One that
stays goes on being watched for a while, since harm may show later.

Where links change all the time, or one turned late since the switch, steps before and after had different links. If
simulation explains how the steps differ, each step is therefore compared with what ran before, simulated with the
links of this step, and the test is fed the differences in place of the times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.control.configuration import Configuration
from penstock.control.events import Link
from penstock.control.evidence import FEWEST, HARMED, HARMED_LATER, HELPED, Evidence
from penstock.control.robust_statistics import deviation
from penstock.control.steps import NO_LINKS, Steps, TimedStep, times

RETURNS = 5
"""Steps after which going back to what is no slower stays."""
MOST = 16
"""Steps after which a change stays only if there is some evidence for it."""
_SOME = 2.0
LATER = 48
"""Steps with a change up to which it is watched for harm."""
WORSE = 0.02
"""Share of a step that counts as a difference."""
_LEFT = 0.5
"""Share of the deviation of steps that simulation may leave unexplained, to be believed."""
_ENOUGH = 6
"""Steps that are enough to say whether simulation explains them."""
_AGAIN = 64
"""Clean steps after which a change that was taken back may be tried again, while its cause is there; each time it was
taken back doubles them.
"""


@dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    Attributes:
        number: the number of the decision.
        iteration: the iteration after which this was known.
        kept: whether the change stays.
        why: the reason in words.
        before: median clean step before the change, in ms.
        after: median clean step with it, in ms.
        num_before: how many steps `before` rests on.
        num_after: how many steps `after` rests on.
        paid: ms that steps took longer than before from the decision up to the first step with the change.

    Examples:
        >>> import penstock as ps
        >>> verdict = ps.control.Verdict(1, 40, True, "steps are shorter", 330.0, 240.0, 5, 5)
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
    paid: float = 0.0

    def __str__(self) -> str:
        said = "stays" if self.kept else "is taken back"
        cost = f"; preparing it cost {self.paid:.3g} ms" if self.paid >= WORSE * self.before else ""
        return (
            f"change {self.number} {said}: {self.before:.4g} ms a step before ({self.num_before} steps), "
            f"{self.after:.4g} with it ({self.num_after}); {self.why}{cost}"
        )


@dataclass
class Trial:
    """One change on trial, from the switch on.

    Attributes:
        number: of the decision.
        before: the steps of what ran before.
        promised: ms that each step is to become shorter by; 0 for going back to what is no slower.
        cause: the links that were late, and by how much (ms), by which the change was called for.
        runs: what runs now; None where its links cannot be compared with those before.
        paid: ms that steps took longer than before from the decision up to the first step with the change.
        links_changed: whether something else turned late since the switch.
        is_decided: whether it is known if the change stays.
        is_over: whether nothing more can be learned of it.
    """

    number: int
    before: Steps
    promised: float
    cause: Mapping[Link, float]
    runs: Configuration | None = None
    paid: float = 0.0
    links_changed: bool = False
    is_decided: bool = False
    is_over: bool = False
    _after: list[TimedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = list(self.before.present)
        self._level = self.before.level

    def add(self, iteration: int, step: TimedStep, is_there: bool = True) -> Verdict | None:
        """Takes a clean step that ran the change.

        Args:
            iteration: of the step.
            step: as measured.
            is_there: whether what the change answers is still seen.

        Returns:
            The verdict, with the step after which it is known; once more where a change that stayed turns out to be
            slower after all.
        """
        if self.is_over or len(self._after) >= LATER or (self.is_decided and self.links_changed):
            return None
        self._after.append(step)
        num = len(self._after)
        if num < FEWEST:
            return None
        if not self._rows:
            return self._end(iteration, True, "no step before it is known") if num == RETURNS else None
        before, after, promised = self._compared()
        helped, harmed = (Evidence(before, after, sign) for sign in (-1, 1))
        gain, least = median(before) - median(after), WORSE * median(times(self._rows))
        loss = median(after[-max(1, harmed.num) :]) - median(before)
        if harmed.value >= (HARMED_LATER if self.is_decided else HARMED) and loss > least:
            said = f"it is slower{' after all' if self.is_decided else ''} by {loss:.3g} ms"
            return self._end(iteration, False, said)
        if self.is_decided:
            return None
        if self.promised <= 0 and num >= RETURNS:
            said = "it is no slower" if gain >= -least else f"it is slower by {loss:.3g} ms"
            return self._end(iteration, gain >= -least, said)
        said = f"simulated gain {promised:.3g} ms, measured {gain:.3g}"
        if gain > least and helped.value >= (HELPED if num < MOST else _SOME):
            now, calm = median(times(self._after)), self.before.calm
            if self.cause and not is_there and calm is not None and now > calm * (1 + WORSE):
                said = f"its cause has passed, and {calm:.4g} ms were usual before"
                return self._end(iteration, False, said)
            return self._end(iteration, True, said)
        # Where nothing is to be gained with these links, when to go back is chosen as at any other time.
        kept = promised <= least and gain >= -least
        return self._end(iteration, kept, said) if num == MOST else None

    def _compared(self) -> tuple[list[float], list[float], float]:
        """The steps before and since, as the test compares them, and what simulation promises of the latter."""
        plain = times(self._rows), times(self._after), self.promised
        ran, added = self.before.ran, self._added()
        known, since, instead = (
            paired(rows, ran, more)
            for rows, more in ((self.before.known, NO_LINKS), (self._rows, NO_LINKS), (self._after, added))
        )
        if self.runs is None or len(instead) < len(self._after) or not explained(known):
            return plain
        by_links = [simulated for _, simulated in (*since, *instead)]
        if deviation(by_links) < WORSE * median(by_links):
            return plain
        promised = median(
            then - now for (_, then), (_, now) in zip(instead, paired(self._after, self.runs), strict=True)
        )
        return [ms - simulated for ms, simulated in known], [ms - simulated for ms, simulated in instead], promised

    def _added(self) -> Mapping[Link, float]:
        """How much later (ms) messages are of links that go by delegates since the change: what the delegates add."""
        moved = set() if self.runs is None else set(self.runs.delegated) - set(self.before.ran.delegated)
        rises = []
        for way in (way for link in moved for way in (link, link[::-1])):
            rows = [
                [step.links.least[way] for step in row if step.links is not None and way in step.links.least]
                for row in (self._rows, self._after)
            ]
            if all(rows):
                rises.append(median(rows[1]) - median(rows[0]))
        return dict.fromkeys(moved, max(0.0, median(rises) if rises else 0.0))

    def _end(self, iteration: int, kept: bool, why: str) -> Verdict:
        self.is_decided, self.is_over = True, not kept
        after = median(times(self._after))
        level = after if self._level is None else self._level
        return Verdict(self.number, iteration, kept, why, level, after, len(self._rows), len(self._after), self.paid)


def paired(
    steps: Sequence[TimedStep], ran: Configuration | None, sooner: Mapping[Link, float] = NO_LINKS
) -> list[tuple[float, float]]:
    """Each step as measured and as simulated with `ran`, in ms. Steps that cannot be simulated are left out."""
    if ran is None:
        return []
    return [(step.ms, step.simulated(ran, sooner)) for step in steps if step.simulated is not None]


def explained(steps: Sequence[tuple[float, float]]) -> bool:
    """Whether simulation accounts for most of how steps differ, and they differ at all.

    Args:
        steps: each as measured and as simulated (ms). What all of them take longer than simulated is usual.
    """
    if len(steps) < _ENOUGH:
        return False
    ms = [measured for measured, _ in steps]
    differ, left = deviation(ms), deviation([measured - simulated for measured, simulated in steps])
    return differ >= WORSE * median(ms) and left <= _LEFT * differ


@dataclass
class RevertedChange:
    """A change that was taken back.

    Attributes:
        number: of its last decision.
        what: what it was.
        cause: the links that it was to answer, with their delay (ms).
        iteration: when it was taken back last.
        num: how often it was.
    """

    number: int
    what: object
    cause: Mapping[Link, float]
    iteration: int
    num: int = 1

    def is_of(self, what: object, cause: Mapping[Link, float]) -> bool:
        """Whether it was the same change for the same cause: the same links, at most twice or half as late."""
        if what != self.what or set(cause) != set(self.cause):
            return False
        return all(self.cause[link] / 2 <= ms <= 2 * self.cause[link] for link, ms in cause.items())

    def bars(self, what: object, cause: Mapping[Link, float], iteration: int) -> bool:
        """Whether `what` may not be tried again yet: for as long as nothing is late, or for some steps."""
        return self.is_of(what, cause) and (not cause or iteration - self.iteration < _AGAIN * 2 ** (self.num - 1))
