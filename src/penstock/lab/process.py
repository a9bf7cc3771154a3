"""Programs that run on hosts: one of them, or one command on every host, whose lines are labelled.

If a command fails on one host, the others are stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from penstock.lab.layout import LabError, Layout
from penstock.lab.links import LabEvent
from penstock.lab.removal import hosts_file

_INSIDE = str(Path(__file__).with_name("inside.py"))
GRACE = 2.0
"""Seconds from SIGTERM to SIGKILL."""
READS = 5.0
"""Seconds for what ended programs have written; a process that left its session may still hold the pipe."""
TICK = 0.02


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
    return [layout.namespace(host), layout.hostname(host), str(hosts_file(layout.name))]


@dataclass(frozen=True)
class HostExit:
    """How the command ended on one host.

    Attributes:
        exit_code: its own; 128 + the signal's number if it was killed; None if it was stopped because another host
            had failed or time was up.
        seconds: how long it ran.
    """

    host: int
    exit_code: int | None
    seconds: float


def run_everywhere(
    layout: Layout,
    command: Sequence[str],
    *,
    hosts: Sequence[int] | None = None,
    events: Sequence[LabEvent] = (),
    apply: Callable[[LabEvent], None] | None = None,
    timeout: float | None = None,
    grace: float = 10.0,
    say: Callable[[str], None] = print,
) -> list[HostExit]:
    """Runs `command` on every host, or on some, and returns when it has ended on all.

    Args:
        events: happen meanwhile, in the order of their times: `apply` is called with each.
        timeout: seconds until all are stopped.
        grace: seconds that the others have after one has failed, and that all have after Ctrl-C.
        say: is called with each line that a host writes and with each event, one at a time.
    """
    start = time.monotonic()
    turn = threading.Lock()

    def say_in_turn(line: str) -> None:
        with turn:
            say(line)

    def happened(event: LabEvent) -> None:
        assert apply is not None, "events need a lab to happen to"
        apply(event)
        say_in_turn(f"lab   | {event}")

    processes: list[HostProcess] = []
    readers: list[threading.Thread] = []
    try:
        for host in dict.fromkeys(layout.hosts if hosts is None else hosts):
            own = environment_of(layout, host)
            process = HostProcess(layout, host, command, own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            processes.append(process)
            readers.append(threading.Thread(target=_relay, args=(process, say_in_turn), daemon=True))
            readers[-1].start()
        ended = _await(processes, list(events), happened, start, timeout, grace)
    except KeyboardInterrupt:
        _interrupt(processes, grace)
        raise
    finally:
        for process in processes:
            process.stop()
        for reader in readers:
            reader.join(READS)
    return [ended.get(process.host, HostExit(process.host, None, time.monotonic() - start)) for process in processes]


def _await(
    processes: Sequence[HostProcess],
    events: list[LabEvent],
    happen: Callable[[LabEvent], None],
    start: float,
    timeout: float | None,
    grace: float,
) -> dict[int, HostExit]:
    """Returns those that ended by themselves."""
    ended: dict[int, HostExit] = {}
    limit = float("inf") if timeout is None else start + timeout
    while len(ended) < len(processes) and time.monotonic() < limit:
        while events and time.monotonic() - start >= events[0].at:
            happen(events.pop(0))
        for process in processes:
            code = process.poll()
            if code is None or process.host in ended:
                continue
            ended[process.host] = HostExit(process.host, code if code >= 0 else 128 - code, time.monotonic() - start)
            if code != 0:
                limit = min(limit, time.monotonic() + grace)
        time.sleep(TICK)
    return ended


def _interrupt(processes: Sequence[HostProcess], grace: float) -> None:
    """Passes Ctrl-C on, and gives programs time to end in their own way. A second Ctrl-C stops them."""
    for process in processes:
        process.signal(signal.SIGINT)
    end = time.monotonic() + grace
    with contextlib.suppress(KeyboardInterrupt):
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(TICK)


def _relay(process: HostProcess, say: Callable[[str], None]) -> None:
    assert process.popen.stdout is not None
    with process.popen.stdout as lines:
        for line in lines:
            say(f"host{process.host} | {line.rstrip()}")
