"""A run's folder: where everything about a run lies.

runs/tiny-1f1b-4/
    settings.json  schedule.txt  schedule.svg     what was asked for
    metrics.jsonl                                 one line a step
    checkpoints/step-00000100/                    the last good ones
    timeline.html  timeline.json  report.json     how it went (timeline.json opens in Perfetto)
    sample.txt
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    def file(self, name: str) -> Path:
        return self.path / name


def free_folder(parent: Path, name: str) -> RunFolder:
    """A folder that is not there yet: `parent/name`, or with -2, -3, ... behind it."""
    candidate, number = parent / name, 1
    while candidate.exists():
        number += 1
        candidate = parent / f"{name}-{number}"
    return RunFolder(candidate)
