"""What ranks are asked to do, as plain data in a JSON file, and how they are started, work and answer.

A job is a list of tasks that all ranks carry out one after another:

    {"do": "layers", ...}       time the layers of a model              -> layers.py
    {"do": "transfer", ...}     time messages                           -> transfer.py
    {"do": "run", ...}          run a schedule for some steps           -> trial.py
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.formats.files import replaced
from penstock.runtime.launch import init_process, launch
from penstock.train.settings import Settings
from penstock.train.start import warm_up_malloc
from penstock.tune import layers, transfer, trial
from penstock.tune.device import Clock, others
from penstock.tune.errors import RanksFailed

INTERRUPTED = 130

TIMEOUT = 120.0
"""Seconds that ranks wait for one another."""

QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment of ranks. Without it the profiler prints to stderr whenever it starts and stops."""

Task = Mapping[str, Any]


@dataclass(frozen=True)
class WorkerAnswer:
    """The answers of all ranks to one task, by rank, and how many cores other programs kept busy meanwhile."""

    ranks: list[Any]
    others: float | None


def run_job(
    tasks: Sequence[Task],
    num_ranks: int,
    num_threads: int,
    say: Callable[[str], None] | None = None,
    keep: Callable[[int, WorkerAnswer], None] | None = None,
) -> list[WorkerAnswer]:
    """Starts one process per rank on this machine, lets them do the tasks, and returns their answers.

    Args:
        say: is called with the text of each task when the tasks before it are done. It is called from a thread, and
            must not use `sys.stderr`, which takes what the ranks write.
        keep: is called with the number and answer of each task that was done, even if the job is interrupted.

    Raises:
        RanksFailed: a rank ended without an answer; the message names the first.
        KeyboardInterrupt: the ranks were interrupted.
    """
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"tasks": list(tasks), "num_threads": num_threads}))
        texts = [] if say is None else [str(task["text"]) for task in tasks]

        def is_done(number: int) -> bool:
            return all((folder / f"{number}-{rank}.json").exists() for rank in range(num_ranks))

        with announced(texts, is_done, say or str), contextlib.redirect_stderr(said):
            code = launch(
                ["-m", "penstock.tune", str(folder)],
                num_ranks,
                preload=["penstock.tune.job"],
                env={"OMP_NUM_THREADS": str(num_threads), **QUIET},
            )
        answers = []
        for number in itertools.takewhile(is_done, range(len(tasks))):
            contents = [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(num_ranks)]
            answers.append(
                WorkerAnswer([each["answer"] for each in contents], others([each["clock"] for each in contents]))
            )
            if keep is not None:
                keep(number, answers[-1])
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code or len(answers) < len(tasks):
        reason = said.getvalue().strip().removeprefix("penstock: ") or f"the ranks ended with code {code}"
        raise RanksFailed(reason)
    return answers


@contextlib.contextmanager
def announced(
    texts: Sequence[str], is_done: Callable[[int], bool], say: Callable[[str], object], every: float = 0.1
) -> Iterator[None]:
    """Around tasks that are carried out one after another: says the text of each when those before it are done.

    Args:
        is_done: whether the task of a number is done.
        every: seconds from one look to the next.
    """
    ended = threading.Event()

    def watch() -> None:
        for number, text in enumerate(texts):
            while number and not is_done(number - 1):
                if ended.wait(every):
                    return
            say(text)

    watcher = threading.Thread(target=watch, name="progress of tasks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def run_rank(folder: Path) -> None:
    """Does one rank's part of the job in `folder`, and writes each answer into a file. It ends the process."""
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["num_threads"])
    warm_up_malloc()  # as a training rank does
    rank, num_ranks = init_process(TIMEOUT)
    texts: layers.Texts = {}
    for number, task in enumerate(job["tasks"]):
        dist.barrier()
        before = Clock.now()
        answer = {"answer": _do(task, rank, num_ranks, texts), "clock": Clock.now().since(before)}
        with replaced(folder / f"{number}-{rank}.json") as beside:
            beside.write_text(json.dumps(answer))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as a training rank does: everything is written


def _do(task: dict[str, Any], rank: int, num_ranks: int, texts: layers.Texts) -> Any:
    if task["do"] == "transfer":
        return transfer.measure_transfer(rank, num_ranks, task["steps"], dist.barrier)
    settings = Settings.from_mapping(task["settings"])
    if task["do"] == "run":
        return trial.run(settings, task, rank, dist.barrier, texts)
    share = layers.RankShare(
        settings, task["microbatch_size"], task["recompute"], rank, num_ranks, task["seconds"], task["part"],
        task["num_sharing"],
    )  # fmt: skip
    return layers.measure_layers(share, dist.barrier, texts)
