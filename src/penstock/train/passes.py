"""How the steps of a run form windows and passes. Pure arithmetic, the same on every rank.

A step is a batch, cut into microbatches, and has one learning rate. A pass is what the pipeline runs in one go:
it fills, runs all microbatches with the updates among them, and drains. A schedule without updates runs one
step per pass.

    steps                  |   0   |   1   |   2   |   3   |       of 4 microbatches
    microbatches            0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3
    windows of 4           |   u   |   u   |   u   |   u   |       one update per step
    windows of 2           | u | u | u | u | u | u | u | u |       two
    windows of 8           |       u       |       u       |       one every other step
    passes of 2 steps      |               |               |
    windows of 16          |                               u       filled by two passes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

USUAL_STEPS = 8
"""Default steps of a pass. With four ranks and eight microbatches per step, AMDP's ranks are then idle for 2%."""


@dataclass(frozen=True)
class Passes:
    """How many microbatches are in a step, a pass and a window.

    Attributes:
        microbatches: of a step. steps: of a pass.
        window: microbatches whose gradients an update adds up. A pass holds a whole number of windows, or a window a
            whole number of passes.
    """

    microbatches: int
    steps: int
    window: int

    @property
    def num_microbatches(self) -> int:
        """Of a pass."""
        return self.steps * self.microbatches

    @property
    def fits(self) -> bool:
        """Whether windows end where passes do."""
        longer, shorter = max(self.window, self.num_microbatches), min(self.window, self.num_microbatches)
        return longer % shorter == 0

    @property
    def window_in_pass(self) -> int:
        """Microbatches of a window that one pass runs. The pass's schedule is built with this window."""
        return min(self.window, self.num_microbatches)

    @property
    def passes_a_window(self) -> int:
        """How many passes fill a window: 1 if the window fits into one."""
        return max(1, self.window // self.num_microbatches)

    @property
    def unit(self) -> int:
        """The fewest steps after which both a pass and a window end."""
        return self.steps * self.passes_a_window

    def whole(self, steps: int, start: int = 0, gathered: int = 0) -> int:
        """The number of steps, at least as many as asked for, after which a pass that began at `start`
        and a window end.

        Args:
            gathered: microbatches in the window that is open at `start`.
        """
        left = (self.window - gathered) // self.num_microbatches * self.steps if gathered else 0
        first = start + left  # here the window that is open closes
        return first + max(0, -(-(steps - first) // self.unit)) * self.unit

    def closes(self, gathered: int) -> bool:
        """Whether the next pass closes a window that has `gathered` microbatches already."""
        return gathered + self.num_microbatches >= self.window

    def after(self, gathered: int) -> int:
        """Microbatches in the open window after another pass."""
        return 0 if self.closes(gathered) else gathered + self.num_microbatches

    def rates(self, first: int, rate: Callable[[int], float]) -> list[float]:
        """The learning rate of each update of the pass that begins with step `first`: that of the step in
        which it falls.
        """
        window = self.window_in_pass
        ends = range(window - 1, self.num_microbatches, window)
        return [rate(first + end // self.microbatches) for end in ends]

    def updates_by(self, step: int, gathered: int) -> int:
        """Updates of a pass by the end of its step `step` (from 0), if the window had `gathered` microbatches
        before.
        """
        return (gathered + (step + 1) * self.microbatches) // self.window

    def weights(self, samples: Sequence[int]) -> list[float]:
        """Factors that turn each microbatch's share in its window's loss into its share in its step's loss.

        Args:
            samples: of each microbatch of the pass.
        """
        windows, steps = _sums(samples, self.window_in_pass), _sums(samples, self.microbatches)
        return [windows[m // self.window_in_pass] / steps[m // self.microbatches] for m in range(len(samples))]


def _sums(values: Sequence[int], size: int) -> list[int]:
    return [sum(values[start : start + size]) for start in range(0, len(values), size)]


def usual_steps(total: int, microbatches: int, window: int) -> int:
    """The default number of steps in a pass: near 8, so that windows fit and the run is a whole number of passes.

    If no number near 8 divides the run, the run is rounded up to whole passes.
    """
    alike = lcm(microbatches, window) // microbatches  # steps after which a window ends with a step
    choices = list(range(alike, 2 * USUAL_STEPS + 1, alike)) or [alike]
    near = sorted(choices, key=lambda n: max(n, USUAL_STEPS) / min(n, USUAL_STEPS))
    dividing = [n for n in near if total % n == 0 and (n >= USUAL_STEPS / 2 or n == total)]
    return (dividing or near)[0]
