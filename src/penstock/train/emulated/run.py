"""A run on emulated devices as one process sees it, and its end report. All make the same calls; rank 0 writes.

The report has what was simulated beside what was measured, what links were like, and what was decided.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from penstock.cost import Costs
from penstock.data import Corpus
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.emulation.pipeline import EmulatedPipeline
from penstock.runtime.mesh.peers import peers_of
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.emulated.settings import EmulatedSettings
from penstock.train.folder import RunFolder
from penstock.train.job import EmulatedJob
from penstock.train.metrics import Metrics, ProgressView
from penstock.train.run_report import RunReport, read_adaptation, write_plan
from penstock.train.start import StopRequest


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
        "pace of the emulated devices, so do not take its times for theirs; let nothing else run, send less with "
        "--message-cap, or slow all down with a larger --stretch"
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

    UNIT = "iteration"

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

    @property
    def pace(self) -> str:
        stretch = "" if self.stretch == 1 else f", slowed down {self.stretch:g} times (all times as if not)"
        measured, simulated = self.speeds
        speed = f"{measured:.1f} microbatches/s measured, {simulated:.1f} simulated"
        return f"{speed}; emulated with the costs of {self.costs}{stretch}"

    def rows(self) -> list[tuple[str, str]]:
        took = f"{self.measured:.1f} ms measured, {self.simulated:.1f} ms simulated ({self.median_error:.1%} apart)"
        bubbles = f"{self.measured_bubble_ratio:.1%} and {self.simulated_bubble_ratio:.1%}"
        rows = [("iteration", f"{took}; bubbles {bubbles}; nothing is learned, so there is no loss")]
        if self.window is None:
            return rows
        return [*rows, ("updates", f"{one_every(self.window)}, {bound(self.mismatch)} (proved)")]


def medians(iterations: Sequence[EmulatedIteration]) -> dict[str, float]:
    """What the report says of all iterations together."""
    return {
        "measured": median(each.measured for each in iterations),
        "simulated": median(each.simulated for each in iterations),
        "median_error": median(each.error for each in iterations),
        "measured_bubble_ratio": median(each.bubble for each in iterations),
        "simulated_bubble_ratio": median(each.simulated_bubble for each in iterations),
    }


class EmulatedRun:
    """A run as one process sees it.

    Its loop differs from that of real training: an emulated step has no batch, loss, update or checkpoint, and each
    iteration is also simulated. Both share the stop request, metrics, view and folder.

    Attributes:
        interrupted: a signal ended it early. report: the result, on rank 0's process.
    """

    def __init__(
        self, settings: EmulatedSettings, schedule: Schedule, costs: Costs, folder: RunFolder, quiet: bool
    ) -> None:
        self.settings, self.schedule, self.costs, self.quiet = settings, schedule, costs, quiet
        self._peers = peers_of(None, schedule.num_ranks, settings.timeout)
        self.first = 0 in self._peers.here
        # Ranks under torchrun each chose a free folder; the first one's it is.
        self.folder = RunFolder(Path(self._peers.gather(str(folder.path))[0]))
        self.stop = StopRequest()
        self.interrupted = False
        self.report: EmulatedReport | None = None

    def run(self) -> None:
        """Runs all iterations, or until a signal; rank 0 has the report afterwards.

        Raises:
            CostError, ControlError, RuntimeFailure: what `EmulatedPipeline` and its steps raise.
        """
        settings = self.settings
        iterations: list[EmulatedIteration] = []
        late: list[float] = []
        peaks = [0.0] * self.schedule.num_ranks
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stop)
            pipe = stack.enter_context(self._pipeline())
            dispatch = pipe.configuration.dispatch.value
            metrics = None
            if self.first:
                write_plan(self.folder, settings, pipe.configuration.schedule)
                metrics = stack.enter_context(Metrics(self.folder.metrics, 0))
            view = stack.enter_context(ProgressView(0, settings.steps, self.quiet or not self.first))
            pictures: list[tuple[float, list[Timeline]]] = []
            began = time.perf_counter()
            for number in range(settings.steps):
                step = pipe.step()
                late += step.late
                peaks = [max(pair) for pair in zip(peaks, step.timeline.peak_activations, strict=True)]
                if self.first:
                    simulated = pipe.simulated([step])[0]
                    iteration = EmulatedIteration.of(step.timeline, simulated, step.number)
                    iterations.append(iteration)
                    pictures = [*pictures[-4:], (iteration.measured, [simulated, step.timeline])]
                    assert metrics is not None, "rank 0 writes metrics"
                    metrics.write(
                        number,
                        {
                            "ms": iteration.measured,
                            "simulated_ms": iteration.simulated,
                            "bubble": iteration.bubble,
                            "number": step.number,
                        },
                    )
                    view.decisions(pipe.decisions)
                    view.iteration(number + 1, iteration.measured, iteration.simulated, step.number)
                if any(self._peers.gather(self.stop.asked)):
                    self.interrupted = number + 1 < settings.steps
                    if self.interrupted:
                        view.say(f"stopping after iteration {number + 1}")
                        break
            seconds = time.perf_counter() - began
            notices = pipe.notices
        if self.first:
            middle = sorted(pictures, key=lambda each: each[0])[len(pictures) // 2][1]
            self.report = self._report(iterations, late, peaks, seconds, notices, dispatch, middle)

    def _pipeline(self) -> EmulatedPipeline:
        settings = self.settings
        return EmulatedPipeline(
            self.schedule,
            self.costs,
            links=settings.link_conditions(),
            dispatch=settings.dispatch,
            stretch=settings.stretch,
            timeout=settings.timeout,
            adapt=self._adapt_options(),
            transport=settings.transport_options(),
        )

    def _adapt_options(self) -> AdaptOptions:
        """Links are always measured. The run changes its plan only if it adapts."""
        settings = self.settings
        folder = self.folder.path
        if settings.adapt:
            return AdaptOptions(folder, settings.store, host_memory=settings.host_units(self.costs))
        return AdaptOptions(folder, may_replan=False, may_delegate=False, dispatches=())

    def _report(
        self,
        iterations: list[EmulatedIteration],
        late: list[float],
        peaks: list[float],
        seconds: float,
        notices: list[str],
        dispatch: str,
        pictures: list[Timeline],
    ) -> EmulatedReport:
        settings, folder = self.settings, self.folder
        report = EmulatedReport(
            schedule=self.schedule.name,
            dispatch=dispatch,
            costs=settings.costs,
            transport=settings.transport,
            adapted=settings.adapt,
            num_ranks=self.schedule.num_ranks,
            num_microbatches=self.schedule.num_microbatches,
            stretch=settings.stretch,
            steps=len(iterations),
            interrupted=self.interrupted,
            seconds=seconds,
            late=(median(late), max(late)) if late else (0.0, 0.0),
            peaks=peaks,
            steered=read_adaptation(folder.path),
            notices=[
                *(known := settings.known_before(self.schedule)),
                *lost_pace(iterations),
                *notices,
            ],
            files={
                "schedule": str(folder.file("schedule.svg")),
                "timeline": str(folder.file("timeline.html")),
                "metrics": str(folder.metrics),
            },
            said_before=len(known),
            window=None if self.schedule.updates is None else settings.passes.window,
            mismatch=proved_mismatch(self.schedule),
            **medians(iterations),
        )
        report.write(folder, pictures)
        return report


class CheckedEmulation:
    """A run on emulated devices. Raises the errors of settings whose costs or host memory do not fit the plan."""

    report_type = EmulatedReport

    def __init__(self, job: EmulatedJob) -> None:
        self.job = job
        self.corpus: Corpus | None = None
        self._schedule = job.settings.replica_schedule()
        self._costs = job.settings.read_costs(self._schedule)
        job.settings.host_units(self._costs)

    def run(self, first: bool) -> EmulatedRun:
        job = self.job
        run = EmulatedRun(job.settings, self._schedule, self._costs, RunFolder(Path(job.folder)), job.as_json)
        run.run()
        return run

    def announcement(self) -> str:
        settings, schedule = self.job.settings, self._schedule
        where = "threads" if settings.in_process else "one process each"
        lines = [
            f"plan    {schedule.name} over {settings.ranks} ranks ({where}), {settings.microbatches} microbatches, "
            f"{settings.dispatch}, {settings.transport} transport",
            *([] if schedule.updates is None else [f"updates {bound(proved_mismatch(schedule))} (proved)"]),
            f"costs   {settings.costs}" + ("" if settings.stretch == 1 else f", {settings.stretch:g} times as long"),
            f"folder  {self.job.folder}",
            *(f"note    {notice}" for notice in settings.known_before(schedule)),
        ]
        return "\n".join(lines)

    def way_on(self, folder: RunFolder, said: str) -> str:
        return ""  # nothing was learned
