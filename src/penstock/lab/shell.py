"""Runs programs of the system, and says in words what went wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from penstock.lab.commands import Command
from penstock.lab.errors import LabError
from penstock.lab.kernel import NAMESPACES

DEADLINE = 20.0
"""Seconds that one command may take."""


def run(commands: Iterable[Command]) -> None:
    """Runs commands one after the other, until one fails. Raises LabError with its message."""
    for command in commands:
        try:
            done = subprocess.run(
                command.words, input=command.reads, capture_output=True, text=True, timeout=DEADLINE
            )
        except OSError as error:
            raise LabError(f"{command.words[0]} cannot be run: {error.strerror}; install iproute2") from None
        except subprocess.TimeoutExpired:
            raise LabError(f"`{' '.join(command.words)}` did not end within {DEADLINE:g} s") from None
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
            raise LabError(f"`{' '.join(command.words)}` failed: {said}")


def congestion_control() -> str:
    """TCP's congestion control: cubic if the kernel has it. BBR would set its pace by what it measures."""
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return "cubic" if "cubic" in available else "reno"


def numbers_of(namespaces: Iterable[str]) -> set[int]:
    """The kernel's numbers of network namespaces, by name; never that of this process's own."""
    found = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            found.add(os.stat(f"{NAMESPACES}/{name}").st_ino)
    return found - {os.stat("/proc/self/ns/net").st_ino}


def processes_in(numbers: set[int]) -> list[int]:
    """Processes that are in one of these namespaces."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is a zombie
            if os.stat(path / "ns" / "net").st_ino in numbers:
                found.append(int(path.name))
    return found
