"""Runs one command on every host of a lab and labels the lines of each. If it fails on one host, the
others are stopped.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.lab.events import LabEvent
from penstock.lab.process import HostProcess
from penstock.lab.running import RunningLab

READS = 5.0
"""Seconds for what ended programs have written; a process that left its session may still hold the pipe."""
TICK = 0.02


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
    lab: RunningLab,
    command: Sequence[str],
    *,
    hosts: Sequence[int] | None = None,
    events: Sequence[LabEvent] = (),
    timeout: float | None = None,
    grace: float = 10.0,
    say: Callable[[str], None] = print,
) -> list[HostExit]:
    """Runs `command` on every host, or on some, and returns when it has ended on all.

    Args:
        events: happen meanwhile.
        timeout: seconds until all are stopped.
        grace: seconds that the others have after one has failed, and that all have after Ctrl-C.
        say: is called with each line that a host writes and with each event, one at a time.
    """
    start = time.monotonic()
    turn = threading.Lock()

    def say_in_turn(line: str) -> None:
        with turn:
            say(line)

    processes: list[HostProcess] = []
    readers: list[threading.Thread] = []
    try:
        for host in lab.hosts if hosts is None else hosts:
            process = lab.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            processes.append(process)
            readers.append(threading.Thread(target=_relay, args=(process, say_in_turn), daemon=True))
            readers[-1].start()
        ended = _await(lab, processes, list(events), start, timeout, grace, say_in_turn)
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
    lab: RunningLab,
    processes: Sequence[HostProcess],
    events: list[LabEvent],
    start: float,
    timeout: float | None,
    grace: float,
    say: Callable[[str], None],
) -> dict[int, HostExit]:
    """Returns those that ended by themselves."""
    ended: dict[int, HostExit] = {}
    limit = float("inf") if timeout is None else start + timeout
    while len(ended) < len(processes) and time.monotonic() < limit:
        while events and time.monotonic() - start >= events[0].at:
            event = events.pop(0)
            event.apply(lab)
            say(f"lab   | {event}")
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
