"""A run's folder: everything about a run is in it.

runs/tiny-1f1b-4/
    settings.json  schedule.txt  schedule.svg     what was asked for
    metrics.jsonl                                 one line per step
    checkpoints/step-00000100/                    the last good ones
    timeline.html  timeline.json  report.json     how it went (timeline.json opens in Perfetto)
    sample.txt
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.formats.files import replaced, require_place
from penstock.schedule import ScheduleError
from penstock.train.settings import SettingsError


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

    def require_new(self, learns: bool) -> None:
        """Raises SettingsError if it holds metrics or checkpoints of a run. `learns`: whether the new run does."""
        if self.checkpoints.exists() or (self.metrics.exists() and self.metrics.stat().st_size):
            go_on = f"go on with --resume {self.path}, or " if learns else ""
            raise SettingsError(f"{self.path} holds a run; {go_on}give another --out")

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Makes the folder and holds it. If it is still empty in the end, it is removed. Raises SettingsError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = self._held()
        except OSError as error:
            raise SettingsError(f"{self.path} can't be made a folder: {error.strerror}; give another --out") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            os.close(held)

    def _held(self) -> int:
        """A descriptor that holds the folder until it is closed or its process ends, in whatever way.

        Raises:
            SettingsError: another run on this machine holds it; both would write the same metrics and checkpoints.
        """
        held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise SettingsError(
                f"{self.path} is being written by another run; wait until that has ended, or give another --out"
            ) from None
        except OSError:  # a file system that knows no locks
            pass
        return held


def free_folder(parent: Path, name: str) -> RunFolder:
    """The path of a folder that does not exist yet: `parent/name`, or the same with -2, -3, ... appended."""
    candidate, number = parent / name, 1
    while candidate.exists():
        number += 1
        candidate = parent / f"{name}-{number}"
    return RunFolder(candidate)


def write_whole(path: Path, text: str) -> None:
    """Writes a new file and renames it, so that a kill leaves either the old file or the new one.

    Raises RuntimeFailure if the disk refuses. The old file is then as it was.
    """
    with writing(path), replaced(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """Around the writing of a file: RuntimeFailure if the disk refuses, as most of its own errors name no file.

    Args:
        what: what could not be written to the file; it as a whole if that is not said.
    """
    try:
        yield
    except OSError as error:
        from penstock.runtime.errors import RuntimeFailure  # loads torch, which checks of options do without

        could_not = f"{what} could not be written to {path}" if what else f"{path} could not be written"
        raise RuntimeFailure(
            f"{could_not}: {error.strerror or error}; make room there if it is full, see to it that the folder is "
            "there and can be written to, and start the run again, with --resume if it has a checkpoint"
        ) from None


def is_folder(path: Path) -> bool:
    """Whether a model is exported as a folder, if its kind can be exported as either."""
    return path.suffix != ".safetensors"


def check_place(path: Path, what: str, folder: bool = False) -> None:
    """Raises SettingsError unless a file, or a folder, can be written at `path`."""
    if folder and path.is_dir():
        if any(path.iterdir()):
            raise SettingsError(f"{what} {path} is a folder that is not empty; give one that is not there yet")
    elif folder and path.exists():
        raise SettingsError(f"{what} {path} is a file; give a folder that is not there yet")
    elif path.is_dir():
        raise SettingsError(f"{what} {path} is a folder; give a file")
    if not path.parent.is_dir():
        raise SettingsError(f"{what} {path}: there is no folder {path.parent}; make it first, or give another file")
    try:
        require_place(path.parent / f"{path.name}.new")  # a folder that is there and empty is no file
    except ScheduleError as error:
        raise SettingsError(
            f"{what} {path}: the folder {path.parent} can't be written to ({error}); give another file"
        ) from None
