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

Links and the machine may have changed between the steps before and the steps after: another link turned late, or a
busy neighbour made all ops slower. Then each step is compared with what ran before, simulated with the links and op
times of this step, and the test is fed the differences in place of the times. This needs that simulation explains at
least half of how steps vary, or that ops clearly take another time than before. The verdict then names what a step
would take now without the change.

A change may help by less than simulation promised: a dispatch that picks ops as messages come, for one, is simulated
as if it learnt of each message at once. While the same links are late, that dispatch is then taken to be as much
slower than simulated as its trial showed, and an order that is no faster by simulation may take its place.

A change may slow ops itself, as delegates do that take a core. If ops become slower right at the switch, by more than
they otherwise do from a few steps to the next, that is laid to the change: what ran before is then simulated with op
times that are shorter by as much. A load that drifts for hours hides no jump, since it moves little in a few steps.

Whether a change is worth a trial, from clean steps: the question that stays open while something is late.

    steps rose, and simulation with the late links says as much    evidence of 3 is enough
    steps rose, and simulation does not say so                      30, and as below
    nothing turned late, and simulation promises a shorter step     more than a trial could take for noise

Each decision among the latest 1,024 steps doubles the evidence that the next one takes, and one that was taken back
doubles it twice. So whatever is measured, the number of changes in so many steps is bounded. A dead link waits for
nothing, and neither does taking back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.control.advice import Obstacle
from penstock.control.changes import deviation
from penstock.control.configuration import Configuration
from penstock.control.decide import Action
from penstock.control.events import Link
from penstock.control.steps import (
    EXPLAINED,
    FEWEST,
    HARMED,
    HARMED_LATER,
    HELPED,
    NO_LINKS,
    UNEXPLAINED,
    WINDOW,
    Evidence,
    Steps,
    TimedStep,
    chance,
    explains,
    times,
)

RETURNS = 5
"""Steps after which going back to what is no slower stays."""
MOST = 16
"""Steps after which a change stays only if there is some evidence for it."""
_SOME = 2.0
LATER = 48
"""Steps with a change up to which it is watched for harm."""
WORSE = 0.02
"""Share of a step that counts as a difference."""
_LEFT = 0.7
"""Share of the deviation of steps that simulation may leave unexplained, to be believed: half of the variance."""
_ENOUGH = 6
"""Steps that are enough to say whether simulation explains them."""
_AT_SWITCH = 8
"""Steps after a switch that show whether ops became slower with it."""
_CLEARLY = 3.0
"""Deviations by which op times differ clearly."""
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
        without: what a step since the change would take (ms) without it, under the links and op times since; None
            where steps before and since are compared as measured.

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
    without: float | None = None

    def __str__(self) -> str:
        said = "stays" if self.kept else "is taken back"
        cost = f"; preparing it cost {self.paid:.3g} ms" if self.paid >= WORSE * self.before else ""
        now = ""
        if self.without is not None:
            now = f"; with links and ops as they are now a step would take {self.without:.4g} ms without it"
        return (
            f"change {self.number} {said}: a step took {self.before:.4g} ms before (median of {self.num_before}) and "
            f"takes {self.after:.4g} ms with it (median of {self.num_after}){now}; {self.why}{cost}"
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
        preparing: the steps from the decision up to the switch.
        links_changed: whether something else turned late since the switch.
        verdict: the latest one; None until it is known if the change stays.
        shortfalls: how many times as long as simulated steps are known to take under the dispatch before the change,
            and under the dispatch since.
        shortfall: how many times as long as simulated steps take under the dispatch since, as the trial shows: more
            than known if the change helped by less than expected.
    """

    number: int
    before: Steps
    promised: float
    cause: Mapping[Link, float]
    runs: Configuration | None = None
    paid: float = 0.0
    preparing: Sequence[TimedStep] = ()
    links_changed: bool = False
    verdict: Verdict | None = None
    shortfalls: tuple[float, float] = (1.0, 1.0)
    _after: list[TimedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = list(self.before.present)
        self._level, self._is_simulated = self.before.level, False
        self.shortfall = self.shortfalls[1]

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
        is_decided = self.verdict is not None
        if self.failure is not None or len(self._after) >= LATER or (is_decided and self.links_changed):
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
        if harmed.value >= (HARMED_LATER if is_decided else HARMED) and loss > least:
            said = f"its last {harmed.num} steps are {loss:.3g} ms longer than without it"
            return self._end(iteration, False, said, gain)
        if is_decided:
            return None
        shorter = f"steps are {abs(gain):.3g} ms {'longer' if gain < 0 else 'shorter'} with it"
        if self.promised <= 0 and num >= RETURNS:
            return self._end(iteration, gain >= -least, shorter, gain)
        shorter += f", where simulation expects {promised:.3g} ms less"
        if gain > least and helped.value >= (HELPED if num < MOST else _SOME):
            now, calm = median(times(self._after)), self.before.calm
            if self.cause and not is_there and calm is not None and now > calm * (1 + WORSE):
                said = f"what it was made for has passed, and steps took {calm:.4g} ms before that began"
                return self._end(iteration, False, said, gain)
            noise = max(map(deviation, (times(self._rows), times(self._after))))
            # Simulation may have taken steps before the change for longer than measured: no shortfall of the change.
            expected = max(now + gain - promised, self._simulated_now())
            if now - expected > max(least, noise):
                self.shortfall *= now / expected
            return self._end(iteration, True, shorter, gain)
        if num < MOST:
            return None
        # Where nothing is to be gained with these links, when to go back is chosen as at any other time.
        kept = promised <= least and gain >= -least
        if not kept and gain > least:
            shorter += f"; {chance(helped.value)}, and a change stays from once in {_SOME:g} on"
        elif not kept:
            shorter += f"; after {MOST} steps a change stays only if they are {WORSE:.0%} shorter"
        return self._end(iteration, kept, shorter, gain)

    @property
    def failure(self) -> Verdict | None:
        """The verdict by which the change is to be taken back."""
        return None if self.verdict is None or self.verdict.kept else self.verdict

    def _compared(self) -> tuple[list[float], list[float], float]:
        """The steps before and since, as the test compares them, and the gain (ms) that simulation promises.

        They are their times; or, if simulation explains how steps differ, by how much each was longer than what ran
        before takes by simulation under the links and op times of that step.
        """
        plain, self._is_simulated = (times(self._rows), times(self._after), self.promised), False
        ran = self.before.ran
        reported = [step for step in self._after if step.is_reported]
        known = paired(self.before.reported, ran)
        instead = paired(reported, ran, self._added(), self._slowdown_of_ops())
        if self.runs is None or len(instead) < FEWEST or not (explained(known, instead) or self._load_moved()):
            return plain
        by_conditions = [simulated for _, simulated in (*paired(self._rows, ran), *instead)]
        if deviation(by_conditions) < WORSE * median(by_conditions):
            return plain
        promised = median(
            then * self.shortfalls[0] - now * self.shortfalls[1]
            for (_, then), (_, now) in zip(instead, paired(reported, self.runs), strict=True)
        )
        self._is_simulated = True
        before, after = ([ms - simulated for ms, simulated in rows] for rows in (known, instead))
        return before, after, promised

    def _simulated_now(self) -> float:
        """How long steps since the change take (ms), by simulation and with the shortfall known before."""
        found = [simulated for _, simulated in paired(self._after, self.runs)]
        return median(found) * self.shortfalls[1] if found else math.inf

    def _load_moved(self) -> bool:
        """Whether ops as measured take clearly longer or shorter than before the change."""
        before, after = loads(self.before.reported), loads(self._after)
        if min(len(before), len(after)) < FEWEST:
            return False
        noise = max(deviation(ms) / median(ms) for ms in (times(self._rows), times(self._after)))
        return abs(median(after) / median(before) - 1) >= _CLEARLY * noise

    def _slowdown_of_ops(self) -> float:
        """How many times as long ops take because of the change. It is 1 unless ops became slower right at the switch
        and stay so, by more than they did from some steps to the next before the change.
        """
        known = loads((*self.before.usual, *self.before.since, *self.preparing))
        began, since = loads(self._after[:FEWEST]), loads(self._after[:_AT_SWITCH])
        levels = [median(known[place : place + FEWEST]) for place in range(len(known) - FEWEST + 1)]
        jumps = [then - now for now, then in zip(levels, levels[FEWEST:])]
        if min(len(jumps), len(began)) < FEWEST:
            return 1.0
        rise = max(_CLEARLY * deviation(jumps), WORSE * median(known))
        is_slower = min(median(began), median(since)) > levels[-1] + rise
        return median(began) / levels[-1] if is_slower else 1.0

    def _added(self) -> Mapping[Link, float]:
        """How much later (ms) messages are of links that go by delegates since the change: what the delegates add."""
        moved = set() if self.runs is None else set(self.runs.delegated) - set(self.before.ran.delegated)
        rises = []
        for way in (way for link in moved for way in (link, link[::-1])):
            rows = [
                [min(step.links.rows[way][0]) for step in row if step.links is not None and way in step.links.rows]
                for row in (self._rows, self._after)
            ]
            if all(rows):
                rises.append(median(rows[1]) - median(rows[0]))
        return dict.fromkeys(moved, max(0.0, median(rises) if rises else 0.0))

    def _end(self, iteration: int, kept: bool, why: str, gain: float = 0.0) -> Verdict:
        after = median(times(self._after))
        level = after if self._level is None else self._level
        without = after + gain if self._is_simulated else None
        nums = len(self._rows), len(self._after)
        self.verdict = Verdict(self.number, iteration, kept, why, level, after, *nums, self.paid, without)
        return self.verdict


def loads(steps: Iterable[TimedStep]) -> list[float]:
    """How many times as long as assumed the ops of each step took together, where that was measured."""
    return [step.load for step in steps if step.load is not None]


def paired(
    steps: Sequence[TimedStep],
    ran: Configuration | None,
    sooner: Mapping[Link, float] = NO_LINKS,
    slowed: float = 1.0,
) -> list[tuple[float, float]]:
    """Each step as measured, and as simulated with `ran` and the op times of the step, in ms. Steps that cannot be
    simulated are left out.
    """
    if ran is None:
        return []
    return [(step.ms, step.simulated(ran, sooner, "step", slowed)) for step in steps if step.simulated is not None]


def explained(*groups: Sequence[tuple[float, float]]) -> bool:
    """Whether simulation accounts for most of how the steps of each group differ, and they differ at all.

    Args:
        groups: steps, each as measured and as simulated (ms). What all steps of a group take longer than simulated is
            usual.
    """
    ms, left = [], []
    for steps in groups:
        times, rest = [each for each, _ in steps], [measured - simulated for measured, simulated in steps]
        ms += [each - median(times) for each in times]
        left += [each - median(rest) for each in rest]
    if min(map(len, groups)) < FEWEST or len(ms) < _ENOUGH:
        return False
    usual = median(measured for steps in groups for measured, _ in steps)
    return deviation(ms) >= WORSE * usual and deviation(left) <= _LEFT * deviation(ms)


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


_TELLS = 0.7
"""Deviations of a step by which it must become shorter, where nothing turned late: a trial shows no less."""
_CALM = 5
"""Steps that say how much steps vary, where nothing turned late and so nothing presses."""
_ASKED = 16
"""An answer takes as much evidence again for each so many steps of an open question: chance has had more turns."""
_MOST = 12
"""Doublings of what a decision takes."""

Doubt = tuple[Obstacle, str]
"""What stands in the way of a change, and the reason in words."""


def what_of(action: Action, then: Configuration) -> tuple[Action, object]:
    """What identifies a change, so that it is not tried again for the same cause."""
    return action, then.nodes if action is Action.MOVE else then.delegated


class Question:
    """Counts decisions, and says what speaks against the next one.

    Args:
        least_gain: share of a step that a change must save.

    Attributes:
        taken_back: changes that were tried and taken back.
    """

    def __init__(self, least_gain: float) -> None:
        self.taken_back: list[RevertedChange] = []
        self._least_gain = least_gain
        self._made: list[int] = []

    def decided(self, iteration: int) -> None:
        """Counts a decision. One that is taken back counts once more."""
        self._made = [*(made for made in self._made if made > iteration - WINDOW), iteration]

    def failed(self, number: int, what: object, cause: Mapping[Link, float], iteration: int) -> None:
        """A change was taken back: it is not tried again soon for the same cause."""
        self.decided(iteration)
        same = next((each for each in self.taken_back if each.is_of(what, cause)), None)
        if same is None:
            self.taken_back.append(RevertedChange(number, what, cause, iteration))
        else:
            same.number, same.iteration, same.num = number, iteration, same.num + 1

    def bars(self, what: object, cause: Mapping[Link, float], iteration: int) -> bool:
        """Whether a change that was taken back may not be tried again yet: while nothing is late, or a while."""
        same = [each for each in self.taken_back if each.is_of(what, cause)]
        return any(not cause or iteration - each.iteration < _AGAIN * 2 ** (each.num - 1) for each in same)

    def num_recent(self, iteration: int) -> int:
        """Decisions that count."""
        return min(sum(made > iteration - WINDOW for made in self._made), _MOST)

    def waits(self, iteration: int) -> bool:
        """Whether it is too soon for a change for which nothing turned late."""
        return bool(self._made) and iteration < self._made[-1] + 2 ** self.num_recent(iteration)

    def too_early(self, steps: Steps, iteration: int) -> Doubt | None:
        """What speaks against any answer to something that turned late, whatever it would gain: it may be a burst, or
        measured steps are hardly slower for it.
        """
        level, calm = steps.level, steps.calm
        if level is None or calm is None or not steps.is_open or len(steps.usual) < FEWEST:
            return None
        if len(steps.since) <= steps.burst:
            return Obstacle.PAUSE, f"it has been late for {len(steps.since)} steps, and may soon be over"
        said = f"steps took {calm:.4g} ms before and take {level:.4g} ms since"
        if steps.rise < self._least_gain * calm:
            return Obstacle.ABSORBED, f"{said}, and a change is tried if they take {self._least_gain:.0%} longer"
        needed = EXPLAINED * self._caution(steps, iteration)
        if steps.evidence >= needed:
            return None
        return Obstacle.NOISE, (
            f"{said}, where {steps.noise:.3g} ms more or less are usual; {chance(steps.evidence)}, and a change is "
            f"tried from once in {needed:.3g} on"
        )

    def _caution(self, steps: Steps, iteration: int) -> float:
        """How many times the usual evidence an answer takes."""
        return float(2 ** self.num_recent(iteration) * (1 + steps.num_open / _ASKED))

    def doubt(self, steps: Steps, iteration: int, gain: float, simulated_rise: float) -> Doubt | None:
        """What speaks against a change.

        Args:
            steps: of what runs.
            iteration: now.
            gain: how much shorter (ms) each step would be, by simulation.
            simulated_rise: how much longer steps are (ms) for what turned late, by simulation.
        """
        level = steps.level
        few = Obstacle.NOISE, "too few steps have run to tell how much they vary"
        if level is None or len(steps.present) < steps.fewest:
            return few
        if not steps.is_open or len(steps.usual) < FEWEST:
            calm = -(-_CALM // steps.ran.num_updates)
            return few if len(steps.present) < calm else self._improves(steps, iteration, gain, level)
        found = self.too_early(steps, iteration)
        if found is not None:
            return found
        needed = EXPLAINED
        if not explains(simulated_rise, steps.rise):
            needed = UNEXPLAINED
            if (least := self._shown(steps, level)) > gain:
                return self._too_little(steps, gain, least, level)
        needed *= self._caution(steps, iteration)
        if steps.evidence >= needed:
            return None
        return Obstacle.NOISE, (
            f"steps take {steps.rise:.4g} ms longer than before, of which simulation explains "
            f"{max(0.0, simulated_rise):.3g} ms; {chance(steps.evidence)}, and a change is tried from once in "
            f"{needed:.3g} on"
        )

    def least(self, steps: Steps) -> float:
        """How much shorter (ms) a step must become for a change that answers nothing."""
        return self._shown(steps, steps.level or 0.0) * 3 ** len(self.taken_back)

    def _shown(self, steps: Steps, level: float) -> float:
        """By how much (ms) a step must become shorter for a trial to tell the gain from noise."""
        return max(self._least_gain * level, _TELLS * steps.noise)

    def _improves(self, steps: Steps, iteration: int, gain: float, level: float) -> Doubt | None:
        """What speaks against a change that does not answer what turned late."""
        if self.waits(iteration):
            return Obstacle.PAUSE, "the plan was changed a short time ago"
        needed = self.least(steps)
        return None if gain >= needed else self._too_little(steps, gain, needed, level)

    def _too_little(self, steps: Steps, gain: float, least: float, level: float) -> Doubt:
        return Obstacle.NOISE, (
            f"the best plan would save {gain:.3g} of {level:.4g} ms a step by simulation; steps vary by "
            f"{steps.noise:.3g} ms anyway, and a plan is tried if it saves {least:.3g} ms or more"
        )
