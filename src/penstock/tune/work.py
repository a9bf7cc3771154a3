"""What ranks are asked to do, as plain data in a JSON file, and how they are started and answer.

A job is a list of tasks that all ranks carry out one after another:

    {"do": "layers", ...}       time the layers of a model              -> layers.py
    {"do": "transfer", ...}     time messages                           -> transfer.py
    {"do": "run", ...}          run a schedule for some steps           -> trial.py
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.launch import launch
from penstock.tune.allocated import QUIET
from penstock.tune.device import others
from penstock.tune.errors import RanksFailed

INTERRUPTED = 130

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
        say: is called with the text of each task before the ranks start.
        keep: is called with the number and answer of each task that was done, even if the job is interrupted.

    Raises:
        RanksFailed: a rank ended without an answer; the message names the first.
        KeyboardInterrupt: the ranks were interrupted.
    """
    if say is not None:
        for task in tasks:
            say(str(task["text"]))
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"tasks": list(tasks), "num_threads": num_threads}))
        program = ["-m", "penstock.tune", str(folder)]
        with contextlib.redirect_stderr(said):
            code = launch(
                program,
                num_ranks,
                preload=["penstock.tune.rank"],
                env={"OMP_NUM_THREADS": str(num_threads), **QUIET},
            )
        answers = []
        for number in range(len(tasks)):
            paths = [folder / f"{number}-{rank}.json" for rank in range(num_ranks)]
            if not all(path.exists() for path in paths):
                break
            contents = [json.loads(path.read_text()) for path in paths]
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
