"""Removes a lab: what runs in it, its namespaces, its hosts file. Used by keepers, and for leftovers of dead ones.

A lab leaves nothing on disk but its namespaces and one hosts file:

    /run/netns/penstock-4711-host0  /run/netns/penstock-4711-host1      /run/penstock-4711.hosts

4711 is the process number of the keeper, and the name of the lab. If no keeper has that number, the lab is left over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from penstock.lab import commands
from penstock.lab.kernel import NAMESPACES
from penstock.lab.layout import PREFIX, LabError, lab_of

MOST_BYTES = 2**20
"""Most bytes of a request to the keeper, and of its answer."""
KEEPER = "penstock.lab.keeper"
"""The module that a keeper's process runs."""
PATIENCE = 30.0
"""Seconds within which killed processes must be gone, on a busy machine."""
LOOKS = 4
"""How many times in a row no process may be found before a namespace counts as empty."""


def hosts_file(name: str) -> Path:
    """The file that every host of a lab has as /etc/hosts. A keeper writes it when its lab is complete."""
    return Path("/run") / f"{PREFIX}{name}.hosts"


def namespaces_of(name: str) -> list[str]:
    """The namespaces of a lab that exist."""
    return sorted(path.name for path in Path(NAMESPACES).glob("*") if lab_of(path.name) == name)


def names() -> list[str]:
    """Every lab that has a namespace, whether its keeper lives or not."""
    found = {name for path in Path(NAMESPACES).glob("*") if (name := lab_of(path.name)) is not None}
    return sorted(found, key=int)


def is_kept(name: str) -> bool:
    """Whether the keeper of a lab lives."""
    try:
        return KEEPER.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def remove(name: str) -> None:
    """Removes what exists of a lab. Raises LabError if something remains.

    Programs are killed twice, before and after the namespaces have lost their names. A program that is just
    entering a host looks for the name once it is in (`inside.py`). So either it sees that the lab is gone, or it
    is found here.
    """
    namespaces = namespaces_of(name)
    numbers = _numbers_of(namespaces)
    _kill(numbers)
    problems = []
    for namespace in namespaces:
        try:
            commands.run(commands.remove([namespace]))
        except LabError as error:
            problems.append(str(error))
    if problems:
        raise LabError("; ".join(problems))
    _kill(numbers)
    hosts_file(name).unlink(missing_ok=True)


def remove_leftovers() -> None:
    """Removes the labs whose keeper was killed. Raises LabError if something remains."""
    for name in names():
        if not is_kept(name):
            remove(name)


def _numbers_of(namespaces: Iterable[str]) -> set[int]:
    """The kernel's numbers of network namespaces, by name; never that of this process's own."""
    found = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            found.add(os.stat(f"{NAMESPACES}/{name}").st_ino)
    return found - {os.stat("/proc/self/ns/net").st_ino}


def _processes_in(numbers: set[int]) -> list[int]:
    """Processes that are in one of these namespaces."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is a zombie
            if os.stat(path / "ns" / "net").st_ino in numbers:
                found.append(int(path.name))
    return found


def _kill(numbers: set[int]) -> None:
    """Kills what runs in namespaces, and what that started meanwhile, until nothing is left.

    A program that forks and ends while the list is being read may be missed, together with its child. So nothing must
    be found several times in a row.
    """
    end = time.monotonic() + PATIENCE
    empty = 0
    while empty < LOOKS:
        left = _processes_in(numbers)
        empty = 0 if left else empty + 1
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if left and time.monotonic() > end:
            raise LabError(f"processes {', '.join(map(str, left))} do not end; see what they wait for with ps")
        time.sleep(0.01)
