"""What `penstock links` measures: latency and bandwidth between all ranks, and the links that stand out.

Pairs are measured in rounds. Each rank is in one pair at a time, so n ranks need n - 1 rounds:

    round 0    0-3 1-2        round 1    0-2 3-1        round 2    0-1 2-3

All pairs measure their latency first, by small messages. Then all measure their bandwidth, by messages that grow
until their size decides how long they take. A round of bandwidths takes its share of the time that is left.

    messages    64 KiB  256 KiB  1 MiB  4 MiB ...      a link of 1 GB/s, 0.06 ms to 30 ms
                64 KiB                                 a link of 5 Mbit/s, whose 105 ms tell enough

Started as a program by `penstock links`, one process per rank:

    python -m penstock.tune.links SECONDS TRANSPORT FILE
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median, median_high
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import penstock as ps
from penstock.cost import LinkCondition
from penstock.cost.conditions import Constant
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch import init_process
from penstock.runtime.mesh.interfaces import network_name
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.probe import PROBE, round_trips, rounds

TRIPS = 9
"""Round trips of small messages, for each pair."""
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 26
LONG_ENOUGH = 30.0
"""Milliseconds that a message takes at least, and three round trips, for its bandwidth to count."""
TRIES, MOST_MS = 3, 100.0
"""Messages of the last size of which the fastest counts, unless one takes longer than so many ms."""
LATE, LATE_MS = 1.5, 1.0
"""A link is late if its latency exceeds so many times the usual one by so many ms."""
SLOW = 4.0
"""A link is slow if its bandwidth is below the usual one, divided by this: between loaded processes it varies."""
LEAST_DELAY = 0.1
"""Milliseconds below which the usual latency is not worth an option."""

Link = tuple[int, int]


class PairTimes(NamedTuple):
    """What was measured of a pair of ranks.

    Attributes:
        latency, median: ms one way, half of the shortest round trip and half of the median one.
        there, back: bytes a second from the lower rank to the higher one, and back. None: there was no time for it.
    """

    latency: float
    median: float
    there: float | None = None
    back: float | None = None


@dataclass(frozen=True)
class MeasuredLinks:
    """All pairs of ranks, as measured.

    Attributes:
        hosts, networks: of each rank, the host's name, and the name of the network that its loopback reaches.
        pairs: by ranks, the lower one first.
        seconds: that measuring took.
    """

    hosts: Sequence[str]
    networks: Sequence[str]
    pairs: dict[Link, PairTimes]
    seconds: float

    def is_loopback(self, link: Link) -> bool:
        return self.networks[link[0]] == self.networks[link[1]]

    def rate(self, source: int, target: int) -> float | None:
        """Bytes a second from one rank to another."""
        times = self.pairs[min(source, target), max(source, target)]
        return times.there if source < target else times.back

    def usual_latency(self, link: Link) -> float:
        """The first quartile of all pairs of its kind, within a host or between hosts: half of them may be late."""
        levels = sorted(self.pairs[each].latency for each in self._alike(link))
        return levels[(len(levels) - 1) // 4]

    def usual_rate(self, link: Link) -> float | None:
        """The median of both directions of these pairs. None: less than three rates are known."""
        rates = [rate for each in self._alike(link) for rate in self.pairs[each][2:] if rate is not None]
        return median_high(rates) if len(rates) > 2 else None

    def is_late(self, link: Link) -> bool:
        return self.pairs[link].latency > LATE * self.usual_latency(link) + LATE_MS

    def is_slow(self, source: int, target: int) -> bool:
        usual, rate = self.usual_rate((min(source, target), max(source, target))), self.rate(source, target)
        return usual is not None and rate is not None and rate < usual / SLOW

    @cached_property
    def late(self) -> list[Link]:
        """The pairs that stand out in latency, or in the bandwidth of a direction."""
        return [(a, b) for a, b in self.pairs if self.is_late((a, b)) or self.is_slow(a, b) or self.is_slow(b, a)]

    @cached_property
    def links(self) -> ps.Links:
        """The late pairs, as `--link` takes them. The default is the usual latency between hosts, if it matters."""
        found: dict[Link, LinkCondition] = {}
        for a, b in self.late:
            there, back = self._condition(a, b), self._condition(b, a)
            found[a, b] = there
            if there != back:
                found[b, a] = back
        between = [link for link in self.pairs if not self.is_loopback(link)]
        usual = _rounded(self.usual_latency(between[0])) if between else 0.0
        return ps.Links(found, default=usual if usual >= LEAST_DELAY else None)

    def _condition(self, source: int, target: int) -> LinkCondition:
        link = min(source, target), max(source, target)
        rate = None
        if self.is_slow(source, target):
            there, back = (self.rate(source, target) or 0.0), (self.rate(target, source) or 0.0)
            if max(there, back) < 1.25 * min(there, back):  # the same both ways, but for noise
                there = (there + back) / 2
            rate = Constant(_rounded(there))
        latency = self.pairs[link].latency
        return LinkCondition(Constant(_rounded(latency) if latency >= LEAST_DELAY else 0.0), bandwidth=rate)

    def _alike(self, link: Link) -> list[Link]:
        return [each for each in self.pairs if self.is_loopback(each) == self.is_loopback(link)]

    def to_json(self) -> dict[str, Any]:
        pairs = [[*link, *times] for link, times in self.pairs.items()]
        return {"hosts": self.hosts, "networks": self.networks, "pairs": pairs, "seconds": self.seconds}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> MeasuredLinks:
        pairs = {(a, b): PairTimes(*times) for a, b, *times in found["pairs"]}
        return cls(found["hosts"], found["networks"], pairs, found["seconds"])


def _rounded(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")


def measure_links(peers: GroupPeers, seconds: float, device: str = "cpu") -> MeasuredLinks:
    """Measures all pairs of ranks. Every rank must call it, and each gets the whole result.

    Raises:
        DeadlineExceeded, PeerLost: names the rank that is late or gone.
    """
    mine, num_ranks = peers.here[0], peers.num_ranks
    names = peers.gather((socket.gethostname(), network_name()))
    began = time.monotonic()
    found: dict[Link, PairTimes] = {}
    for link in _pairs_of(mine, num_ranks):
        other = sum(link) - mine
        halves = [trip / 2 for trip in round_trips(peers, mine == link[0], other, TRIPS, device=device)]
        found[link] = PairTimes(min(halves), median(halves))
    for num_done, link in enumerate(_pairs_of(mine, num_ranks)):
        left = (began + seconds - time.monotonic()) / (num_ranks - 1 - num_done)
        if mine == link[0]:
            rates = _ask_bandwidths(peers, link[1], 2 * found[link].latency, left, device)
            found[link] = PairTimes(*found[link][:2], *rates)
        else:
            _answer_bandwidths(peers, link[0], device)
    begun = {link: times for link, times in found.items() if link[0] == mine}
    pairs = {link: times for each in peers.gather(begun) for link, times in each.items()}
    hosts, networks = zip(*names, strict=True)
    return MeasuredLinks(hosts, networks, dict(sorted(pairs.items())), time.monotonic() - began)


def _pairs_of(rank: int, num_ranks: int) -> list[Link]:
    return [pair for pairs in rounds(num_ranks) for pair in pairs if rank in pair]


def _ask_bandwidths(peers: GroupPeers, other: int, trip: float, seconds: float, device: str) -> list[float | None]:
    """Measures the bandwidth to another rank and back, in bytes a second. The other one answers.

    Before each message the other rank is told its size and that of the answer; sizes of 0 end the measurement.

    Args:
        trip: ms of a small message there and back, which is taken off each time.
        seconds: for both directions.
    """
    ready = torch.zeros(1, device=device)

    def exchange(sizes: tuple[int, int]) -> float:
        peers.send(torch.tensor(sizes, device=device), other, PROBE)
        peers.receive(ready, other, PROBE)
        return max(round_trips(peers, True, other, 1, *sizes, device)[0] - trip, 1e-3)

    found: list[float | None] = []
    enough = max(LONG_ENOUGH, 3 * trip)
    for direction in range(2):
        size, until = FIRST_BYTES, time.monotonic() + seconds / 2
        took: list[float] = []  # by messages of this size
        while seconds > 0 and len(took) < TRIES:
            took.append(exchange((size, 1) if direction == 0 else (1, size)))
            growth = 1 if took[0] >= enough or 2 * size > MOST_BYTES else 4 if 4 * took[0] < enough else 2
            if took[0] > MOST_MS or time.monotonic() + growth * took[0] / 1e3 > until:
                break
            if growth > 1:
                size, took = size * growth, []
        found.append(size / min(took) * 1e3 if took else None)
    peers.send(torch.tensor((0, 0), device=device), other, PROBE)
    return found


def _answer_bandwidths(peers: GroupPeers, other: int, device: str) -> None:
    sizes, ready = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    while True:
        peers.receive(sizes, other, PROBE)
        there, back = sizes.tolist()
        if there == 0:
            return
        peers.send(ready, other, PROBE)
        round_trips(peers, False, other, 1, there, back, device)


def measure_as_rank(seconds: float, transport: str) -> tuple[int, MeasuredLinks]:
    """Joins the other ranks and measures with them. Returns this process's rank, and the links."""
    timeout = seconds + 20.0
    rank, num_ranks = init_process(timeout)
    world = dist.group.WORLD
    if transport == "nccl" and "nccl" not in str(dist.get_backend_config()):
        raise RuntimeFailure(
            f"--transport nccl: rank {rank} has no GPU of its own; start at most one rank per GPU, or measure by gloo"
        )
    if num_ranks < 2 or world is None:
        raise RuntimeFailure("one rank has no links; give --ranks 2 or more, or start more by torchrun")
    found = measure_links(GroupPeers(world, timeout), seconds, "cuda" if transport == "nccl" else "cpu")
    dist.destroy_process_group()
    return rank, found


if __name__ == "__main__":
    found_rank, measured = measure_as_rank(float(sys.argv[1]), sys.argv[2])
    if found_rank == 0:
        Path(sys.argv[3]).write_text(json.dumps(measured.to_json()))
