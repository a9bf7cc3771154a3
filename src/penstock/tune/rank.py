"""One rank's side of a job: it does the tasks one after another and writes each answer into a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.formats.files import replaced
from penstock.runtime.launch import init_process, warm_up_malloc
from penstock.train.settings import Settings
from penstock.train.tasks.gpt import gpt_config
from penstock.tune import layers, transfer, trial
from penstock.tune.device import Clock

TIMEOUT = 120.0
"""Seconds that ranks wait for one another."""


def run_rank(folder: Path) -> None:
    """Does the job in `folder`. It ends the process."""
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["num_threads"])
    warm_up_malloc()  # as a training rank does
    rank, num_ranks = init_process(TIMEOUT)
    for number, task in enumerate(job["tasks"]):
        _meet()
        before = Clock.now()
        answer = {"answer": _do(task, rank, num_ranks), "clock": Clock.now().since(before)}
        with replaced(folder / f"{number}-{rank}.json") as beside:
            beside.write_text(json.dumps(answer))
    _meet()
    sys.stdout.flush()
    os._exit(0)  # as a training rank does: everything is written


def _do(task: dict[str, Any], rank: int, num_ranks: int) -> Any:
    if task["do"] == "transfer":
        return transfer.measure_transfer(rank, num_ranks, task["steps"], _meet)
    settings = Settings.from_mapping(task["settings"])
    config = None if task["vocab_size"] is None else gpt_config(settings, task["vocab_size"])
    if task["do"] == "layers":
        return layers.measure_layers(
            layers.RankShare(
                settings,
                config,
                task["microbatch_size"],
                task["recompute"],
                rank,
                num_ranks,
                task["seconds"],
                task["part"],
                task["num_sharing"],
            ),
            _meet,
        )
    return trial.run(settings, config, task, rank, _meet)


def _meet() -> None:
    dist.barrier()
