"""The device on which measurements were made, and how busy other programs kept it."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.host_process import num_cores
from penstock.train.settings import Settings


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(settings: Settings) -> str:
    """The device that stages run on. It is part of a measurement's key, since times of one device do not
    hold on another.
    """
    if settings.device == "cuda":
        return f"{torch.cuda.get_device_name()} x{torch.cuda.device_count()}"
    return f"{processor()} x{num_cores()}"


def num_devices(settings: Settings) -> int:
    """How many ranks can work at the same time here: the GPUs, or the cores divided by the threads of a rank."""
    if settings.device == "cuda":
        return max(1, torch.cuda.device_count())
    return max(1, num_cores() // (settings.threads or 1))


@dataclass(frozen=True)
class Clock:
    """Seconds at one moment: of the wall clock, of this process's work, and of the whole machine's (NaN
    if not known).
    """

    wall: float
    own: float
    machine: float

    @classmethod
    def now(cls) -> Clock:
        return cls(time.perf_counter(), time.process_time(), _busy())

    def since(self, before: Clock) -> dict[str, float | None]:
        """Seconds that have passed, as plain data; None for the machine's if they are not known."""
        machine = self.machine - before.machine
        return {
            "wall": self.wall - before.wall,
            "own": self.own - before.own,
            "machine": machine if machine == machine else None,
        }


def others(clocks: list[dict[str, float | None]]) -> float | None:
    """Cores that other programs kept busy, from every rank's clock; None if that is not known."""
    machine, wall = clocks[0]["machine"], clocks[0]["wall"]
    if machine is None or not wall:
        return None
    return max(0.0, (machine - sum(clock["own"] or 0.0 for clock in clocks)) / wall)


TICKS = 100.0
"""Ticks per second in /proc/stat."""


def _busy() -> float:
    """Seconds that all processors of the machine have worked, added up."""
    try:
        with open("/proc/stat", encoding="utf-8") as lines:
            user, nice, system, _idle, _waiting, hard, soft, stolen, *_ = map(float, lines.readline().split()[1:])
    except (OSError, ValueError):
        return float("nan")
    return (user + nice + system + hard + soft + stolen) / TICKS
