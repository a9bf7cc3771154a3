"""Metrics: one JSON line per step, and TensorBoard if it is installed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.train.folder import write_whole, writing

if TYPE_CHECKING:
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
            self._file.write(json.dumps({"step": step, **values}) + "\n")
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
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _board(folder: Path, first_step: int) -> Any:
    """TensorBoard's writer, or None if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first_step)
