"""Removes a lab: what runs in it, its namespaces, its folder. Used by keepers, and for leftovers of dead ones."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from penstock.lab import commands, shell
from penstock.lab.errors import LabError
from penstock.lab.folder import LabFolder, names, namespaces_of

PATIENCE = 30.0
"""Seconds within which killed processes must be gone, on a busy machine."""
LOOKS = 4
"""How many times in a row no process may be found before a namespace counts as empty."""


def remove(name: str) -> None:
    """Removes what exists of a lab. Raises LabError if something remains.

    Programs are killed twice, before and after the namespaces have lost their names. A program that is just
    entering a host looks for the name once it is in (`inside.py`). So either it sees that the lab is gone, or it
    is found here.
    """
    namespaces = namespaces_of(name)
    numbers = shell.numbers_of(namespaces)
    _kill(numbers)
    problems = []
    for namespace in namespaces:
        try:
            shell.run(commands.remove([namespace]))
        except LabError as error:
            problems.append(str(error))
    if problems:
        raise LabError("; ".join(problems))
    _kill(numbers)
    LabFolder(name).remove()


def leftovers() -> list[str]:
    """Labs whose keeper is gone."""
    return [name for name in names() if not LabFolder(name).alive()]


def clean() -> list[str]:
    """Removes all leftovers and returns their names."""
    found = leftovers()
    for name in found:
        remove(name)
    return found


def _kill(numbers: set[int]) -> None:
    """Kills what runs in namespaces, and what that started meanwhile, until nothing is left.

    A program that forks and ends while the list is being read may be missed, together with its child. So nothing must
    be found several times in a row.
    """
    end = time.monotonic() + PATIENCE
    empty = 0
    while empty < LOOKS:
        left = shell.processes_in(numbers)
        empty = 0 if left else empty + 1
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if left and time.monotonic() > end:
            raise LabError(f"processes {', '.join(map(str, left))} do not end; see what they wait for with ps")
        time.sleep(0.01)
