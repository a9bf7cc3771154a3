"""When links between nodes are probed: rounds take their share of the time, as one process plans for all."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.runtime.mesh.probe import LEAST_EVERY, MOST_EVERY, SHARE, ProbePace

pytestmark = pytest.mark.unit


class Run:
    """Steps and rounds of probes by a clock of our own, in two processes of which the first plans.

    Args:
        round_s: seconds of a round, of which the last tenth is telling what was found.
    """

    def __init__(self, round_s: float) -> None:
        self.now, self.round_s = 0.0, round_s
        self.first, self.other = ProbePace(clock=self._clock), ProbePace(clock=self._clock)
        self.step, self.rounds = 0, [0]
        self.probing = 0.0

    def _clock(self) -> float:
        return self.now

    def steps(self, num: int, step_s: float, is_soon: bool = False) -> None:
        for _ in range(num):
            self.now += step_s
            self.step += 1
            is_due = self.first.after_step(is_soon)
            assert self.other.after_step(is_soon) == is_due, "processes come to the same step"
            if is_due:
                self.now += 0.9 * self.round_s
                planned = self.first.plan(rest=0.1 * self.round_s)
                self.now += 0.1 * self.round_s
                for pace in (self.first, self.other):
                    pace.follow(planned)
                self.probing += self.round_s
                self.rounds.append(self.step)

    @property
    def gaps(self) -> list[int]:
        return [b - a for a, b in pairwise(self.rounds)]


def test_short_rounds_come_as_often_as_they_may() -> None:
    run = Run(round_s=0.001)
    run.steps(20, 0.1)
    assert run.rounds == [0, 5, 10, 15, 20]


def test_a_long_round_waits_until_it_is_a_small_share_of_the_time() -> None:
    run = Run(round_s=0.25)
    run.steps(200, 0.1)
    assert run.gaps == [LEAST_EVERY, 63, 63, 63], "0.25 s are 4% of 6.25 s"


def test_rounds_come_soon_while_slower_steps_have_no_known_cause() -> None:
    run = Run(round_s=0.25)
    run.steps(20, 0.1)
    run.steps(20, 0.1, is_soon=True)
    assert run.rounds == [0, 5, 21, 36], "after a quarter of the 63 steps that were planned"
    run.steps(80, 0.1)
    assert run.rounds[4:] == [51, 51 + 63], "one more was due when the question was answered"


def test_rounds_come_at_last_however_long_they_take() -> None:
    run = Run(round_s=60.0)
    run.steps(450, 0.1)
    assert run.gaps[1:] == [MOST_EVERY, MOST_EVERY]


def test_regression_a_round_right_after_nodes_had_moved_cost_more_than_its_share() -> None:
    """The round in which they moved counted as if it had taken no time, so that the next came five steps later."""
    run = Run(round_s=0.25)
    run.steps(5 + 25, 0.26)
    moved = run.step
    assert run.rounds[-1] == moved
    run.steps(300, 0.09)
    after = [step for step in run.rounds if step > moved]
    assert after[0] == moved + 25, "as many steps as were planned by those before"
    assert {b - a for a, b in pairwise(after)} == {70}
    assert 70 * 0.09 * SHARE >= 0.25
