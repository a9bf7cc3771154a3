"""What runs of asynchronous schedules need: windows and passes, defaults, and updates in words.

A step is a batch, cut into microbatches, and has one learning rate. A pass is what the pipeline runs in one go:
it fills, runs all microbatches with the updates among them, and drains. A schedule without updates runs one
step per pass. A window is the microbatches whose gradients an update adds up.

    steps                  |   0   |   1   |   2   |   3   |       of 4 microbatches
    microbatches            0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3
    windows of 4           |   u   |   u   |   u   |   u   |       one update per step
    windows of 2           | u | u | u | u | u | u | u | u |       two
    windows of 8           |       u       |       u       |       one every other step
    passes of 2 steps      |               |               |
    windows of 16          |                               u       filled by two passes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any

from penstock.schedule import TENTATIVE, Schedule, count_mismatch
from penstock.schedule.weight_versions import PREDICTING
from penstock.train.checks import SettingsError

if TYPE_CHECKING:
    from penstock.train.settings import Settings


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

    def weights(self, counts: Sequence[float]) -> list[float]:
        """Factors that turn each microbatch's share in its window's loss into its share in its step's loss.

        Args:
            counts: how many targets or samples the loss of each microbatch of the pass is a mean over. The loss of a
                step that counts none is 0.
        """
        windows, steps = _sums(counts, self.window_in_pass), _sums(counts, self.microbatches)
        return [windows[m // self.window_in_pass] / (steps[m // self.microbatches] or 1) for m in range(len(counts))]


def _sums(values: Sequence[float], size: int) -> list[float]:
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


@dataclass(frozen=True)
class AsyncDefaults:
    """What a run of the schedule has unless its options say otherwise.

    Attributes:
        microbatches: of a step, per rank, if the batch has enough samples. None: the same as in any run.
        window: microbatches whose gradients an update adds up. None: those of a step.
        max_mismatch: most updates between a microbatch's forward and its backward. None: the schedule's own bound.
        learning: settings of optimizer and learning rate that replace those of synchronous runs.
    """

    microbatches: int | None = None
    window: int | None = None
    max_mismatch: int | None = None
    learning: Mapping[str, Any] = field(default_factory=dict)


ASYNCHRONOUS: Mapping[str, AsyncDefaults] = {
    "amdp": AsyncDefaults(microbatches=4, max_mismatch=0),
    "pipedream": AsyncDefaults(window=1),
    "pipedream-2bw": AsyncDefaults(),
    "xpipe": AsyncDefaults(),
    "spectrain": AsyncDefaults(
        window=1, learning={"optimizer": "SGD", "optimizer_options": {"momentum": 0.9}, "lr": 0.03}
    ),
    "vnag": AsyncDefaults(
        window=1,
        learning={
            "optimizer": "NAdam",
            "optimizer_options": {"betas": [0.99, 0.999], "momentum_decay": 0.004, "decoupled_weight_decay": True},
        },
    ),
}
"""Schedules that are trained with updates as ops. For `amdp` this is so only if one of OPTIONS is given."""

OPTIONS = ("window", "rule", "max_mismatch", "drain_every")


def usual_microbatches(schedule: str, ranks: int, batch: int | None = None) -> int | None:
    """How many microbatches a step has by default; None: as many as in any run.

    It is a multiple of the ranks, and at most the number of samples.

    Args:
        batch: samples that a pipeline has in a step; None for no limit.
    """
    usual = ASYNCHRONOUS.get(schedule)
    if usual is None or usual.microbatches is None or ranks < 1:
        return None
    return ranks * (usual.microbatches if batch is None else max(1, min(usual.microbatches, batch // ranks)))


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run, completed with the defaults of its schedule.

    By default `amdp` learns as a synchronous schedule. With one update per step and no mismatch its pipelines drain
    at each update anyway. Updates as ops would save no time then, and each stage would clip its gradient by itself.

    Args:
        given: all settings that are known: schedule, ranks, microbatches, steps and so on; None stands for not given.
    """
    found = {name: value for name, value in given.items() if value is not None}
    schedule, rule = str(found.get("schedule")), found.get("rule")
    usual = ASYNCHRONOUS.get(schedule)
    if usual is None or (schedule == "amdp" and not set(OPTIONS) & set(found)):
        return dict(given)
    by_rule = ASYNCHRONOUS.get(rule, usual) if isinstance(rule, str) else usual
    if not {"optimizer", "optimizer_options"} & set(found):
        found = {**by_rule.learning, **found}  # the learning rate goes with the optimizer
    microbatches, ranks = found["microbatches"], found["ranks"]
    of_blocks = schedule == "amdp" and ranks > 0 and ranks % 2 == 0
    if of_blocks and "window" not in found and microbatches % ranks:
        near = sorted({max(1, microbatches // ranks), microbatches // ranks + 1})
        raise SettingsError(
            f"without --window amdp updates once per step, so a step needs a multiple of {ranks} "
            f"microbatches, the size of a block, and got {microbatches}: give --microbatches "
            f"{' or '.join(str(count * ranks) for count in near)}, or --window"
        )
    found.setdefault("window", usual.window or microbatches)
    found.setdefault("dispatch", "frozen")
    if usual.max_mismatch is not None and rule is None:  # a rule is for what a mismatch does
        found.setdefault("max_mismatch", usual.max_mismatch)
    if schedule == "amdp" and rule in PREDICTING and rule != TENTATIVE:  # each copy predicts for itself
        found.setdefault("sharding", "none")
    if all(isinstance(found[name], int) and found[name] > 0 for name in ("window", "microbatches", "steps")):
        found.setdefault("drain_every", usual_steps(found["steps"], microbatches, found["window"]))
    return {**given, **found}


def check_windows(settings: Settings) -> None:
    """Raises SettingsError for windows that do not end where passes do."""
    passes = settings.passes
    if not passes.fits:
        whole = passes.num_microbatches
        near = [n for n in range(1, whole + 1) if whole % n == 0]
        near += range(2 * whole, passes.window + whole + 1, whole)
        best = sorted(sorted(near, key=lambda n: abs(n - passes.window))[:2])
        raise SettingsError(
            f"a window of {passes.window} microbatches neither divides the {whole} microbatches of a pass "
            f"({passes.steps} steps with {passes.microbatches} each) nor is a multiple of them; give --window "
            f"{' or '.join(map(str, best))}, or another --drain-every"
        )


def bound(most: int) -> str:
    """`at most 1 update between F and B`."""
    return f"at most {most} update{'' if most == 1 else 's'} between F and B" if most else "no update between F and B"


def one_every(window: int) -> str:
    """`one every 4 microbatches`: how often updates come."""
    return "one every microbatch" if window == 1 else f"one every {window} microbatches"


def proved_mismatch(schedule: Schedule) -> int:
    """The most updates between any microbatch's forward and backward; 0 where the schedule has none."""
    return max(count_mismatch(schedule).values(), default=0) if schedule.updates is not None else 0
