"""What a run tells of its steps: metrics for files, and progress for the user.

Metrics are one JSON line per step, and TensorBoard if it is installed. Progress is a bar on a terminal, and a line
now and then elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.report.run_story import strict_json
from penstock.train.folder import write_whole, writing

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock.train.training import PassResult


class Metrics:
    """Appends lines to metrics.jsonl. In a resumed run, lines from its first step on are dropped first.

    A full disk is a RuntimeFailure: a run without its losses could not be compared with another.
    """

    def __init__(self, path: Path, first_step: int, tensorboard: Path | None = None) -> None:
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            write_whole(path, "".join(line + "\n" for line in lines if _step_of(line) < first_step))
        with writing(path):
            self._file = path.open("a", encoding="utf-8")
        self._board = _board(tensorboard, first_step) if tensorboard is not None else None

    def write(self, step: int, values: dict[str, float]) -> None:
        path = Path(self._file.name)
        with writing(path, f"step {step}"):
            # Nobody would find a line of a file that has no name any more.
            if not path.exists() or os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the file, or its folder, was removed or moved")
            self._file.write(json.dumps(strict_json({"step": step, **values})) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def write_pass(
        self, done: PassResult, values: dict[str, float], at_end: dict[str, float], with_updates: bool
    ) -> None:
        """Writes a line for each step of a pass. `values` go into all of them, `at_end` into the last."""
        for place, (loss, rate, updates) in enumerate(zip(done.losses, done.rates, done.updates, strict=True)):
            line = {"loss": loss, **values, "lr": rate}
            if with_updates:
                line["updates"] = updates
            self.write(done.first + place, line | (at_end if place + 1 == len(done.losses) else {}))

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # what `write` could not write is still in the buffer
            self._file.close()
        if self._board is not None:
            self._board.close()


def _step_of(line: str) -> float:
    """The step of a line. A line cut short by a kill counts as later than all others."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


def _board(folder: Path, first_step: int) -> Any:
    """TensorBoard's writer, or None if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first_step)


LINES, ITERATIONS = 20, 200
"""Lines over the whole run if there is no terminal: of steps, and of emulated iterations."""


class ProgressView:
    """Shows steps. `quiet` shows nothing. Everything goes to stderr, since stdout is for results."""

    def __init__(self, first: int, total: int, quiet: bool, num_lines: int = LINES) -> None:
        self._quiet, self._total = quiet, total
        self._every = max(1, (total - first) // num_lines)
        self._bar = None if quiet or not sys.stderr.isatty() else _bar()
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=total, completed=first, shown="")
        self._began = time.monotonic()
        self._num_decisions, self._shown = 0, first

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def step(self, step: int, speed: str, bubble: float) -> None:
        """Shows that `step` (from 1) is done, with its loss and speed in words."""
        shown = f"{speed}  bubble {bubble:.0%}"
        self._update("step", step, shown, f"{shown}  {time.monotonic() - self._began:.0f} s")

    def iteration(self, number: int, measured: float, simulated: float, plan: int) -> None:
        """Shows that an emulated iteration (from 1) is done."""
        shown = f"{measured:.1f} ms  simulated {simulated:.1f}  plan {plan}"
        self._update("iteration", number, shown, shown)

    def _update(self, noun: str, number: int, shown: str, line: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=number, shown=shown)
        elif number // self._every > self._shown // self._every or number == self._total:
            self._shown = number
            self.say(f"{noun} {number}/{self._total}  {line}")

    def decisions(self, made: Sequence[Mapping[str, Any]], before: int = 0) -> None:
        """Shows those decisions that were not shown before. `before`: the iterations of earlier parts of the run."""
        for each in made[self._num_decisions :]:
            number = each["iteration"] + 1 + before
            self.say(f"change {each['number']} after iteration {number}, {each['action']}: {each['reason']}")
        self._num_decisions = len(made)

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    # Imported here: only rank 0 shows anything, and only a terminal a bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
    )
