"""A run on emulated devices as one process sees it. All make the same calls; rank 0 writes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from statistics import median

from penstock.cost import Costs
from penstock.data import Corpus
from penstock.planning.threads import num_cores
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.emulation.pipeline import EmulatedPipeline
from penstock.runtime.mesh.peers import peers_of
from penstock.runtime.transport.choose import TransportOptions
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.adaptation_summary import read_adaptation
from penstock.train.asynchronous import bound, proved_mismatch
from penstock.train.emulated.report import EmulatedIteration, EmulatedReport, lost_pace, medians
from penstock.train.emulated.settings import EmulatedSettings
from penstock.train.folder import RunFolder
from penstock.train.job import EmulatedJob
from penstock.train.metrics import Metrics
from penstock.train.progress import ProgressView
from penstock.train.run_report import write_plan
from penstock.train.stop import StopRequest

GB_A_CORE = 1.0
"""GB per second that one core can send and receive through gloo, roughly."""


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
            transport=TransportOptions(
                settings.transport, depth=settings.link_depth, delegates=settings.delegate_options()
            ),
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
                *settings.injected(),
                *self._cut(),
                *self._crowded(iterations),
                *lost_pace(iterations),
                *notices,
            ],
            files={
                "schedule": str(folder.file("schedule.svg")),
                "timeline": str(folder.file("timeline.html")),
                "metrics": str(folder.metrics),
                "page": f"penstock report {folder.path} writes it",
            },
            window=None if self.schedule.updates is None else settings.passes.window,
            mismatch=proved_mismatch(self.schedule),
            **medians(iterations),
        )
        report.write(folder, pictures)
        return report

    def _cut(self) -> list[str]:
        if not self.settings.is_cut(self.schedule):
            return []
        return [f"messages of more than {self.settings.message_cap} were sent, and simulated, as so many"]

    def _pace(self, iterations: list[EmulatedIteration]) -> list[str]:
        return [*self._crowded(iterations), *lost_pace(iterations)]

    def _crowded(self, iterations: list[EmulatedIteration]) -> list[str]:
        """Why iterations may be longer than simulated: more bytes per second than the cores can send."""
        settings = self.settings
        if settings.in_process:
            return []
        num_bytes = 2 * self.schedule.num_microbatches * sum(self.costs.message_bytes[:-1])
        seconds = median(each.simulated for each in iterations) / 1e3 * settings.stretch
        rate = num_bytes / seconds / 1e9 if seconds else 0.0
        if rate < GB_A_CORE * num_cores():
            return []
        return [
            f"messages come to {rate:.1f} GB/s, which {num_cores()} cores hardly pass on in time; give --message-cap "
            "or more --stretch"
        ]


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
        ]
        return "\n".join(lines)

    def below(self, folder: RunFolder) -> str:
        return ""

    def way_on(self, folder: RunFolder, said: str) -> str:
        return ""  # nothing was learned
