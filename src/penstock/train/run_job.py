"""A training run from its options to its ranks: everything is checked before the first process starts.

A resumed run has the model, data and training that it began with. Its steps, paths, mesh, schedule and machine may be
others.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.data import Corpus
from penstock.runtime.checkpoint import (
    UNWRITTEN,
    CheckpointError,
    DamagedCheckpointError,
    Reader,
    candidates,
    complete,
)
from penstock.simulation.simulator import AUTO
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.folder import RunFolder, check_place, is_folder
from penstock.train.inputs import Inputs, gather_inputs
from penstock.train.job import TrainJob
from penstock.train.kinds import is_hugging_face, is_path
from penstock.train.options import DATA, MODEL, TRAINING, options_of
from penstock.train.rank import RankRun, damaged, known_before
from penstock.train.settings import WINDOWS, Settings, SettingsError, mesh_words, read_settings
from penstock.train.start import check_store
from penstock.train.tasks.text import check_tokens
from penstock.train.training import position


def checked(job: TrainJob) -> TrainRun:
    """The run that a job asks for.

    Raises:
        SettingsError, ScheduleError, PartitionError, DataError, CheckpointError: the run can't be started.
    """
    inputs = checked_inputs(job)
    goes_on = check_resume(inputs, RunFolder(Path(job.folder))) if job.resume else None
    job, inputs = _in_whole_passes(job, inputs, goes_on)
    check_store(job.settings.store)
    return TrainRun(job, inputs, goes_on)


def checked_inputs(job: TrainJob) -> Inputs:
    """Everything that the run starts from. Raises the errors of `checked`, but those of a checkpoint."""
    if job.export is not None:
        export = Path(job.export)
        if job.settings.lora is not None and not is_folder(export):
            raise SettingsError(
                f"--export {export}: adapters are written as a folder; give a name without .safetensors"
            )
        check_place(export, "--export", folder=is_hugging_face(job.settings.model) and is_folder(export))
    inputs = gather_inputs(job.settings)
    if inputs.data.corpus is not None:
        check_tokens(inputs.data.corpus)
    return inputs


def _in_whole_passes(job: TrainJob, inputs: Inputs, goes_on: ResumePoint | None) -> tuple[TrainJob, Inputs]:
    """The job with its checkpoint, and with its steps rounded up to whole passes and windows, which a notice says."""
    settings = job.settings
    start, gathered = (0, 0) if goes_on is None else (goes_on.steps, goes_on.gathered)
    if goes_on is not None:
        job = dataclasses.replace(job, checkpoint=goes_on.checkpoint)
    steps = settings.passes.whole(settings.steps, start, gathered)
    if steps == settings.steps:
        return job, inputs
    unit = settings.passes.unit
    notice = f"{settings.steps} steps were asked for, {steps} were run: whole passes and windows, of {unit} steps"
    settings = dataclasses.replace(settings, steps=steps)
    job = dataclasses.replace(job, settings=settings, notices=(*job.notices, notice))
    return job, dataclasses.replace(inputs, settings=settings)


def _of_rank(job: TrainJob, corpus: Corpus | None) -> TrainRun:
    """The run in a process that was started for it."""
    return TrainRun(job, gather_inputs(job.settings, corpus))


class TrainRun:
    """A training run that was checked; a `LaunchedJob` of `start`.

    Args:
        goes_on: where the run continues. None if it begins, and in ranks, whose job has the checkpoint.
    """

    def __init__(self, job: TrainJob, inputs: Inputs, goes_on: ResumePoint | None = None) -> None:
        self.job, self._inputs, self._goes_on = job, inputs, goes_on
        settings = job.settings
        self.folder, self.as_json, self.environment = job.folder, job.as_json, settings.environment
        self.in_process, self.num_processes = settings.in_process, settings.num_processes
        self.timeout = settings.timeout

    def __reduce__(self) -> tuple[Any, ...]:
        corpus = self._inputs.data.corpus
        if corpus is not None and isinstance(corpus.train, np.memmap):
            corpus = None  # every rank maps the files of a .bin/.idx pair by itself
        return _of_rank, (self.job, corpus)

    def require_folder(self, folder: RunFolder) -> None:
        if not self.job.resume:
            folder.require_new(learns=True)

    def run(self, is_first: bool) -> int:
        job = self.job
        torch.set_num_threads(job.settings.num_threads)
        if is_first and not job.as_json:
            plans = job.settings.adapt or job.settings.dispatch == AUTO
            print(f"building the stages{', planning' if plans else ''} ...", file=sys.stderr, flush=True)
        run = RankRun(self._inputs, RunFolder(Path(job.folder)), is_first, job.as_json, job.export, job.notices)
        if job.checkpoint is not None:
            run.resume(job.checkpoint)
        if job.verify:
            run.verify()
        return run.run()

    def announcement(self) -> str:
        settings, schedule = self._inputs.settings, self._inputs.schedule
        where = "in one process" if settings.in_process else "one process each"
        samples = settings.batch / (settings.dp * settings.microbatches)
        noun = "microbatch" if settings.microbatches == 1 else "microbatches"
        unit = "sample" if samples == 1 else "samples"
        lines = [
            f"data    {self._inputs.data.description}",
            f"plan    {schedule.name} over {mesh_words(settings)} ({where}), {settings.microbatches} {noun} "
            f"of {samples:g} {unit}{' each' if settings.dp > 1 else ''}, {settings.dispatch}",
        ]
        if schedule.updates is not None:
            passes, most = settings.passes, bound(proved_mismatch(schedule))
            lines.append(
                f"updates {one_every(passes.window)}, {most} (proved); {settings.steps} steps in passes of "
                f"{passes.steps}, after which the pipeline drains"
            )
        lines.append(f"folder  {self.job.folder}")
        if self._goes_on is not None:
            lines.append(f"resume  {self._goes_on.words}")
        lines += [f"note    {notice}" for notice in known_before(settings, self.job.notices)]
        return "\n".join(lines)

    def way_on(self, said: str) -> str:
        folder = RunFolder(Path(self.job.folder))
        if not any(folder.checkpoints.glob("step-*")):
            return ""
        if CheckpointError.__name__ in said and UNWRITTEN not in said:  # the checkpoint itself is at fault
            return ""
        return f"\nits last checkpoint is kept: go on with penstock train --resume {folder.path}"


MAY_CHANGE = {"steps", "data", "tokenizer", "microbatch_tokens", "sample", "recompute"}
"""Settings of the model, the data and the training that a resumed run may have otherwise: its length, paths, and
what changes no gradient. The content of a path is compared instead.
"""


ALIKE = {"model": is_path, "lora": lambda value: not value.startswith("{"), "packing": lambda value: value != WINDOWS}
"""Settings that a resumed run may have otherwise too, if this holds before and after: paths, and whole documents."""


class ResumePoint(NamedTuple):
    """Where a run continues.

    Attributes:
        words: the same as text. steps: done so far. gathered: microbatches in the window that is open.
        checkpoint: its name, None if there is none yet.
    """

    words: str
    steps: int
    gathered: int
    checkpoint: str | None = None


def check_resume(inputs: Inputs, folder: RunFolder) -> ResumePoint:
    """Returns where the run continues.

    Raises:
        SettingsError: another model, data or training than it began with, or no steps left for it.
        CheckpointError: a damaged checkpoint.
    """
    saved = Settings.from_mapping(read_settings(folder.settings), f"{folder.settings}: ")
    now = inputs.settings
    _check_same(now, saved, folder)
    reader = _newest(folder)
    if reader is None:
        return ResumePoint("from the start, as it wrote no checkpoint", 0, 0)
    meta = reader.meta if isinstance(reader.meta, dict) else {}
    steps, gathered = position(meta, reader.step)
    if steps > now.steps:
        raise SettingsError(f"{folder.path} is at step {steps} already; give --steps {steps} or more")
    _check_window(now, steps, gathered, saved, folder)
    if meta.get("data") != inputs.data.digest:
        raise SettingsError(
            f"{folder.path} was trained on other data than {inputs.data.description}; "
            "give the --data and --tokenizer it was started with, unchanged"
        )
    amid = f", {gathered} of {now.window} microbatches of a window gathered" if gathered else ""
    return ResumePoint(f"from step {steps} ({reader.path}){amid}", steps, gathered, reader.path.name)


def _newest(folder: RunFolder) -> Reader | None:
    """The newest checkpoint of a run, None if it never wrote one. Raises CheckpointError if it is damaged."""
    paths = list(candidates(folder.checkpoints))
    if not paths:
        return None
    try:
        reader = Reader(paths[0])
        reader.require_complete()
    except DamagedCheckpointError as error:
        older = next((each for each in paths[1:] if complete(each)), None)
        raise damaged(DamagedCheckpointError(error.damage, older), folder) from error
    return reader


def _check_same(now: Settings, saved: Settings, folder: RunFolder) -> None:
    """Raises SettingsError for a setting of the model, the data or the training that is another one."""
    for name, option in options_of(Settings).items():
        before, given = getattr(saved, name), getattr(now, name)
        stays = option.said.group in (MODEL, DATA, TRAINING) and name not in MAY_CHANGE
        alike = name in ALIKE and None not in (before, given) and ALIKE[name](before) and ALIKE[name](given)
        if not stays or before == given or alike:
            continue
        raise SettingsError(
            f"{folder.path} was started with {name} {before!r}, not {given!r}; leave {option.flags[0]} out, or start "
            "a new run"
        )


def _check_window(now: Settings, steps: int, gathered: int, saved: Settings, folder: RunFolder) -> None:
    """Raises SettingsError if the window that is open could not be closed in the way in which it began."""
    if not gathered:
        return
    passes = now.passes
    if now.window == saved.window and (passes.window - gathered) % passes.num_microbatches == 0:
        return
    missing = (saved.window or 0) - gathered
    raise SettingsError(
        f"{folder.path} is at step {steps}, and {gathered} of the {saved.window} microbatches of a window are "
        f"gathered; leave out --window, and give a --drain-every whose passes fill the other {missing}: "
        f"{saved.drain_every} steps do"
    )
