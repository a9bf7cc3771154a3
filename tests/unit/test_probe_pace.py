"""When links between nodes are probed: so that rounds take their share of the time, also where steps change."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.mesh.probe import LEAST_EVERY, MOST_EVERY, SHARE, ProbePace


class Run:
    """Steps and rounds of probes by a clock of our own, in so many processes that all take as long."""

    def __init__(self, round_s: float, num_processes: int = 4, sum_s: float = 0.0) -> None:
        self.now, self.round_s, self.sum_s = 0.0, round_s, sum_s
        self.num_processes = num_processes
        self.pace = ProbePace(self._sum, clock=lambda: self.now)
        self.step, self.rounds = 0, [0]
        self.probing = 0.0

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        self.now += self.sum_s
        self.probing += self.sum_s
        return values * self.num_processes

    def steps(self, num: int, step_s: float, counts: bool = True) -> None:
        for _ in range(num):
            self.now += step_s
            self.step += 1
            if self.pace.after_step():
                self.now += self.round_s
                self.probing += self.round_s
                self.pace.end(counts)
                self.rounds.append(self.step)

    @property
    def gaps(self) -> list[int]:
        return [b - a for a, b in zip(self.rounds, self.rounds[1:], strict=False)]


def test_short_rounds_come_as_often_as_they_may() -> None:
    run = Run(round_s=0.001)
    run.steps(20, 0.1)
    assert run.rounds == [0, 5, 10, 15, 20]


def test_a_long_round_waits_until_it_is_a_small_share_of_the_time() -> None:
    run = Run(round_s=0.25)
    run.steps(200, 0.1)
    assert run.gaps[0] == LEAST_EVERY
    assert set(run.gaps[1:]) == {63}, "0.25 s are 4% of 6.25 s"


def test_regression_steps_that_became_shorter_left_rounds_more_than_their_share() -> None:
    """Nodes moved away from a late link, and the next round came by what steps had taken before."""
    run = Run(round_s=0.25, sum_s=0.01)
    run.steps(5 + 3, 0.26)
    run.steps(300, 0.09)
    assert len(run.rounds) >= 5
    assert min(run.gaps[1:]) * 0.09 * SHARE >= 0.24, run.gaps
    assert run.gaps[-1] == 75, "what it costs to add up is part of the share"
    assert run.probing <= SHARE * run.now + 0.25 + 0.02


def test_rounds_come_at_last_however_long_they_take() -> None:
    run = Run(round_s=60.0)
    run.steps(450, 0.1)
    assert run.gaps[1:] == [MOST_EVERY, MOST_EVERY]


def test_a_round_in_which_nodes_moved_says_nothing_of_the_next() -> None:
    run = Run(round_s=10.0)
    run.steps(5, 0.1, counts=False)
    run.steps(5, 0.1, counts=False)
    assert run.rounds == [0, 5, 10]


@pytest.mark.parametrize("num_processes", [1, 8])
def test_how_many_processes_add_up_does_not_matter(num_processes: int) -> None:
    run = Run(round_s=0.25, num_processes=num_processes)
    run.steps(140, 0.1)
    assert run.rounds == [0, 5, 68, 131]
