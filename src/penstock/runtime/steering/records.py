"""What is kept of a steered run, as lines of JSON in a folder.

control.jsonl      the controller's log: `penstock.control.replay` makes the same decisions of it
iterations.jsonl   one line an iteration
timelines.jsonl    when every op ran, of some iterations: an early one, and those around each switch
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO, Any

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.steering.report import Report

CONTROL, ITERATIONS, TIMELINES = "control.jsonl", "iterations.jsonl", "timelines.jsonl"


class Records:
    """Writes the files; keeps nothing where there is no folder.

    Raises:
        RuntimeFailure: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._files: dict[str, IO[str]] = {}
        self._lock = threading.Lock()
        if folder is None:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _put_aside(Path(folder))
            for name in (CONTROL, ITERATIONS, TIMELINES):
                self._files[name] = (Path(folder) / name).open("w", encoding="utf-8")
        except OSError as error:
            raise RuntimeFailure(f"{folder}: {error.strerror}; give another folder for the records") from None

    def control(self, line: str) -> None:
        self._write(CONTROL, line)

    def iteration(self, record: Mapping[str, Any]) -> None:
        self._write(ITERATIONS, json.dumps(record))

    def timeline(self, reports: Sequence[Report], number: int, why: str) -> None:
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
            for file in self._files.values():
                file.close()
            self._files = {}

    def _write(self, name: str, line: str) -> None:
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                file.write(line + "\n")
                file.flush()


def _put_aside(folder: Path) -> None:
    """Gives the files of an earlier run the first number that is free."""
    old = [folder / name for name in (CONTROL, ITERATIONS, TIMELINES) if (folder / name).exists()]
    if not any(path.stat().st_size for path in old):
        return
    number = next(n for n in count(1) if not any(path.with_stem(f"{path.stem}-{n}").exists() for path in old))
    for path in old:
        path.rename(path.with_stem(f"{path.stem}-{number}"))
