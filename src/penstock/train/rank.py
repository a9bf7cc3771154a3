"""One rank's run from its settings to its report. Every rank makes the same calls; rank 0 does the writing."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.control import Configuration
from penstock.dispatch import Dispatch
from penstock.planning.batches import plan_batch
from penstock.planning.microbatch_order import DISPATCHES
from penstock.planning.threads import num_cores
from penstock.report.run_record import read_record
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.checkpoint import DamagedCheckpointError, Reader
from penstock.runtime.checkpoint.save_load import export_model, find
from penstock.runtime.execute.timeline import measured_costs
from penstock.runtime.transport.choose import TransportChoice
from penstock.simulation import Timeline
from penstock.simulation.simulator import AUTO
from penstock.simulation.transport import as_transport
from penstock.train.folder import RunFolder, is_folder, write_whole
from penstock.train.inputs import Inputs, build_pipeline, device_of
from penstock.train.measured_dispatch import MeasuredDispatch
from penstock.train.metrics import Metrics, ProgressView
from penstock.train.planned_batches import BatchRecord, PlannedBatches, is_measured
from penstock.train.report import Report, TimingReport, UpdateReport, notices_of, timing_report, update_report
from penstock.train.resume import damaged
from penstock.train.run_report import read_adaptation, write_plan
from penstock.train.settings import ARRIVAL, MEASURED, Settings
from penstock.train.start import StopRequest
from penstock.train.tasks.task import ExportableTask
from penstock.train.training import Training

NOT_FINITE = "look at the data of that step, or give a lower --lr or --clip"
PROFILED_PASSES = 5
"""Number of passes near the end whose timelines give the profile of the run."""


class ProfiledStep(NamedTuple):
    """A measured step, and what it ran."""

    timeline: Timeline
    configuration: Configuration


class FinalMeasurements(NamedTuple):
    """Measurements at the end: how good the model is; most bytes of each rank, and how many of them are weights; the
    model's size and how much of it is trained; for stages whose backward is split, what waits for W.
    """

    text: str | None
    peak_memory: list[int]
    state: list[dict[str, int]]
    num_parameters: int
    num_trained: int
    deferred: list[dict[str, Any]]


class RankRun:
    """A run as one rank sees it."""

    def __init__(
        self,
        inputs: Inputs,
        folder: RunFolder,
        first: bool,
        quiet: bool,
        export: str | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self.inputs, self.first, self.quiet, self.export = inputs, first, quiet, export
        settings = inputs.settings
        self.notices = known_before(settings, notices)
        self.pipe = build_pipeline(inputs, self._adapt_options(folder))
        self._dispatch = self.pipe.dispatch.value
        # Ranks under torchrun each chose a free folder; the first one's it is.
        self.folder = RunFolder(Path(self.pipe.gather(str(folder.path))[0]))
        self.planned = self._planned()
        chosen_again = self._plans_say and self.planned is None and device_of(settings).type == "cpu"
        self.measured = MeasuredDispatch(self.pipe) if chosen_again else None
        self.training = Training(
            self.pipe,
            settings.passes,
            inputs.data.batches if self.planned is None else self.planned,
            settings.learning_rate,
            settings.is_asynchronous,
            settings.dp // settings.replicas_here,
        )
        self.stop = StopRequest()
        self.interrupted = False
        self.report: Report | None = None

    def _planned(self) -> PlannedBatches | None:
        """Batches of whole documents: planned, or taken from a record."""
        settings, documents = self.inputs.settings, self.inputs.data.documents
        if documents is None or settings.packing == ARRIVAL:
            return None
        plan = record = None
        if self.first:
            taken = settings.record
            record = BatchRecord(self.folder.file("batches.jsonl") if taken is None else Path(taken))
            if taken is None:
                plan = functools.partial(
                    plan_batch,
                    schedule=settings.replica_schedule(),
                    num_replicas=settings.dp,
                    token_limit=settings.microbatch_tokens,
                    dispatches=self._dispatches(),
                )
        return PlannedBatches(documents, plan, record, lambda value: self.pipe.gather(value)[0], self._run_by)

    def _dispatches(self) -> tuple[str, ...]:
        """What plans of batches may choose from: with "auto" all that the transport runs, unless the run adapts and
        so chooses itself.
        """
        settings = self.inputs.settings
        free = self._plans_say and device_of(settings).type == "cpu"
        return tuple(each.value for each in DISPATCHES) if free else (self.pipe.dispatch.value,)

    @property
    def _plans_say(self) -> bool:
        """Whether each step has the dispatch of its plan: with "auto", since the plan knows the lengths."""
        settings = self.inputs.settings
        return settings.dispatch == AUTO and not settings.adapt

    def _run_by(self, dispatches: Sequence[str]) -> None:
        """Sets the dispatch of the next steps: that of this process's replica, or of all if they run as one."""
        settings = self.inputs.settings
        if not self._plans_say:
            return
        if settings.replicas_here == settings.dp:
            given = max(sorted({*dispatches}), key=dispatches.count)
        else:
            given = dispatches[dist.get_rank() // settings.tp % settings.dp]  # processes lie as `mesh_of` has them
        self._dispatch = AUTO
        if given != self.pipe.dispatch.value:
            self.pipe.reconfigure(replace(self.pipe.configuration, dispatch=Dispatch(given)))

    def _adapt_options(self, folder: RunFolder) -> AdaptOptions | None:
        settings = self.inputs.settings
        if not settings.adapt:
            return None
        return AdaptOptions(folder.path, settings.store, host_memory=settings.host_units)

    def resume(self, checkpoint: str | None) -> None:
        """Continues from the checkpoint of this name, if one was written. Raises CheckpointError."""
        if checkpoint is None:
            return
        try:
            stateful = self.inputs.data.stateful
            self.training.resume(self.pipe.load(self.folder.checkpoints / checkpoint, stateful=stateful))
        except DamagedCheckpointError as error:
            raise damaged(error, self.folder) from error

    def verify(self) -> None:
        """Checks on the batch of the next step that model and loss keep the contract. Raises VerifyError."""
        found = self.training.verify()
        if self.first and not self.quiet:
            print(f"verify  the contract on the batch of step {self.training.steps}\n{found}", file=sys.stderr)

    def run(self) -> None:
        """Trains to the last step, or until a signal. Afterwards rank 0 has the report."""
        settings, training = self.inputs.settings, self.training
        start = training.steps
        profile: list[ProfiledStep] = []
        loss: float | None = None
        validation: float | None = None
        seconds, trained = 0.0, 0
        metrics: Metrics | None = None
        self.pipe.sum_each_step(lambda: (float(self.stop.asked), self.pipe.idle_share(), 1.0))
        with contextlib.ExitStack() as stack:
            # First of all: whoever sees the run's folder may interrupt it.
            stack.enter_context(self.stop)
            if self.first:
                write_plan(self.folder, settings.to_json(), self.inputs.schedule)
                metrics = stack.enter_context(Metrics(self.folder.metrics, start, self.folder.file("tensorboard")))
            view = stack.enter_context(ProgressView(start, settings.steps, self.quiet or not self.first))
            while training.steps < settings.steps:
                running, number = self.pipe.configuration, self.pipe.number
                done = training.run_pass()
                seconds += done.seconds
                loss = done.losses[-1]
                asked, bubble = self._stop_and_idle()
                tokens = self._num_tokens(range(done.first, training.steps))
                trained += tokens
                speed = tokens / done.seconds
                values = {f"{self._unit}_per_second": speed, "bubble": bubble, **self._mesh_values()}
                if done.grad_norm is not None:
                    values["grad_norm"] = done.grad_norm
                if settings.adapt and self.first:
                    values["plan"] = number
                    view.decisions(self.pipe.decisions)
                last = training.steps >= settings.steps
                if training.steps + PROFILED_PASSES * len(done.losses) > settings.steps or asked:
                    profile.append(ProfiledStep(self.pipe.timeline(), running))
                if self.measured is not None and (chosen := self.measured.after_pass()) is not None:
                    self._dispatch = chosen.value
                if self.planned is not None and settings.length_costs == MEASURED and is_measured(done.first - start):
                    timeline, file = self.pipe.timeline(), self.folder.file("length-costs.json")
                    self.planned.learn(done.first - start, timeline, self.pipe.schedule.num_stages, file)
                if asked and not last:
                    self.interrupted = True
                    view.say(f"stopping after step {training.steps}: saving a checkpoint")
                at_end = {}
                if last or asked or _due(done.first, training.steps, settings.evaluate_every):
                    validation = at_end["validation_loss"] = self.evaluate()
                if metrics is not None:
                    metrics.write_pass(done, values, at_end, settings.is_asynchronous)
                    view.step(training.steps, loss, speed, bubble, self._unit)
                if last or asked or _due(done.first, training.steps, settings.save_every):
                    self.save()
                if asked:
                    break
        if self.export is not None and self.first:
            self._write_model(Path(self.export))
        steps, updates = training.steps, self.pipe.num_updates
        untrained = validation is None
        if validation is None:
            validation = self.evaluate()
        ending = self._ending(validation)
        if untrained:  # the report needs a timeline all the same
            profile.append(self._profile_one())
        updating = update_report(settings, self.pipe, updates, bool(self.inputs.task.tied))
        self.pipe.close()  # the records are complete then
        if self.first:
            rate = trained / seconds if seconds else None
            self.report = self._report(profile, steps, loss, validation, rate, seconds, ending, updating)

    def _write_model(self, path: Path) -> None:
        task = self.inputs.task
        if isinstance(task, ExportableTask) and is_folder(path):
            task.write_folder(path, Reader(find(self.folder.checkpoints)))
        else:
            export_model(path, self.folder.checkpoints)

    @property
    def _unit(self) -> str:
        """The unit of its speed."""
        counted = self.inputs.task.num_tokens is not None or self.inputs.data.documents is not None
        return "tokens" if counted else "samples"

    def _num_tokens(self, steps: range) -> int:
        """Tokens of some steps, or samples if the model does not count tokens."""
        documents = self.inputs.data.documents
        if documents is not None:
            return sum(documents.num_tokens(documents.of_step(step)) for step in steps)
        return len(steps) * self.inputs.settings.batch * (self.inputs.task.num_tokens or 1)

    def _stop_and_idle(self) -> tuple[bool, float]:
        """Whether any rank was asked to stop, and the ranks' mean idle share of the pass."""
        stop, idle, count = self.pipe.step_sums
        return stop > 0, idle / count

    def evaluate(self) -> float:
        """The mean loss of the validation batches."""
        return self.training.evaluate(self.inputs.data.validation)

    def save(self) -> None:
        self.pipe.save(
            self.folder.checkpoints,
            meta={"data": self.inputs.data.digest, **self.training.meta},
            keep=self.inputs.settings.keep,
            stateful=self.inputs.data.stateful,
            number=self.training.steps,
        )

    def _profile_one(self) -> ProfiledStep:
        running = self.pipe.configuration
        self.training.probe()
        return ProfiledStep(self.pipe.timeline(), running)

    def _mesh_values(self) -> dict[str, float]:
        """What each line of the metrics says about the mesh, since a resumed run may have another one."""
        settings = self.inputs.settings
        if settings.is_flat:
            return {}
        return {"pp": settings.ranks, "dp": settings.dp, "tp": settings.tp}

    def _ending(self, loss: float) -> FinalMeasurements:
        """Measurements at the end, gathered from all ranks."""
        text = self.inputs.task.write(self.pipe)
        memory = [peak for part in self.pipe.gather(_peak_memory(self.inputs.settings)) for peak in part]
        sizes: dict[str, tuple[int, bool]] = {}
        for part in self.pipe.gather(
            {name: (p.numel(), p.requires_grad) for name, p in self.pipe.named_parameters()}
        ):
            sizes |= part  # replicas and shards tell of the same parameters
        count = sum(size for size, _ in sizes.values())
        trained = sum(size for size, learns in sizes.values() if learns)
        deferred = [
            {
                "stage": stage,
                "share": each.share,
                "at_once": {why: list(names) for why, names in each.reasons.items()},
            }
            for stage, each in self.pipe.deferred_share().items()
        ]
        return FinalMeasurements(text, memory, self.pipe.state_bytes(), count, trained, deferred)

    def _report(
        self,
        profile: list[ProfiledStep],
        steps: int,
        loss: float | None,
        validation: float,
        speed: float | None,
        seconds: float,
        ending: FinalMeasurements,
        updating: UpdateReport | None,
    ) -> Report:
        inputs, folder = self.inputs, self.folder
        settings = inputs.settings
        timing, pictures = self._timing(profile)
        if ending.text is not None:
            write_whole(folder.file("sample.txt"), ending.text + "\n")
        record = read_record(folder.metrics.read_text(encoding="utf-8").splitlines(), name="")
        report = Report(
            schedule=inputs.schedule.name,
            dispatch=self._dispatch,
            num_ranks=inputs.schedule.num_ranks,
            num_parameters=ending.num_parameters,
            num_trained=ending.num_trained,
            steps=steps,
            interrupted=self.interrupted,
            train_loss=loss,
            loss=validation,
            unit=inputs.task.unit,
            tokens_per_second=speed if self._unit == "tokens" else None,
            samples_per_second=speed if self._unit == "samples" else None,
            seconds=seconds,
            timing=timing,
            peak_memory=ending.peak_memory,
            notices=[
                *self.notices,
                *self.pipe.notices,
                *(self.planned.told() if self.planned is not None else ()),
                *([self.measured.notice] if self.measured is not None and self.measured.notice else ()),
                *([f"{wrong}; {NOT_FINITE}"] if (wrong := record.not_finite if record else "") else ()),
            ],
            said_before=len(self.notices),
            files={
                "schedule": str(folder.file("schedule.svg")),
                "timeline": str(folder.file("timeline.html")),
                "metrics": str(folder.metrics),
                "checkpoints": str(folder.checkpoints),
                **({} if ending.text is None else {"sample": str(folder.file("sample.txt"))}),
                **({} if self.planned is None else {"batches": str(folder.file("batches.jsonl"))}),
                **({} if self.export is None else {"model": self.export}),
            },
            steered=read_adaptation(folder.path) if settings.adapt else None,
            updating=updating,
            state=ending.state,
            deferred=ending.deferred,
            model=settings.model,
            mesh={"pp": settings.ranks, "dp": settings.dp, "tp": settings.tp},
            sharding=settings.sharding,
        )
        report.write(folder, pictures)
        return report

    def _timing(self, profile: list[ProfiledStep]) -> tuple[TimingReport, list[Timeline]]:
        """The middle step and its simulation, with op times of the last steps that ran in the same way."""
        middle = sorted(profile, key=lambda each: each.timeline.makespan)[len(profile) // 2]
        alike = [each.timeline for each in profile if each.configuration == middle.configuration]
        settings = self.inputs.settings
        costs = measured_costs(alike)
        costs = replace(costs, message_bytes=self.inputs.task.message_bytes(self.inputs.schedule))
        choice = TransportChoice(settings.transport_options(self.pipe.links))
        transport = as_transport(choice.simulated, middle.configuration.delegated)
        timing, simulated = timing_report(middle.timeline, costs, self.pipe.links, transport)
        return timing, [simulated, middle.timeline]


def _due(first: int, steps: int, every: int) -> bool:
    """Whether a pass that began after `first` steps has reached a multiple of `every` steps."""
    return every > 0 and steps // every > first // every


def known_before(settings: Settings, notices: Sequence[str] = ()) -> list[str]:
    """The notices of a run that are known when it begins, which are printed then. `notices`: of its order."""
    return [*notices, *settings.injected(), *_crowded(settings), *notices_of(settings)]


def _crowded(settings: Settings) -> list[str]:
    """Why a measured step may take longer than a simulated one, in which each rank has a device of its own."""
    if settings.in_process:
        replicas = "" if settings.dp == 1 else f", with the microbatches of {settings.dp} replicas one after another"
        return [f"{settings.ranks} ranks took turns in one process{replicas}; they are simulated side by side"]
    if settings.device == "cpu" and settings.num_processes > num_cores():
        what = f"{settings.ranks} ranks" if settings.is_flat else f"{settings.num_processes} processes"
        return [f"{what} shared {num_cores()} cores; they are simulated with one each"]
    return []


def _peak_memory(settings: Settings) -> list[int]:
    """Most bytes that this process held: on its device if it has one, otherwise its resident set."""
    if settings.device != "cpu":
        return [torch.cuda.max_memory_allocated()]
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)]
