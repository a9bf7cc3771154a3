"""Carries out an order on emulated devices: checks everything, starts one process a rank, shows the report."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from penstock.cost import Costs
from penstock.runtime.launch import WaitingServer, init_process, watch
from penstock.schedule import Schedule
from penstock.train.bounds import bound, proved_mismatch
from penstock.train.emulated.job import EmulatedJob
from penstock.train.emulated.report import EmulatedReport
from penstock.train.emulated.run import EmulatedRun
from penstock.train.folder import RunFolder
from penstock.train.start import (
    INTERRUPTED,
    RunFailed,
    check_interfaces,
    check_port,
    check_store,
    start_ranks,
)


def run_job(order: EmulatedJob, port: int | None, waiting: WaitingServer | None = None) -> int:
    """Runs the order on this machine and prints the report; returns the exit code.

    `waiting` is the process that ranks are forked from, where it was forked ahead.

    Raises:
        SettingsError, ScheduleError: before anything starts.
        RunFailed: a rank failed.
    """
    check_port(port)
    schedule, costs = _check(order)
    folder = RunFolder(Path(order.folder))
    with folder.made():
        if not order.as_json:
            print(_announcement(order, schedule, folder), file=sys.stderr, flush=True)
        if order.settings.in_process:
            run = EmulatedRun(order.settings, schedule, costs, folder, order.as_json)
            run.run()
            report, code, said = run.report, run.stop.exit_code if run.interrupted else 0, ""
        else:
            folder.report.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as handover:
                order.write(Path(handover))
                code, said = start_ranks(["--emulated", handover], order.settings.ranks, port, __name__, waiting)
            report = EmulatedReport.read(folder.report)
        if report is None:
            raise RunFailed(said, code or 1)
        if said:
            print(said if code == 0 else f"penstock: {said}", file=sys.stderr, flush=True)
        _show(report, order.as_json)
        return code or (INTERRUPTED if report.interrupted else 0)


def run_ordered(handover: Path) -> NoReturn:
    """What a rank started by `run_job` does. It ends the process."""
    watch()
    order = EmulatedJob.read(handover)
    schedule = order.settings.build_schedule()
    init_process(order.settings.timeout)
    EmulatedRun(
        order.settings, schedule, order.settings.read_costs(schedule), RunFolder(Path(order.folder)), order.as_json
    ).run()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as in training: all is written


def run_joined(order: EmulatedJob) -> int:
    """What a rank under torchrun does: all of them check, as they may lie on several hosts."""
    schedule, costs = _check(order)
    init_process(order.settings.timeout)
    run = EmulatedRun(order.settings, schedule, costs, RunFolder(Path(order.folder)), order.as_json)
    run.run()
    if run.report is not None:
        _show(run.report, order.as_json)
    return run.stop.exit_code if run.interrupted else 0


def _check(order: EmulatedJob) -> tuple[Schedule, Costs]:
    schedule = order.settings.build_schedule()
    costs = order.settings.read_costs(schedule)
    order.settings.host_units(costs)
    check_interfaces(order.settings)
    check_store(order.settings.store)
    return schedule, costs


def _announcement(order: EmulatedJob, schedule: Schedule, folder: RunFolder) -> str:
    settings = order.settings
    where = "threads" if settings.in_process else "one process each"
    lines = [
        f"plan    {schedule.name} over {settings.ranks} ranks ({where}), {settings.microbatches} microbatches, "
        f"{settings.dispatch}, {settings.transport} transport",
        *([] if schedule.updates is None else [f"updates {bound(proved_mismatch(schedule))} (proved)"]),
        f"costs   {settings.costs}" + ("" if settings.stretch == 1 else f", {settings.stretch:g} times as long"),
        f"folder  {folder.path}",
    ]
    return "\n".join(lines)


def _show(report: EmulatedReport, as_json: bool) -> None:
    print(json.dumps(report.to_json(), allow_nan=False) if as_json else "\n" + report.to_text(), flush=True)
