"""What is kept of a run that adapts, as lines of JSON in a folder.

control.jsonl      the controller's log: `penstock.control.replay` makes the same decisions of it
iterations.jsonl   one line an iteration
timelines.jsonl    when every op ran, of some iterations: an early one, and those around each switch

Training does not end for the sake of its records: where one cannot be written, all end there, with whole lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from penstock.runtime.adapt.report import RankReport
from penstock.runtime.errors import RuntimeFailure

CONTROL, ITERATIONS, TIMELINES = "control.jsonl", "iterations.jsonl", "timelines.jsonl"


class RunLog:
    """Writes the files; keeps nothing where there is no folder.

    Args:
        ended: called once where a file cannot be written to any more, with the reason. From then on nothing is.

    Raises:
        RuntimeFailure: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path | None, ended: Callable[[str], None]) -> None:
        self._files: dict[str, int] = {}
        self._folder, self._ended = folder, ended
        self._lock = threading.Lock()
        if folder is None:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _put_aside(Path(folder))
            for name in (CONTROL, ITERATIONS, TIMELINES):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._files[name] = os.open(Path(folder) / name, flags, 0o666)
        except OSError as error:
            self.close()
            raise RuntimeFailure(f"{folder}: {error.strerror}; give another folder for the records") from None

    def control(self, line: str) -> None:
        self._write(CONTROL, line)

    def iteration(self, record: Mapping[str, Any]) -> None:
        self._write(ITERATIONS, json.dumps(record))

    def timeline(self, reports: Sequence[RankReport], number: int, why: str) -> None:
        """When each op of an iteration ran, in ms from the first one's start, by rank 0's clock."""
        if not self._files:
            return
        rows = [(report.rank, *row) for report in reports for row in report.ops]
        origin = min((row[4] for row in rows), default=0.0)
        ops = [[*row[:4], round(row[4] - origin, 4), round(row[5] - origin, 4)] for row in rows]
        value = {"iteration": reports[0].iteration, "number": number, "why": why, "ops": ops}
        self._write(TIMELINES, json.dumps(value))

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a quota's word may come this late
                os.close(file)
        self._files = {}

    def _write(self, name: str, line: str) -> None:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                return
            try:
                _append(file, line.encode() + b"\n")
            except OSError as error:
                self._close()
                self._ended(f"records in {self._folder} end here: {name}: {error.strerror}; training goes on")


def _append(file: int, data: bytes) -> None:
    """Appends all of it, or nothing. Raises OSError."""
    before, left = os.fstat(file).st_size, memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, before)
        raise


def _put_aside(folder: Path) -> None:
    """Gives the files of an earlier run the first number that is free."""
    old = [folder / name for name in (CONTROL, ITERATIONS, TIMELINES) if (folder / name).exists()]
    if not any(path.stat().st_size for path in old):
        return
    number = next(n for n in count(1) if not any(path.with_stem(f"{path.stem}-{n}").exists() for path in old))
    for path in old:
        path.rename(path.with_stem(f"{path.stem}-{number}"))
