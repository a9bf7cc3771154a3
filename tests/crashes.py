"""Processes that are killed at their n-th touch of a folder, and disks that are full: real ones, both.

with a script that a test runs:   crashes.kill_at(n, folder); save()      SIGKILL before the n-th open, rename, ...
around a command:                 [*small_disk(path, "64k"), sys.executable, "script.py"]
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOUCHES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir")
"""Audit events that change a folder or read one; Python raises them before it acts."""


def kill_at(number: int, folder: str | Path) -> None:
    """Kills this process, as `kill -9` does, before its `number`-th touch of anything in a folder, counted from now.

    An `os.fsync` counts as one. It cannot be taken back: call it in a process of its own.
    """
    place, count = os.path.abspath(folder), 0

    def touch() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in TOUCHES and (not isinstance(args[0], (str, bytes, os.PathLike)) or _is_in(args, place)):
            touch()

    def counted(handle: int) -> None:
        touch()
        plain(handle)

    plain, os.fsync = os.fsync, counted
    sys.addaudithook(hook)


def _is_in(args: tuple[Any, ...], place: str) -> bool:
    path = os.fsdecode(args[0])
    return os.path.abspath(path).startswith(place) or any(isinstance(a, int) and a > 2 for a in args[1:])


UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
"""What a command begins with that may mount disks for itself alone."""


def small_disk(path: Path, size: str) -> list[str]:
    """What a command begins with that is to see a disk of so many bytes at `path`, and no other process does."""
    mount = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'
    return [*UNSHARE, "sh", "-c", mount, "sh", size, str(path)]


def _refused() -> str:
    if shutil.which("unshare") is None:
        return "there is no unshare here"
    ran = subprocess.run(
        [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    return "" if ran.returncode == 0 else ran.stderr.strip()


_REFUSED = _refused()


def may_mount() -> bool:
    """Whether a disk can be mounted here."""
    return not _REFUSED


needs_small_disk = pytest.mark.skipif(bool(_REFUSED), reason=f"needs mounts: {_REFUSED}")
