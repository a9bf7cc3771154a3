"""The end report of a run on emulated devices: simulated beside measured, what links were like, what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from penstock.simulation import Timeline
from penstock.train.asynchronous import bound, one_every
from penstock.train.run_report import RunReport


@dataclass(frozen=True)
class EmulatedIteration:
    """One iteration: measured and simulated ms, idle shares of both, and the number of the plan that ran (0
    is the start).
    """

    measured: float
    simulated: float
    bubble: float
    simulated_bubble: float
    number: int

    @classmethod
    def of(cls, measured: Timeline, simulated: Timeline, number: int) -> EmulatedIteration:
        return cls(measured.makespan, simulated.makespan, measured.bubble_ratio, simulated.bubble_ratio, number)

    @property
    def error(self) -> float:
        """How far the measured time is from the simulated one, relative to the latter."""
        return abs(self.measured / self.simulated - 1) if self.simulated else 0.0


PACE = 1.1
"""How many times as long as simulated an iteration may take before the machine has lost the pace."""


def lost_pace(iterations: Sequence[EmulatedIteration]) -> list[str]:
    """A notice if iterations took longer than simulated. Emulated ops take their time whatever else runs, so this is
    the machine's doing, and the times say nothing about the devices.
    """
    measured = median(each.measured for each in iterations)
    simulated = median(each.simulated for each in iterations)
    if measured <= PACE * simulated:
        return []
    return [
        f"an iteration took {measured:.0f} ms where {simulated:.0f} ms were simulated: this machine did not keep the "
        "pace of the emulated devices, so do not take its times for theirs; let nothing else run, or slow all down "
        "with a larger --stretch"
    ]


@dataclass(frozen=True, kw_only=True)
class EmulatedReport(RunReport):
    """The result of a run. Times are ms as if the stretch were 1, and medians over iterations.

    Attributes:
        measured, simulated: time of an iteration. median_error: see `EmulatedIteration.error`.
        late: how much later than due an op ended (median, worst).
        peaks: most activations that each rank held, in the units of the costs.
        window: microbatches whose gradients an update adds up, if updates are ops. mismatch: most updates between a
            microbatch's forward and its backward, as proved.
    """

    UNIT = "iterations"

    costs: str
    transport: str
    adapted: bool
    num_microbatches: int
    stretch: float
    measured: float
    simulated: float
    median_error: float
    measured_bubble_ratio: float
    simulated_bubble_ratio: float
    late: tuple[float, float]
    peaks: list[float]
    window: int | None = None
    mismatch: int = 0

    @property
    def speeds(self) -> tuple[float, float]:
        """Microbatches per second, measured and simulated."""
        per_second = self.num_microbatches * 1e3
        return per_second / (self.measured or 1.0), per_second / (self.simulated or 1.0)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return super().from_json({**value, "late": tuple(value["late"])})

    def rows(self) -> list[tuple[str, str]]:
        stretch = "" if self.stretch == 1 else f" (slowed down {self.stretch:g} times; all times as if not)"
        return [
            (
                "devices",
                f"emulated, with the costs of {self.costs}{stretch}; nothing is learned, so there is no loss",
            ),
            ("iteration", f"{self.measured:.1f} ms measured, {self.simulated:.1f} ms simulated (medians)"),
            ("speed", "{:.1f} microbatches/s measured, {:.1f} simulated".format(*self.speeds)),
            *self._of_updates(),
            ("error", f"{self.median_error:.1%} from simulated, median over iterations"),
            ("bubbles", f"{self.measured_bubble_ratio:.1%} measured, {self.simulated_bubble_ratio:.1%} simulated"),
            ("held", f"activations at most, by rank: {', '.join(map(_shown, self.peaks))}"),
            ("sleeping", f"ops ended {self.late[0]:.2f} ms late (median), {self.late[1]:.2f} at most"),
            *(() if self.steered is None else self.steered.rows(self.adapted)),
        ]

    def _of_updates(self) -> list[tuple[str, str]]:
        if self.window is None:
            return []
        return [("updates", f"{one_every(self.window)}, {bound(self.mismatch)} (proved)")]


def _shown(held: float) -> str:
    """Bytes if the number is large enough to be bytes, otherwise stage activations."""
    return f"{held / 1e9:.1f} GB" if held >= 1e8 else f"{held:.4g}"


def medians(iterations: Sequence[EmulatedIteration]) -> dict[str, float]:
    """What the report says of all iterations together."""
    return {
        "measured": median(each.measured for each in iterations),
        "simulated": median(each.simulated for each in iterations),
        "median_error": median(each.error for each in iterations),
        "measured_bubble_ratio": median(each.bubble for each in iterations),
        "simulated_bubble_ratio": median(each.simulated_bubble for each in iterations),
    }
