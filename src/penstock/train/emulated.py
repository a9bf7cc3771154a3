"""Runs on emulated devices: real dispatch, messages and clocks; ops that only take their time.

`penstock emulate` makes an `EmulatedJob`. All ranks make the same calls, as threads, as processes that
`run_emulation` starts, or under torchrun. Rank 0 writes the run's folder. The report has what was simulated beside
what was measured, what links were like, and what was decided. A rank that `run_emulation` starts is

    python -m penstock.train.emulated FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from penstock.cost import Costs, Links
from penstock.rank_environment import RankEnvironment
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.emulation.pipeline import EmulatedPipeline
from penstock.runtime.launch import init_process
from penstock.runtime.mesh.peers import peers_of
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.folder import RunFolder
from penstock.train.metrics import Metrics, ProgressView
from penstock.train.run_report import RunReport, read_adaptation, write_plan
from penstock.train.start import INTERRUPTED, RunFailed, StopRequest, start_ranks

JOB = "job"
"""The file in the folder of a started rank that has its job."""


@dataclass(frozen=True, kw_only=True)
class EmulatedJob:
    """What a run on emulated devices was asked to do.

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

    def announcement(self) -> str:
        """What is printed before the run."""
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


def run_emulation(job: EmulatedJob) -> int:
    """Runs a job on this host, or as a rank under torchrun, and prints the report. Returns the exit code.

    Raises:
        CostError, ControlError, RuntimeFailure: what `EmulatedPipeline` and its steps raise.
        RunFailed: a rank failed.
        SettingsError: the folder is used by another run.
    """
    if RankEnvironment.of(os.environ) is not None and not job.in_process:
        rank, _ = init_process(job.timeout)
        if rank == 0 and not job.as_json:
            print(job.announcement(), file=sys.stderr, flush=True)
        return _run_here(job)
    folder = RunFolder(Path(job.folder))
    with folder.made():
        folder.require_new(learns=False)  # another run may have begun there since the first look, and ended
        if not job.as_json:
            print(job.announcement(), file=sys.stderr, flush=True)
        if job.in_process:
            return _run_here(job)
        with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as handover:
            (Path(handover) / JOB).write_bytes(pickle.dumps(job))
            program = ["-m", "penstock.train.emulated", handover]
            code, said = start_ranks(program, job.schedule.num_ranks, "penstock.runtime.emulation.pipeline")
        report = EmulatedReport.read(folder.report)
        if report is None:
            raise RunFailed(said, code or 1)
        if said:
            print(said if code == 0 else f"penstock: {said}", file=sys.stderr, flush=True)
        return _show(job, report, code or (INTERRUPTED if report.interrupted else 0))


def _run_here(job: EmulatedJob) -> int:
    """Runs a job in this process, as all ranks or as one of torchrun's, and returns the exit code."""
    run = EmulatedRun(job)
    run.run()
    return _show(job, run.report, run.stop.exit_code if run.interrupted else 0)


def run_rank(handover: Path) -> None:
    """Runs one rank of a job that `run_emulation` wrote."""
    job: EmulatedJob = pickle.loads((handover / JOB).read_bytes())
    init_process(job.timeout)
    EmulatedRun(job).run()


def _show(job: EmulatedJob, report: EmulatedReport | None, code: int) -> int:
    """Prints the report, on the rank that has one."""
    if report is not None:
        text = json.dumps(report.to_json(), allow_nan=False) if job.as_json else "\n" + report.to_text()
        print(text, flush=True)
    return code


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

    def to_json(self) -> dict[str, float]:
        return {
            "ms": self.measured,
            "simulated_ms": self.simulated,
            "bubble": self.bubble,
            "number": self.number,
        }

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

    def __init__(self, job: EmulatedJob) -> None:
        self.job = job
        self._peers = peers_of(None, job.schedule.num_ranks, job.timeout)
        self.first = 0 in self._peers.here
        # Ranks under torchrun each chose a free folder; the first one's it is.
        self.folder = RunFolder(Path(self._peers.gather(job.folder)[0]))
        self.stop = StopRequest()
        self.interrupted = False
        self.report: EmulatedReport | None = None

    def run(self) -> None:
        """Runs all iterations, or until a signal; rank 0 has the report afterwards.

        Raises:
            CostError, ControlError, RuntimeFailure: what `EmulatedPipeline` and its steps raise.
        """
        job = self.job
        iterations: list[EmulatedIteration] = []
        late: list[float] = []
        peaks = [0.0] * job.schedule.num_ranks
        pictures: list[tuple[float, list[Timeline]]] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stop)
            pipe = stack.enter_context(self._pipeline())
            dispatch = pipe.configuration.dispatch.value
            metrics = None
            if self.first:
                write_plan(self.folder, json.dumps(job.settings, indent=2), pipe.configuration.schedule)
                metrics = stack.enter_context(Metrics(self.folder.metrics, 0))
            view = stack.enter_context(ProgressView(0, job.steps, job.as_json or not self.first))
            began = time.perf_counter()
            for number in range(job.steps):
                step = pipe.step()
                late += step.late
                peaks = [max(pair) for pair in zip(peaks, step.timeline.peak_activations, strict=True)]
                if metrics is not None:
                    simulated = pipe.simulated([step])[0]
                    iteration = EmulatedIteration.of(step.timeline, simulated, step.number)
                    iterations.append(iteration)
                    pictures = [*pictures[-4:], (iteration.measured, [simulated, step.timeline])]
                    metrics.write(number, iteration.to_json())
                    view.decisions(pipe.decisions)
                    view.iteration(number + 1, iteration.measured, iteration.simulated, step.number)
                if any(self._peers.gather(self.stop.asked)):
                    self.interrupted = number + 1 < job.steps
                    if self.interrupted:
                        view.say(f"stopping after iteration {number + 1}")
                        break
            seconds = time.perf_counter() - began
            notices = pipe.notices
        if self.first:
            middle = sorted(pictures, key=lambda each: each[0])[len(pictures) // 2][1]
            self.report = self._report(iterations, late, peaks, seconds, notices, dispatch, middle)

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
        iterations: list[EmulatedIteration],
        late: list[float],
        peaks: list[float],
        seconds: float,
        notices: list[str],
        dispatch: str,
        pictures: list[Timeline],
    ) -> EmulatedReport:
        job, folder = self.job, self.folder
        updates = job.schedule.updates
        report = EmulatedReport(
            schedule=job.schedule.name,
            dispatch=dispatch,
            costs=job.settings["costs"],
            transport=job.transport,
            adapted=job.adapt,
            num_ranks=job.schedule.num_ranks,
            num_microbatches=job.schedule.num_microbatches,
            stretch=job.stretch,
            steps=len(iterations),
            interrupted=self.interrupted,
            seconds=seconds,
            late=(median(late), max(late)) if late else (0.0, 0.0),
            peaks=peaks,
            steered=read_adaptation(folder.path),
            notices=[*job.notices, *lost_pace(iterations), *notices],
            files={
                "schedule": str(folder.file("schedule.svg")),
                "timeline": str(folder.file("timeline.html")),
                "metrics": str(folder.metrics),
            },
            said_before=len(job.notices),
            window=None if updates is None else updates.window,
            mismatch=proved_mismatch(job.schedule),
            **medians(iterations),
        )
        report.write(folder, pictures)
        return report


if __name__ == "__main__":
    from penstock.train import emulated  # the module by its name, by which the job was pickled

    emulated.run_rank(Path(sys.argv[1]))
