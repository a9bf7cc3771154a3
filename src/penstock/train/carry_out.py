"""Carries out an order on this rank, or starts one process a rank that does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from penstock.runtime.launch import init_process, launch, watch
from penstock.train.folder import RunFolder
from penstock.train.handover import Order
from penstock.train.inputs import gather_inputs
from penstock.train.rank import RankRun

INTERRUPTED = 130


def start_ranks(order: Order, port: int | None) -> int:
    """Checks everything, then runs one process a rank; returns the exit code.

    Raises:
        SettingsError, ScheduleError, PartitionError, DataError, CheckpointError: before anything starts.
    """
    gather_inputs(order.settings)
    if order.settings.in_process:
        return run_rank(order, first=True)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "order.json"
        order.write(path)
        command = [sys.executable, "-m", "penstock.train", "--order", str(path)]
        return launch(command, order.settings.ranks, port=port)


def run_ordered(path: Path) -> int:
    """What a rank started by `start_ranks` does."""
    watch()
    return join_and_run(Order.read(path))


def join_and_run(order: Order) -> int:
    """Joins the other ranks, then runs."""
    rank, _ = init_process(order.settings.timeout)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return run_rank(order, first=rank == 0)


def run_rank(order: Order, first: bool) -> int:
    """Trains as one rank (or as all of them, in one process) and prints the report on the first."""
    run = RankRun(gather_inputs(order.settings), RunFolder(Path(order.folder)), first, order.as_json)
    if order.resume:
        run.resume()
    report = run.run()
    if order.export is not None:
        run.export(order.export)
    if report is None:
        return 0
    print(json.dumps(report.to_json()) if order.as_json else "\n" + report.to_text(), flush=True)
    if not order.as_json and (text := run.folder.file("sample.txt").read_text(encoding="utf-8").strip()):
        print(f"\n{text}", flush=True)
    return INTERRUPTED if report.interrupted else 0
