"""One rank's run from its settings to its report. Every rank makes the same calls; rank 0 does the writing."""

from __future__ import annotations

import contextlib
import functools
import math
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
from penstock.host_process import num_cores
from penstock.planning.batches import plan_batch
from penstock.planning.microbatch_order import DISPATCHES
from penstock.report.run_story import read_record
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.checkpoint import CheckpointError, DamagedCheckpointError
from penstock.runtime.execute.timeline import measured_costs
from penstock.runtime.transport.choose import TransportChoice
from penstock.schedule import count_versions
from penstock.simulation import Timeline, simulate
from penstock.simulation.simulator import AUTO
from penstock.simulation.transport import as_transport
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.folder import RunFolder, write_whole
from penstock.train.inputs import Inputs, build_pipeline, device_of
from penstock.train.measured_dispatch import MeasuredDispatch
from penstock.train.metrics import Metrics, ProgressView
from penstock.train.report import Report, read_adaptation, write_plan
from penstock.train.settings import ARRIVAL, Settings
from penstock.train.start import StopRequest
from penstock.train.tasks.documents import BatchRecord, PlannedBatches
from penstock.train.training import Training

NOT_FINITE = "look at the data of that step, or give a lower --lr or --clip"
PROFILED_PASSES = 5
"""Number of passes near the end whose timelines give the profile of the run."""


class ProfiledStep(NamedTuple):
    """A measured step, and what it ran."""

    timeline: Timeline
    configuration: Configuration


class RankRun:
    """A run as one rank sees it.

    Attributes:
        train_loss, validation_loss: the latest ones; None before the first.
        first_step: the first step that this part of the run trains.
        seconds, num_trained: time of all passes of this part so far, and tokens (or samples) in them.
    """

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
        # Ranks under torchrun each chose a free folder. All use the folder of the first rank.
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
            inputs.task.loss,
            settings.dp // settings.replicas_here,
            has_samples=self._unit == "samples",
        )
        self.stop = StopRequest()
        self.train_loss: float | None = None
        self.validation_loss: float | None = None
        self.first_step, self.seconds, self.num_trained = 0, 0.0, 0
        self._profile: list[ProfiledStep] = []
        self._text: str | None = None

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
        """The dispatches that plans of batches may choose from.

        With "auto" these are all that the transport runs. A run that adapts chooses itself.
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
        return AdaptOptions(folder.path, settings.store, host_memory=settings.host_units) if settings.adapt else None

    def resume(self, checkpoint: str) -> None:
        """Continues from the checkpoint of this name. Raises CheckpointError."""
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

    def run(self) -> int:
        """Trains to the last step, or until a signal. Then rank 0 writes the report and prints it.

        Returns:
            The exit code.
        """
        interrupted = self._train()
        if self.first and not self.quiet:
            num = self.inputs.settings.sample if self.inputs.task.writes else 0
            sample = f", for which the model writes {num} tokens (--sample)" if num else ""
            print(f"writing the report{sample} ...", file=sys.stderr, flush=True)
        if interrupted or self.validation_loss is None:
            self.validation_loss = self.training.evaluate(self.inputs.data.validation)
        details = self._details()
        self.pipe.close()  # the records are complete then
        if self.first:
            self._finish(details, interrupted)
        return self.stop.exit_code if interrupted else 0

    def _train(self) -> bool:
        """Trains, and returns whether a signal ended the training early."""
        settings, training = self.inputs.settings, self.training
        self.first_step = start = training.steps
        metrics: Metrics | None = None
        self.pipe.sum_each_step(lambda: (float(self.stop.asked), *self._of_step()))
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
                stop, samples, busy, count, *spans = self.pipe.step_sums
                asked, bubble = stop > 0, 1 - busy / (count * max(spans))
                tokens = round(samples) or self._num_tokens(range(done.first, training.steps))
                self.train_loss, speed = done.losses[-1], tokens / done.seconds
                self.seconds, self.num_trained = self.seconds + done.seconds, self.num_trained + tokens
                values = {f"{self._unit}_per_second": speed, "bubble": bubble}
                values |= {} if settings.is_flat else self._mesh  # in each line, since a resumed run may have another
                if done.grad_norm is not None:
                    values["grad_norm"] = done.grad_norm
                if settings.adapt and self.first:
                    values["plan"] = number
                    view.decisions(self.pipe.decisions, start // training.passes.steps)
                last = training.steps >= settings.steps
                if training.steps + PROFILED_PASSES * len(done.losses) > settings.steps or asked:
                    self._profile.append(ProfiledStep(self.pipe.timeline(), running))
                if self.measured is not None and (chosen := self.measured.after_pass()) is not None:
                    self._dispatch = chosen.value
                if asked and not last:
                    view.say(f"stopping after step {training.steps}: saving a checkpoint")
                at_end = {}
                # After a signal the checkpoint comes first: a launcher soon ends the ranks, and the data may be much.
                if last or (not asked and _due(done.first, training.steps, settings.evaluate_every)):
                    self.validation_loss = self.training.evaluate(self.inputs.data.validation)
                    at_end["validation_loss"] = self.validation_loss
                if metrics is not None:
                    metrics.write_pass(done, values, at_end, settings.is_asynchronous)
                    view.step(training.steps, f"loss {self.train_loss:.3f}  {speed:,.0f} {self._unit}/s", bubble)
                if last or asked or _due(done.first, training.steps, settings.save_every):
                    self.save()
                if asked:
                    return not last
        return False

    def _of_step(self) -> tuple[float, ...]:
        """The numbers of the last step that processes add up: this process's share of the samples, if they are
        counted; how long its ranks ran ops, how many ranks they are, and one number for each process, which is 0
        except for this process, where it is how long the step took here.

        The longest time of all processes is nearly the makespan, so no clocks are compared. In 1F1B, which rank 0
        begins and ends, that longest time is the makespan.
        """
        me, num_processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        busy, span, num = self.pipe.op_times()
        num_holders = num_processes // (self.inputs.settings.dp if self.inputs.data.is_dealt else 1)  # of its batch
        share = self.training.num_samples / num_holders
        return share, busy, num, *(span * (process == me) for process in range(num_processes))

    @property
    def _unit(self) -> str:
        """The unit of its speed."""
        return "tokens" if self.inputs.task.num_tokens or self.inputs.data.documents is not None else "samples"

    def _num_tokens(self, steps: range) -> int:
        """Tokens of some steps, whose batches are whole."""
        documents = self.inputs.data.documents
        if documents is not None:
            return sum(sum(documents.lengths(documents.of_step(step))) for step in steps)
        return len(steps) * self.inputs.settings.batch * (self.inputs.task.num_tokens or 1)

    def save(self) -> None:
        self.pipe.save(
            self.folder.checkpoints,
            meta={"data": self.inputs.data.digest, **self.training.meta},
            keep=self.inputs.settings.keep,
            stateful=self.inputs.data.stateful,
            number=self.training.steps,
        )

    @property
    def _mesh(self) -> dict[str, int]:
        settings = self.inputs.settings
        return {"pp": settings.ranks, "dp": settings.dp, "tp": settings.tp}

    def _details(self) -> dict[str, Any]:
        """What report.json has of a run that trains, in addition to what it has of every run. All ranks call it.

        Returns:
            The loss on the validation data (`loss`), its unit in words, and that of the last step (`train_loss`, None
            if no step was left to train); the model, how many parameters it has and how many are trained; the mesh
            and what replicas divide; most bytes of each process or device (`peak_memory`), and by rank bytes of
            parameters, gradients, older versions and the optimizer's state (`state`); for each stage whose backward
            is split, the share of the work on weight gradients that waited for W, and for which parameters it did not
            wait, and why (`deferred`); see `_updating`.
        """
        settings, pipe, task = self.inputs.settings, self.pipe, self.inputs.task
        num_updates = pipe.num_updates
        self._text = task.write(pipe)
        memory = [peak for part in pipe.gather(_peak_memory(settings)) for peak in part]
        sizes: dict[str, tuple[int, bool]] = {}
        for part in pipe.gather({name: (p.numel(), p.requires_grad) for name, p in pipe.named_parameters()}):
            sizes |= part  # replicas and shards name the same parameters
        state = pipe.state_bytes()
        deferred = [
            {"stage": stage, "share": each.share, "at_once": {why: list(of) for why, of in each.reasons.items()}}
            for stage, each in pipe.deferred_share().items()
        ]
        if not self._profile:  # nothing was trained, and the report needs a timeline all the same
            running = pipe.configuration
            # A record may end with the last step, and a loader with a state only goes forward.
            self.training.probe(self.training.steps - (settings.record is not None))
            self._profile.append(ProfiledStep(pipe.timeline(), running))
        return {
            "train_loss": self.train_loss,
            "loss": self.validation_loss,
            "unit": self.inputs.data.unit,
            "model": settings.model,
            "num_parameters": sum(size for size, _ in sizes.values()),
            "num_trained": sum(size for size, is_trained in sizes.values() if is_trained),
            "mesh": self._mesh,
            "sharding": settings.sharding,
            "peak_memory": memory,
            "state": state,
            "deferred": deferred,
            "updating": self._updating(num_updates),
        }

    def _updating(self, num_updates: int) -> dict[str, Any] | None:
        """The updates of a run whose schedule has them as ops; None for other runs. All ranks must call it.

        Returns:
            By which weights ops read (`rule`), microbatches whose gradients an update adds up (`window`), steps of a
            pass (`drain_every`); whether only one copy of each stage has its optimizer's state (`one_copy_steps`);
            updates over the whole run; most updates between a microbatch's forward and its backward, by the order and
            as counted (`proved`, `measured`), and the share of (stage, microbatch) pairs with any (`met`); most
            versions of its weights that a copy of a stage holds.
        """
        settings, schedule = self.inputs.settings, self.pipe.schedule
        if schedule.updates is None or not settings.is_asynchronous:
            return None
        counted = self.pipe.mismatch()
        tied = [[0, schedule.num_stages - 1]] if self.inputs.task.tied and schedule.num_stages > 1 else []
        versions = count_versions(schedule, sharding=settings.sharding, num_replicas=settings.dp, tied_stages=tied)
        return {
            "rule": schedule.updates.rule,
            "window": settings.passes.window,
            "drain_every": settings.passes.steps,
            "one_copy_steps": settings.sharding != "none",
            "num_updates": num_updates,
            "proved": proved_mismatch(schedule),
            "measured": max(counted.values(), default=0),
            "met": sum(1 for count in counted.values() if count) / max(1, len(counted)),
            "versions": max(versions.values(), default=1),
        }

    def _finish(self, details: dict[str, Any], interrupted: bool) -> None:
        """Exports the model, and writes the report and prints it."""
        inputs, folder, settings = self.inputs, self.folder, self.inputs.settings
        files = {"checkpoints": str(folder.checkpoints)}
        if self.export is not None:  # no other rank waits any more, however long this takes
            inputs.task.export(Path(self.export), folder.checkpoints)
            files["model"] = self.export
        if self._text is not None:
            files["sample"] = str(folder.file("sample.txt"))
            write_whole(folder.file("sample.txt"), self._text + "\n")
        if self.planned is not None:
            files["batches"] = str(folder.file("batches.jsonl"))
        record = read_record(folder.metrics.read_text(encoding="utf-8").splitlines(), name="")
        notices = [*self.notices, *self.pipe.notices, *(self.planned.told() if self.planned is not None else ())]
        if self.measured is not None and self.measured.notice:
            notices.append(self.measured.notice)
        if record is not None and record.not_finite:
            notices.append(f"{record.not_finite}; {NOT_FINITE}")
        rate = self.num_trained / self.seconds if self.seconds else None
        rates = {f"{unit}_per_second": rate if unit == self._unit else None for unit in ("tokens", "samples")}
        timing, pictures = self._timing()
        passes = self.first_step // self.training.passes.steps  # of earlier parts of the run
        report = Report(
            folder=folder,
            schedule=inputs.schedule.name,
            dispatch=self._dispatch,
            num_ranks=inputs.schedule.num_ranks,
            first_step=self.first_step,
            steps=self.training.steps,
            interrupted=interrupted,
            seconds=self.seconds,
            notices=notices,
            said_before=len(self.notices),
            steered=read_adaptation(folder.path, passes) if settings.adapt else None,
            details={**details, **rates, "timing": timing},
            pace=self._pace(rate, max(details["peak_memory"])),
            rows=_rows(details, timing),
            more_files=files,
        )
        report.write(pictures)
        report.show(self.quiet)

    def _pace(self, rate: float | None, memory: int) -> str:
        """How fast the run was and what it took, in words."""
        parts = ["no step was left to train" if rate is None else f"{rate:,.0f} {self._unit}/s"]
        if self.inputs.schedule.num_ranks != math.prod(self._mesh.values()):
            parts.insert(0, " x ".join(f"{name} {count}" for name, count in self._mesh.items()))
        return ", ".join([*parts, f"at most {memory / 2**20:,.0f} MiB a process"])

    def _timing(self) -> tuple[dict[str, float], list[Timeline]]:
        """The middle step and its simulation, with op times of the last steps that ran in the same way.

        Returns:
            Makespans (ms) and bubble ratios, measured and simulated; the simulated timeline and the measured one.
        """
        middle = sorted(self._profile, key=lambda each: each.timeline.makespan)[len(self._profile) // 2]
        alike = [each.timeline for each in self._profile if each.configuration == middle.configuration]
        measured, links = middle.timeline, self.pipe.links
        costs = replace(measured_costs(alike), message_bytes=self.inputs.task.message_bytes(self.inputs.schedule))
        choice = TransportChoice(self.inputs.settings.transport_options(links))
        transport = as_transport(choice.simulated, middle.configuration.delegated)
        simulated = simulate(
            measured.schedule, costs, links=links, dispatch=measured.dispatch, transport=transport
        )  # the same schedule, and the link conditions that were injected
        timing = {
            "measured_makespan": measured.makespan,
            "simulated_makespan": simulated.makespan,
            "measured_bubble_ratio": measured.bubble_ratio,
            "simulated_bubble_ratio": simulated.bubble_ratio,
        }
        return timing, [simulated, measured]


def _rows(details: dict[str, Any], timing: dict[str, float]) -> list[tuple[str, str]]:
    """The lines for people on loss, time and updates."""
    took = "{measured_makespan:.1f} ms measured, {simulated_makespan:.1f} ms simulated".format_map(timing)
    bubbles = "{measured_bubble_ratio:.1%} and {simulated_bubble_ratio:.1%}".format_map(timing)
    updating = details["updating"]
    rows = [
        ("loss", f"{details['loss']:.3f} {details['unit']}"),
        ("one step" if updating is None else "one pass", f"{took}; bubbles {bubbles}"),
    ]
    if updating is not None:
        proved, measured = updating["proved"], updating["measured"]
        counted = "as proved" if proved == measured else f"proved; {measured} counted"
        every = one_every(updating["window"])
        rows.append(("updates", f"{updating['num_updates']}, {every}; {bound(proved)}, {counted}"))
    return rows


def _due(first: int, steps: int, every: int) -> bool:
    """Whether a pass that began after `first` steps has reached a multiple of `every` steps."""
    return every > 0 and steps // every > first // every


def known_before(settings: Settings, notices: Sequence[str] = ()) -> list[str]:
    """The notices of a run that are known when it begins, which are printed then. `notices`: of its order."""
    found = [*notices, *settings.injected(), *_crowded(settings, torch.cuda.device_count())]
    if settings.is_asynchronous and settings.clip:
        found.append(
            f"--clip {settings.clip:g}, over the root of the number of stages, was for each stage's gradient by "
            "itself: a norm over the model would make every stage wait for all"
        )
    return found


def _crowded(settings: Settings, num_gpus: int) -> list[str]:
    """Why a measured step may take longer than a simulated one, in which each rank has a device of its own.

    Args:
        num_gpus: of this host.
    """
    if settings.in_process:
        return [f"{settings.ranks} ranks took turns in one process; they are simulated side by side"]
    num, what = (num_cores(), "core") if settings.device == "cpu" else (num_gpus, "GPU")
    ranks, devices = f"{settings.num_local} {'ranks' if settings.is_flat else 'processes'}", f"{num} {what}"
    said = f"{ranks} shared {devices}{'s' * (num != 1)}; they are simulated with one each"
    return [said] if settings.num_local > num else []


def _peak_memory(settings: Settings) -> list[int]:
    """Most bytes that this process held: on its device if it has one, otherwise its resident set."""
    if settings.device != "cpu":
        return [torch.cuda.max_memory_allocated()]
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)]


def damaged(error: DamagedCheckpointError, folder: RunFolder) -> CheckpointError:
    """The same error, and what can be done about it in a run."""
    if error.older is None:
        return CheckpointError(f"{error.damage}; no older checkpoint is whole: copy one there, or start a new run")
    return CheckpointError(
        f"{error.damage}; {error.older.name} before it is whole: remove or rename the damaged one, and go on from "
        f"there with penstock train --resume {folder.path}"
    )
