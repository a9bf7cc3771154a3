"""How far the clocks of two hosts are apart: by the shortest of some round trips, as NTP tells it.

rank 2   |asked ------------------- heard|         rank 0's clock showed `told` somewhere between: in the middle,
rank 0              |told|                         give or take half the trip
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.runtime.mesh.peers import GroupPeers

ROUNDS = 8
WHAT = "the time of its clock"
LIMIT = 20.0
"""Seconds that any trip may take."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class ClockSample(NamedTuple):
    """A question and its answer, in nanoseconds: two moments of the asking clock, one of the other."""

    asked: int
    heard: int
    told: int


def clock_offset(samples: Sequence[ClockSample]) -> int:
    """Nanoseconds that the asking clock is ahead, by the sample with the shortest round trip."""
    best = min(samples, key=lambda sample: sample.heard - sample.asked)
    return (best.asked + best.heard) // 2 - best.told


def clock_name() -> str:
    """The same for all processes that share a monotonic clock: those of one machine, whatever its namespaces."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()


def ahead_of_first(peers: GroupPeers, names: Sequence[str]) -> int:
    """Nanoseconds that this process's clock is ahead of rank 0's. Every process must call it.

    Args:
        names: every process's `clock_name`; those that share rank 0's clock are not asked.
    """
    mine, found = peers.here[0], 0
    for rank in range(1, peers.num_ranks):
        if names[rank] == names[0]:
            continue
        if mine == 0:
            for _ in range(ROUNDS):
                _receive(peers, rank)
                _send(peers, rank, time.perf_counter_ns())
        elif mine == rank:
            samples = []
            for _ in range(ROUNDS):
                asked = time.perf_counter_ns()
                _send(peers, 0, asked)
                told = _receive(peers, 0)
                samples.append(ClockSample(asked, time.perf_counter_ns(), told))
            found = clock_offset(samples)
    return found


def _send(peers: GroupPeers, target: int, value: int) -> None:
    peers.send(torch.tensor([value]), target, WHAT, LIMIT)


def _receive(peers: GroupPeers, source: int) -> int:
    value = torch.zeros(1, dtype=torch.int64)
    peers.receive(value, source, WHAT, LIMIT)
    return int(value)
