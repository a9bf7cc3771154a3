"""Takes a lab away: what runs in it, its namespaces, its folder. For keepers, and for leftovers of dead ones."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from penstock.lab import commands, shell
from penstock.lab.errors import LabError
from penstock.lab.folder import Folder, names, namespaces_of

PATIENCE = 5.0
"""Seconds that killed processes may take to be gone."""


def remove(name: str) -> None:
    """Removes what is there of a lab. Raises LabError where something stays."""
    namespaces = namespaces_of(name)
    _kill(namespaces)
    problems = []
    for namespace in namespaces:
        try:
            shell.run(commands.remove([namespace]))
        except LabError as error:
            problems.append(str(error))
    if problems:
        raise LabError("; ".join(problems))
    Folder(name).remove()


def leftovers() -> list[str]:
    """Labs whose keeper is gone."""
    return [name for name in names() if not Folder(name).alive()]


def clean() -> list[str]:
    """Removes all leftovers; returns their names."""
    found = leftovers()
    for name in found:
        remove(name)
    return found


def _kill(namespaces: list[str]) -> None:
    """Kills what runs in namespaces, and what that started meanwhile, until nothing is left."""
    end = time.monotonic() + PATIENCE
    while left := [number for namespace in namespaces for number in shell.processes_in(namespace)]:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if time.monotonic() > end:
            raise LabError(f"processes {', '.join(map(str, left))} do not end; the lab's namespaces are kept")
        time.sleep(0.02)
