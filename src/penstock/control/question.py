"""Whether a change is worth a trial, from clean steps: the question that stays open while something is late.

    steps rose, and simulation with the late links says as much    evidence of 3 is enough
    steps rose, and simulation does not say so                      30
    nothing turned late, and simulation promises a shorter step     more than a trial could take for noise

Each decision among the latest 1,024 steps doubles the evidence that the next one takes, and one that was taken back
doubles it twice. So whatever is measured, the number of changes in so many steps is bounded. A dead link waits for
nothing, and neither does taking back.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.control.advice import Obstacle
from penstock.control.configuration import Configuration
from penstock.control.decide import Action
from penstock.control.events import Link
from penstock.control.evidence import EXPLAINED, FEWEST, UNEXPLAINED, WINDOW, chance, explains
from penstock.control.steps import Steps
from penstock.control.trial import RevertedChange

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
        """Whether a change was tried for this cause and taken back."""
        return any(each.bars(what, cause, iteration) for each in self.taken_back)

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
        needed = EXPLAINED if explains(simulated_rise, steps.rise) else UNEXPLAINED
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
        return max(self._least_gain * (steps.level or 0.0), _TELLS * steps.noise) * 3 ** len(self.taken_back)

    def _improves(self, steps: Steps, iteration: int, gain: float, level: float) -> Doubt | None:
        """What speaks against a change that does not answer what turned late."""
        if self.waits(iteration):
            return Obstacle.PAUSE, "the plan was changed a short time ago"
        needed = self.least(steps)
        if gain >= needed:
            return None
        return Obstacle.NOISE, (
            f"the best plan would save {gain:.3g} of {level:.4g} ms a step by simulation; steps vary by "
            f"{steps.noise:.3g} ms anyway, and a plan is tried if it saves {needed:.3g} ms or more"
        )
