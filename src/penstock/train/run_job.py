"""Carries out an order: checks everything, starts one process per rank, and hands back the report.

order --> CheckedTraining --> in this process, or a process per rank, or one under torchrun
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from penstock.runtime.checkpoint import UNWRITTEN, CheckpointError
from penstock.runtime.launch import init_process, warm_up_malloc
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.folder import RunFolder, check_place, is_folder
from penstock.train.inputs import Inputs, gather_inputs
from penstock.train.job import TrainJob, hand_over, take_over
from penstock.train.kinds import is_hugging_face
from penstock.train.rank import RankRun, known_before
from penstock.train.report import Report
from penstock.train.resume import ResumePoint, check_resume
from penstock.train.settings import SettingsError, mesh_words
from penstock.train.start import (
    INTERRUPTED,
    RunFailed,
    check_store,
    start_ranks,
)
from penstock.train.tasks.text import check_tokens


def run_job(order: TrainJob) -> int:
    """Runs the order on this machine and prints the report. Returns the exit code.

    Raises:
        SettingsError, ScheduleError, PartitionError, DataError, CheckpointError: before anything starts.
        RunFailed: a rank failed.
    """
    checked = _checked(order)
    order, folder = checked.job, RunFolder(Path(order.folder))
    with folder.made():
        if not order.resume:
            folder.require_new(learns=True)  # another run may have begun there since the first look, and ended
        if not order.as_json:
            print(checked.announcement(), file=sys.stderr, flush=True)
        report, code, said = carry_out(checked)
        if report is None:
            raise RunFailed(said + checked.way_on(folder, said), code or 1)
        if said:
            print(said if code == 0 else f"penstock: {said}", file=sys.stderr, flush=True)
        _show(checked, report)
        return code or (INTERRUPTED if report.interrupted else 0)


def run_ordered(handover: Path) -> NoReturn:
    """What a rank started by `run_job` does. It ends the process."""
    order, corpus = take_over(handover)
    checked = CheckedTraining(order, gather_inputs(order.settings, corpus))
    warm_up_malloc()
    rank, _ = init_process(order.settings.timeout)
    if rank == 0:
        shutil.rmtree(handover, ignore_errors=True)  # all have taken over, or they would not have joined
    checked.run(first=rank == 0)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing down the interpreter among native threads takes a while and once ended in an abort; all is written.
    os._exit(0)


def run_joined(order: TrainJob) -> int:
    """What a rank under torchrun does. All of them check, as they may be on several hosts."""
    checked = _checked(order)
    warm_up_malloc()
    rank, _ = init_process(order.settings.timeout)
    if rank == 0 and not order.as_json:
        print(checked.announcement(), file=sys.stderr, flush=True)
    run = checked.run(first=rank == 0)
    if run.report is not None:
        _show(checked, run.report)
    return run.stop.exit_code if run.interrupted else 0


def carry_out(checked: CheckedTraining) -> tuple[Report | None, int, str]:
    """Runs in this process, or starts one process for each place in the mesh.

    Returns the report, None if a rank failed; the exit code; and what the launcher said of a failure.
    """
    order: TrainJob = checked.job
    settings = order.settings
    if settings.in_process:
        run = checked.run(first=True)
        return run.report, run.stop.exit_code if run.interrupted else 0, ""
    path = RunFolder(Path(order.folder)).report
    path.unlink(missing_ok=True)  # an earlier part of the run's
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as handover:
        hand_over(Path(handover), order, checked.corpus)
        count, env = settings.num_processes, settings.environment
        code, said = start_ranks(["-m", "penstock.train", "--order", handover], count, __name__, env)
    return Report.read(path), code, said


def _show(checked: CheckedTraining, report: Report) -> None:
    if checked.job.as_json:
        print(json.dumps(report.to_json(), allow_nan=False), flush=True)
    else:
        print("\n" + report.to_text(), flush=True)


def _checked(order: TrainJob) -> CheckedTraining:
    inputs = _check(order)
    goes_on = check_resume(inputs, RunFolder(Path(order.folder))) if order.resume else None
    checked = CheckedTraining(*_whole(order, inputs, goes_on), goes_on)
    check_store(order.settings.store)
    return checked


def _check(order: TrainJob) -> Inputs:
    if order.export is not None:
        export = Path(order.export)
        if order.settings.lora is not None and not is_folder(export):
            raise SettingsError(
                f"--export {export}: adapters are written as a folder; give a name without .safetensors"
            )
        check_place(export, "--export", folder=is_hugging_face(order.settings.model) and is_folder(export))
    inputs = gather_inputs(order.settings)
    if inputs.data.corpus is not None:
        check_tokens(inputs.data.corpus)
    return inputs


def _whole(order: TrainJob, inputs: Inputs, goes_on: ResumePoint | None) -> tuple[TrainJob, Inputs]:
    """The order, with the place where it continues, with its steps rounded up to whole passes and windows, and with
    notices on both.
    """
    settings = order.settings
    if goes_on is not None:
        order = replace(order, checkpoint=goes_on.checkpoint)
    start, gathered = (0, 0) if goes_on is None else (goes_on.steps, goes_on.gathered)
    steps = settings.passes.whole(settings.steps, start, gathered)
    if steps == settings.steps:
        return order, inputs
    unit = settings.passes.unit
    notice = f"{settings.steps} steps were asked for, {steps} were run: whole passes and windows, of {unit} steps"
    settings = replace(settings, steps=steps)
    return replace(order, settings=settings, notices=(*order.notices, notice)), replace(inputs, settings=settings)


class CheckedTraining:
    """A run that learns.

    Args:
        goes_on: where it stood. None if it starts, and in ranks, whose job has it.
    """

    def __init__(self, job: TrainJob, inputs: Inputs, goes_on: ResumePoint | None = None) -> None:
        self.job, self._inputs, self._goes_on = job, inputs, goes_on
        self.corpus = inputs.data.corpus

    def run(self, first: bool) -> RankRun:
        order, inputs = self.job, self._inputs
        torch.set_num_threads(order.settings.num_threads)
        run = RankRun(inputs, RunFolder(Path(order.folder)), first, order.as_json, order.export, order.notices)
        if order.resume:
            run.resume(order.checkpoint)
        if order.verify:
            run.verify()
        run.run()
        return run

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
            *self._of_updates(),
            f"folder  {self.job.folder}",
        ]
        if self._goes_on is not None:
            lines.append(f"resume  {self._goes_on.words}")
        lines += [f"note    {notice}" for notice in known_before(settings, self.job.notices)]
        return "\n".join(lines)

    def _of_updates(self) -> list[str]:
        """What is proved about a schedule that has its updates among its ops."""
        settings, schedule = self._inputs.settings, self._inputs.schedule
        if schedule.updates is None:
            return []
        passes = settings.passes
        return [
            f"updates {one_every(passes.window)}, {bound(proved_mismatch(schedule))} (proved); {settings.steps} "
            f"steps in passes of {passes.steps}, after which the pipeline drains"
        ]

    def way_on(self, folder: RunFolder, said: str) -> str:
        if not any(folder.checkpoints.glob("step-*")):
            return ""
        if CheckpointError.__name__ in said and UNWRITTEN not in said:  # what it goes on from is at fault
            return ""
        return f"\nits last checkpoint is kept: go on with penstock train --resume {folder.path}"
