"""A program that runs on a host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from penstock.lab.errors import LabError
from penstock.lab.folder import LabFolder
from penstock.lab.layout import Layout

_INSIDE = str(Path(__file__).with_name("inside.py"))
GRACE = 2.0
"""Seconds from SIGTERM to SIGKILL."""


class HostProcess:
    """A program on a host, in a session of its own: signals go to it and to all that it started.

    Args:
        layout: the lab.
        host: the number of the host, from 0.
        command: the program and its arguments.
        environment: all its environment variables.
        stdout: as for `subprocess.Popen`.
        stderr: as for `subprocess.Popen`.
        cwd: the folder in which it runs; by default this process's.

    Attributes:
        host: where it runs.
        popen: the process.

    Raises:
        LabError: a command without a program.

    Examples:
        >>> import penstock as ps
        >>> if not ps.lab.missing():
        ...     with ps.lab.Lab(num_hosts=2) as lab:
        ...         program = lab.start(1, ["true"])
        ...         assert program.popen.wait() == 0
    """

    def __init__(
        self,
        layout: Layout,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        if not command:
            raise LabError("no program to run; give a command")
        self.host = host
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", _INSIDE, *_place(layout, host), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            cwd=cwd,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.popen.poll()

    def wait(self, timeout: float) -> int:
        """Its exit code, within `timeout` seconds. Raises LabError if it takes longer."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise LabError(f"host {self.host}: process {self.pid} did not end within {timeout:g} s") from None

    def read(self, timeout: float) -> tuple[str, str]:
        """All of stdout and stderr, if they are pipes, once it has ended. Raises LabError after `timeout` s."""
        try:
            out, error = self.popen.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise LabError(f"host {self.host}: process {self.pid} did not end within {timeout:g} s") from None
        return out or "", error or ""

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to it and to what it started in the same session, whether or not it has ended itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self, grace: float = GRACE) -> None:
        """Sends SIGTERM, and SIGKILL after `grace` seconds. Nothing of it is left."""
        if self.popen.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace)
        self.signal(signal.SIGKILL)
        self.popen.wait()


def environment_of(layout: Layout, host: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a program on a host: that of this process, what the lab adds, and `more`.

    Programs that came with this Python, such as torchrun, are found without their path.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, **layout.environment(host), **(more or {})}


def _place(layout: Layout, host: int) -> list[str]:
    return [layout.namespace(host), layout.hostname(host), str(LabFolder(layout.name).hosts)]
