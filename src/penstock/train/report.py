"""The end report: did it learn, how fast, and did it run as simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.cost import Costs
from penstock.simulate import Timeline, simulate


@dataclass(frozen=True)
class TimingReport:
    """A measured step beside the simulation of the same schedule with the run's own op times (ms)."""

    measured_makespan: float
    simulated_makespan: float
    measured_bubble_ratio: float
    simulated_bubble_ratio: float


@dataclass(frozen=True)
class Report:
    """What a run came to.

    Attributes:
        loss, unigram, bigram: nats a token on the validation text: the model's, and those of counting.
        beats_bigram: whether the model is better than counting pairs.
        peak_memory: most bytes of each rank's process (or device), by rank.
    """

    schedule: str
    dispatch: str
    num_ranks: int
    num_parameters: int
    steps: int
    interrupted: bool
    train_loss: float
    loss: float
    unigram: float
    bigram: float
    beats_bigram: bool
    tokens_per_second: float
    seconds: float
    timing: TimingReport
    peak_memory: list[int]
    notices: list[str]
    files: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        verdict = "below the bigram" if self.beats_bigram else "not below the bigram"
        timing = self.timing
        rows = [
            ("schedule", f"{self.schedule}, {self.dispatch}, {self.num_ranks} ranks"),
            ("model", f"{self.num_parameters:,} parameters, {self.steps} steps"),
            (
                "validation loss",
                f"{self.loss:.3f} nats a token, {verdict} ({self.bigram:.3f}; unigram {self.unigram:.3f})",
            ),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s over {self.seconds:.0f} s"),
            (
                "a step",
                f"measured {timing.measured_makespan:.1f} ms, simulated {timing.simulated_makespan:.1f} ms",
            ),
            (
                "bubble ratio",
                f"measured {timing.measured_bubble_ratio:.1%}, simulated {timing.simulated_bubble_ratio:.1%}",
            ),
            ("peak memory", "  ".join(f"rank {r} {b / 2**20:,.0f} MiB" for r, b in enumerate(self.peak_memory))),
            *(("note", notice) for notice in self.notices),
            *self.files.items(),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def timing_report(measured: Timeline, costs: Costs) -> tuple[TimingReport, Timeline]:
    """Simulates what was measured, with the costs read off the run."""
    simulated = simulate(measured.schedule, costs, dispatch=measured.dispatch)
    report = TimingReport(measured.makespan, simulated.makespan, measured.bubble_ratio, simulated.bubble_ratio)
    return report, simulated
