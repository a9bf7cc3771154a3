"""The names in a folder of checkpoints, and the renames that keep a complete one there at every moment.

step-00000100             complete: appears by one rename, vanishes by one rename
step-00000100.old         complete too, seen only for the moment in which step 100 is replaced by a new one
.step-00000200.writing    not yet complete
.step-00000050.deleting   no longer complete
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.index import INDEX, Index, NewerVersion

__all__ = ["commit", "complete", "fresh", "latest", "prune", "remove", "step_folder", "temporary_folder"]

STEP = re.compile(r"step-(\d{8,})(\.old)?")
REMAINS = re.compile(r"\.step-\d{8,}(\.old)?\.(writing|deleting)")


def step_folder(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies when it is complete."""
    return directory / f"step-{step:08d}"


def temporary_folder(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return directory / f".step-{step:08d}.writing"


def latest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder, None without one; a folder that is a checkpoint is its own.

    Temporaries, half-deleted checkpoints and ones with a damaged index or missing or truncated shards do not count.
    One of a newer format does: to go back in time silently would be worse than the error its `Reader` raises.
    """
    directory = Path(directory)
    if (directory / INDEX).is_file():
        return directory if complete(directory) else None
    return next((path for _, path in reversed(_steps(directory)) if complete(path)), None)


def complete(path: Path) -> bool:
    """Whether the index reads and every shard it lists is there with its full size."""
    try:
        index = Index.load(path / INDEX)
        return all((path / name).stat().st_size == size for name, size in index.shards.items())
    except NewerVersion:
        return True
    except (CheckpointError, OSError):
        return False


def fresh(temporary: Path) -> None:
    """An empty folder to write into, whatever an earlier kill left there."""
    remove(temporary)
    temporary.mkdir(parents=True)


def commit(temporary: Path, target: Path) -> None:
    """Makes a written temporary the checkpoint of its step; one that was there goes once the new one is in place."""
    sync(temporary)
    old = target.with_name(target.name + ".old")
    if target.exists():
        if complete(target) or not old.exists():
            remove(old)
            os.rename(target, old)
        else:
            remove(target)
    os.rename(temporary, target)
    sync(target.parent)
    remove(old)


def prune(directory: Path, keep: int, current: Path) -> None:
    """Removes all but the newest `keep` complete checkpoints, never `current`, and what earlier kills left."""
    for entry in list(directory.iterdir()):
        if REMAINS.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    others = [path for _, path in _steps(directory) if path != current and complete(path)]
    for path in others[: len(others) - (keep - 1)] if len(others) >= keep else []:
        remove(path)


def remove(path: Path) -> None:
    """Deletes a folder so that it is never seen half-deleted under its own name. Does nothing where there is none."""
    if not path.exists():
        return
    if not path.name.startswith("."):
        hidden = path.with_name(f".{path.name}.deleting")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        path = hidden
    shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of every folder named like a checkpoint, oldest first, a replaced one before its successor."""
    found = []
    try:
        for path in directory.iterdir():
            if (name := STEP.fullmatch(path.name)) and path.is_dir():
                found.append((int(name[1]), name[2] is None, path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(step, path) for step, _, path in sorted(found)]
