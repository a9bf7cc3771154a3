"""Runs on emulated devices: real dispatch, messages and clocks; ops that only take their time.

`penstock emulate` makes an `EmulatedJob`, and `start.run_job` runs it. Its ranks are threads of this process or
processes. All ranks make the same calls. Rank 0 writes the run's folder. The report shows simulated times beside
measured ones, the delays of links, and the decisions.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from penstock.cost import Costs, Links
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.emulation.pipeline import EmulatedPipeline
from penstock.runtime.mesh.peers import peers_of
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.folder import RunFolder
from penstock.train.metrics import ITERATIONS, Metrics, ProgressView
from penstock.train.report import Report, read_adaptation, write_plan
from penstock.train.start import StopRequest


@dataclass(frozen=True, kw_only=True)
class EmulatedJob:
    """What a run on emulated devices was asked to do; a `LaunchedJob` of `start`.

    Attributes:
        schedule: what an iteration runs. costs: of its stages, with the messages that are really sent.
        links: conditions to inject. memory_limit: most activations per rank, as `ps.simulate` takes it.
        steps: iterations. stretch: factor by which ops and links are slowed down.
        transport: "host", "gloo", "direct" or "delegate".
        adapt: change schedule, dispatch and delegated links if that is faster over the measured links.
        store: redis://HOST:PORT for the ranks' reports; None: the job's own. host_memory: activations, in the units
            of the costs, that may wait in each host's memory while a link is delegated.
        in_process: ranks are threads of this process. timeout: most seconds that any wait may last.
        folder: the run's. as_json: print the report as JSON and nothing else.
        settings: what was asked for, as the run's folder keeps it. notices: what is known before the run begins.
    """

    schedule: Schedule
    costs: Costs
    links: Links
    dispatch: str
    memory_limit: Any
    steps: int
    stretch: float
    transport: str
    adapt: bool
    store: str | None
    host_memory: float
    in_process: bool
    timeout: float
    folder: str
    as_json: bool
    settings: Mapping[str, Any]
    notices: tuple[str, ...]

    environment: ClassVar[Mapping[str, str]] = {}

    @property
    def num_processes(self) -> int:
        return self.schedule.num_ranks

    def require_folder(self, folder: RunFolder) -> None:
        folder.require_new(learns=False)

    def run(self, is_first: bool) -> int:
        return EmulatedRun(self).run()

    def way_on(self, said: str) -> str:
        return ""

    def announcement(self) -> str:
        schedule = self.schedule
        where = "threads" if self.in_process else "one process each"
        stretch = "" if self.stretch == 1 else f", {self.stretch:g} times as long"
        lines = [
            f"plan    {schedule.name} over {schedule.num_ranks} ranks ({where}), {schedule.num_microbatches} "
            f"microbatches, {self.dispatch}, {self.transport} transport",
            *([] if schedule.updates is None else [f"updates {bound(proved_mismatch(schedule))} (proved)"]),
            f"costs   {self.settings['costs']}{stretch}",
            f"folder  {self.folder}",
            *(f"note    {notice}" for notice in self.notices),
        ]
        return "\n".join(lines)


def iteration_times(measured: Timeline, simulated: Timeline) -> dict[str, float]:
    """The times of an iteration (ms) and its bubble ratios; `median_error` is the error of the measured time.

    report.json has the median of each over all iterations.
    """
    error = abs(measured.makespan / simulated.makespan - 1) if simulated.makespan else 0.0
    return {
        "measured": measured.makespan,
        "simulated": simulated.makespan,
        "median_error": error,
        "measured_bubble_ratio": measured.bubble_ratio,
        "simulated_bubble_ratio": simulated.bubble_ratio,
    }


PACE = 1.1
"""How many times as long as simulated an iteration may take before the machine has lost the pace."""


def lost_pace(measured: float, simulated: float) -> list[str]:
    """A notice if iterations took longer than simulated (medians, in ms).

    Emulated ops take their time whatever else runs. So the machine was too busy, and its times say nothing about the
    devices.
    """
    if measured <= PACE * simulated:
        return []
    return [
        f"an iteration took {measured:.0f} ms where {simulated:.0f} ms were simulated: this machine did not keep the "
        "pace of the emulated devices, so do not take its times for theirs; let nothing else run, send less with "
        "--set message_cap, or slow all down with a larger --stretch"
    ]


class EmulatedRun:
    """A run as one process sees it.

    Its loop differs from that of real training: an emulated step has no batch, loss, update or checkpoint, and each
    iteration is also simulated. Both share the stop request, metrics, view and folder.
    """

    def __init__(self, job: EmulatedJob) -> None:
        self.job = job
        self._peers = peers_of(None, job.schedule.num_ranks, job.timeout)
        self.first = 0 in self._peers.here
        # Ranks under torchrun each chose a free folder. All use the folder of the first rank.
        self.folder = RunFolder(Path(self._peers.gather(job.folder)[0]))
        self.stop = StopRequest()

    def run(self) -> int:
        """Runs all iterations, or until a signal. Then rank 0 writes the report and prints it.

        Returns:
            The exit code.

        Raises:
            CostError, ControlError, RuntimeFailure: what `EmulatedPipeline` and its steps raise.
        """
        job = self.job
        iterations: list[dict[str, float]] = []
        late: list[float] = []
        peaks = [0.0] * job.schedule.num_ranks
        pictures: list[tuple[float, list[Timeline]]] = []
        interrupted = False
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stop)
            pipe = stack.enter_context(self._pipeline())
            dispatch = pipe.configuration.dispatch.value
            metrics = None
            if self.first:
                write_plan(self.folder, json.dumps(job.settings, indent=2), pipe.configuration.schedule)
                metrics = stack.enter_context(Metrics(self.folder.metrics, 0))
            view = stack.enter_context(ProgressView(0, job.steps, job.as_json or not self.first, ITERATIONS))
            began = time.perf_counter()
            for number in range(job.steps):
                step = pipe.step()
                late += step.late
                peaks = [max(pair) for pair in zip(peaks, step.timeline.peak_activations, strict=True)]
                if metrics is not None:
                    simulated = pipe.simulated([step])[0]
                    times = iteration_times(step.timeline, simulated)
                    iterations.append(times)
                    ms, simulated_ms = times["measured"], times["simulated"]
                    pictures = [*pictures[-4:], (ms, [simulated, step.timeline])]
                    line = {"ms": ms, "simulated_ms": simulated_ms, "bubble": step.timeline.bubble_ratio}
                    metrics.write(number, line | {"number": step.number})
                    view.decisions(pipe.decisions)
                    view.iteration(number + 1, ms, simulated_ms, step.number)
                if any(self._peers.gather(self.stop.asked)):
                    interrupted = number + 1 < job.steps
                    if interrupted:
                        view.say(f"stopping after iteration {number + 1}")
                        break
            seconds = time.perf_counter() - began
            notices = pipe.notices
        if self.first:
            report = self._report(iterations, late, peaks, seconds, notices, dispatch, interrupted)
            report.write(sorted(pictures, key=lambda each: each[0])[len(pictures) // 2][1])
            report.show(job.as_json)
        return self.stop.exit_code if interrupted else 0

    def _pipeline(self) -> EmulatedPipeline:
        job = self.job
        delegates = DelegateOptions() if job.transport == "delegate" or job.adapt else None
        return EmulatedPipeline(
            job.schedule,
            job.costs,
            links=job.links,
            dispatch=job.dispatch,
            memory_limit=job.memory_limit,
            stretch=job.stretch,
            timeout=job.timeout,
            adapt=self._adapt_options(),
            transport=TransportOptions(job.transport, delegates),
        )

    def _adapt_options(self) -> AdaptOptions:
        """Links are always measured. The run changes its plan only if it adapts."""
        folder = self.folder.path
        if self.job.adapt:
            return AdaptOptions(folder, self.job.store, host_memory=self.job.host_memory)
        return AdaptOptions(folder, may_replan=False, may_delegate=False, dispatches=())

    def _report(
        self,
        iterations: Sequence[Mapping[str, float]],
        late: Sequence[float],
        peaks: list[float],
        seconds: float,
        notices: Sequence[str],
        dispatch: str,
        interrupted: bool,
    ) -> Report:
        """The result of a run. Times are ms as if the stretch were 1, and medians over iterations.

        report.json has, in addition to what it has of every run: the costs and the transport by name, whether the run
        adapts, microbatches, the stretch; the medians of `iteration_times`; how much later than due an op ended (the
        median and the worst, `late`); most activations that each rank held, in the units of the costs (`peaks`); if
        updates are ops, the microbatches whose gradients an update adds up (`window`), and most updates between a
        microbatch's forward and its backward, as proved (`mismatch`).
        """
        job, count, mismatch = self.job, self.job.schedule.num_microbatches, proved_mismatch(self.job.schedule)
        window = None if job.schedule.updates is None else job.schedule.updates.window
        found = {name: median(each[name] for each in iterations) for name in iterations[0]}
        speed = "{:.1f} microbatches/s measured, {:.1f} simulated".format(
            *(count * 1e3 / (found[name] or 1.0) for name in ("measured", "simulated"))
        )
        stretch = "" if job.stretch == 1 else f", slowed down {job.stretch:g} times (all times as if not)"
        took = "{measured:.1f} ms measured, {simulated:.1f} ms simulated ({median_error:.1%} apart)".format_map(found)
        bubbles = "{measured_bubble_ratio:.1%} and {simulated_bubble_ratio:.1%}".format_map(found)
        rows = [("iteration", f"{took}; bubbles {bubbles}; nothing is learned, so there is no loss")]
        if window is not None:
            rows.append(("updates", f"{one_every(window)}, {bound(mismatch)} (proved)"))
        return Report(
            folder=self.folder,
            schedule=job.schedule.name,
            dispatch=dispatch,
            num_ranks=job.schedule.num_ranks,
            steps=len(iterations),
            interrupted=interrupted,
            seconds=seconds,
            notices=[*job.notices, *lost_pace(found["measured"], found["simulated"]), *notices],
            said_before=len(job.notices),
            steered=read_adaptation(self.folder.path),
            details={
                "costs": job.settings["costs"],
                "transport": job.transport,
                "adapted": job.adapt,
                "num_microbatches": count,
                "stretch": job.stretch,
                **found,
                "late": (median(late), max(late)) if late else (0.0, 0.0),
                "peaks": peaks,
                "window": window,
                "mismatch": mismatch,
            },
            noun="iteration",
            pace=f"{speed}; emulated with the costs of {job.settings['costs']}{stretch}",
            rows=rows,
        )
