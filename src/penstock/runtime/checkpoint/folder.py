"""The names in a folder of checkpoints, and the renames that keep a complete one there at every moment.

step-00000100             complete: appears by one rename, vanishes by one rename
step-00000100.old         complete too, seen only for the moment in which step 100 is replaced by a new one
step-00000100.damaged     set aside when an older one was loaded in its place
.step-00000200.writing    not yet complete
.step-00000050.deleting   no longer complete
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from penstock.runtime.checkpoint.reader import MANIFEST, STEP, Reader
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError

REMAINS = re.compile(r"\.step-\d{8,}(\.old)?\.(writing|deleting)", re.ASCII)


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint in a folder, None without one; a folder that is a checkpoint is its own.

    Temporaries and half-deleted ones do not count. One that is damaged does, as does one of another format: to go
    back in time silently would be worse than the error that its `Reader` raises. Raises `CheckpointError` for a
    folder that cannot be read.
    """
    return next(iter(candidates(directory)), None)


def candidates(directory: str | Path) -> list[Path]:
    """The checkpoint meant by a path and the older ones beside it, or all in a folder; the newest first."""
    path = Path(directory)
    try:
        if STEP.fullmatch(path.name) and path.is_dir():
            beside = _newest_first(path.parent)
            return beside[[each.name for each in beside].index(path.name) :]
        if (path / MANIFEST).exists():
            return [path]
        return _newest_first(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def complete(path: Path) -> bool:
    """Whether the manifest can be read and every file that it lists is there with its full size.

    So is a checkpoint of a format that this release does not read.
    """
    try:
        Reader(path).require_complete()
    except DamagedCheckpointError:
        return False
    except CheckpointError:
        pass
    return True


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is there to look at and counts no more. Raises `OSError`."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    sync(path.parent)
    return aside


def commit(temporary: Path, target: Path) -> None:
    """Makes a written temporary the checkpoint of its step; one that was there goes once the new one is in place."""
    sync(temporary)
    old = target.with_name(target.name + ".old")
    if target.exists() and old.exists() and not complete(target):
        remove(target)
    elif target.exists():
        remove(old)
        os.rename(target, old)
    os.rename(temporary, target)
    sync(target.parent)
    remove(old)


def prune(directory: Path, keep: int, current: Path) -> None:
    """Removes all but the newest `keep` complete checkpoints, never `current`, and what earlier kills left.

    What the disk refuses to remove stays, and is tried again after the next save.
    """
    for entry in list(directory.iterdir()):
        if REMAINS.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    others = [path for path in _newest_first(directory) if path != current and complete(path)]
    for path in others[keep - 1 :]:
        with contextlib.suppress(OSError):
            remove(path)


def remove(path: Path) -> None:
    """Deletes a folder so that it is never seen half-deleted under its own name. Does nothing where there is none."""
    if not path.name.startswith(".") and path.exists():
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


def _newest_first(directory: Path) -> list[Path]:
    """Every folder named like a checkpoint; a replaced one comes after its successor."""
    found = [(STEP.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()]
    named = [(int(name[1]), name[2] is None, path) for name, path in found if name is not None]
    return [path for _, _, path in sorted(named, reverse=True)]
