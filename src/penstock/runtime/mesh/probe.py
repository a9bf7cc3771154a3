"""Round trips say what links take by themselves, and how far the clocks of two hosts are apart.

All links between nodes are probed in rounds of disjoint pairs:

    round 0    0-3 1-2        round 1    0-2 3-1        round 2    0-1 2-3

A pair sends a short message there and back, which shows the link's latency, and then longer ones, each eight times as
long as the one before, until one takes clearly longer than the short one. That shows the bandwidth. A slow link shows
at a few KB, so its probe takes some tens of milliseconds at most:

    1 GB/s       4 KB, 32 KB, 250 KB      1 ms in all
    5 Mbit/s     4 KB                    26 ms: 6.4 ms each way, two trips

Between two steps the links carry nothing else, so the shortest of a few round trips is the link's own time. The first
node gathers all times and sends them to every process. A late link delays this only where it is one of the first
node's links; an all-reduce would cross it several times.

`ProbePace` says how often: the longer a round takes, the more steps come between two.

    step 1 2 3 4 5 | probe | 6 .. 10 | probe | 11 .......... 40 | probe |      a late link makes rounds take long

Clocks are compared by the shortest of some round trips, as NTP does:

    rank 2   |asked ------------------- heard|         rank 0's clock showed `told` somewhere between: in the middle,
    rank 0              |told|                         give or take half the trip
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from penstock.control.events import Link, LinkTime
from penstock.runtime.mesh.collective import broadcast, gather
from penstock.runtime.mesh.peers import GroupPeers

PROBE = "a probe of a link"
"""What ranks send each other here, in errors."""
TRIPS, LONG_TRIPS = 3, 2
"""Round trips of which the shortest counts: of short messages, and of long ones."""
SIZES = 4_000, 32_000, 250_000
"""Bytes of long messages."""
CLEARLY_MS = 2.0
"""A long message shows the bandwidth where it takes so many ms longer than a short one (one way)."""
LEAST_EVERY, MOST_EVERY = 5, 200
"""Steps between two rounds, by how long rounds take."""
SHARE = 0.04
"""Of the time, what rounds may take: each goes there and back over every link, the late one too."""


class ProbePace:
    """After which steps a round of probes is due, so that rounds take at most a share of the time between them.

    The process that gathers what a round found plans the next one, and tells all others with it: a sum over all
    processes would cross a late link several times, and take longer than the round.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps, self._next, self._last, self._soonest = 0, LEAST_EVERY, 0, LEAST_EVERY
        self._since = self._began = clock()

    def after_step(self, is_soon: bool = False) -> bool:
        """To be called by every process after each step: whether a round is due, which is to begin at once.

        Args:
            is_soon: whether the next round is due after a quarter of the steps planned, at least `LEAST_EVERY`; the
                same in every process.
        """
        self._steps += 1
        if is_soon:
            self._next = min(self._next, self._soonest)
        if self._steps < self._next:
            return False
        self._began = self._clock()
        return True

    def plan(self, rest: float = 0.0) -> int:
        """How many steps are to come before the next round.

        Args:
            rest: seconds that this round will go on for.
        """
        spent = self._clock() - self._began + rest
        stepping = (self._began - self._since) / max(1, self._steps - self._last)
        wanted = math.ceil(spent / (SHARE * stepping)) if stepping > 0 else 0
        return min(max(wanted, LEAST_EVERY), MOST_EVERY)

    def follow(self, num_steps: int) -> None:
        """Sets how many steps come before the next round, as one process has planned it for all."""
        self._last, self._next, self._since = self._steps, self._steps + num_steps, self._clock()
        self._soonest = self._steps + max(LEAST_EVERY, num_steps // 4)


def rounds(num_nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of nodes once, in rounds in which each node is in one pair at most (the circle method)."""
    seats: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def probe(nodes: Sequence[Sequence[int]], peers: GroupPeers, pace: ProbePace | None = None) -> dict[Link, LinkTime]:
    """What messages take between each two nodes, the same in every process. All of torch.distributed must call it.

    Args:
        nodes: the processes of each; the first of them measures.
        peers: all of torch.distributed.
        pace: of each process, made alike; it then knows when the next round is due.

    Raises:
        DeadlineExceeded, PeerLost: a process is late or gone.
        LinkLost: a connection broke, and another interface takes its place. Another probe may be made.
    """
    me, num = peers.here[0], len(nodes)
    firsts = [processes[0] for processes in nodes]
    found = torch.zeros(num, num, 2, dtype=torch.float64, device="cpu")
    if me in firsts:
        node = firsts.index(me)
        for a, b in (pair for pairs in rounds(num) for pair in pairs if node in pair):
            measured = link_time(peers, node == a, firsts[a + b - node])
            if node == a:
                found[a, b] = torch.tensor(measured, device="cpu")
    # To the first node and from there to all: an all-reduce would cross a late link several times.
    root = firsts[0]
    rows = [torch.zeros_like(found) for _ in range(peers.num_ranks)] if me == root else None
    peers.wait_for(peers.start(gather, found, rows, root), PROBE)
    message = torch.zeros(found.numel() + 1, dtype=found.dtype, device="cpu")
    if rows is not None:
        found = torch.stack(rows).sum(0)
        message[:-1] = found.flatten()
        message[-1] = 0 if pace is None else pace.plan(rest=float(found[0, :, 0].max()) / 1e3)
    peers.wait_for(peers.start(broadcast, message, root), PROBE)
    if pace is not None:
        pace.follow(int(message[-1]))
    times = message[:-1].view(num, num, 2).tolist()
    return {(a, b): LinkTime(*times[a][b]) for a in range(num) for b in range(a + 1, num)}


def link_time(peers: GroupPeers, begins: bool, other: int) -> LinkTime:
    """Measures the link to another rank by messages of growing sizes. Both ranks must call it; see `round_trips`."""
    trip = min(round_trips(peers, begins, other, TRIPS))
    longer, ends = 0.0, torch.zeros(1, device="cpu")
    for num_bytes in SIZES:
        longer = (min(round_trips(peers, begins, other, LONG_TRIPS, num_bytes, num_bytes)) - trip) / 2
        ends[0] = longer >= CLEARLY_MS
        (peers.send if begins else peers.receive)(ends, other, PROBE)
        if ends:
            break
    return LinkTime(trip / 2, max(0.0, longer) / num_bytes * 1e6)


def round_trips(
    peers: GroupPeers, begins: bool, other: int, num_trips: int, there: int = 1, back: int = 1, device: str = "cpu"
) -> list[float]:
    """Measures round trips with one other rank, in milliseconds. Both ranks must call it, with the same sizes.

        begins   |- `there` bytes ->|           |                 a trip takes latency there + latency back
        answers  |                  |<- `back` -|                 + size / bandwidth of the larger message

    Args:
        begins: whether this rank sends first. The other one's times include waiting, so they mean nothing.
        there, back: bytes of the first message and of the answer.
    """
    ping, pong = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (there, back))
    first, second = (peers.send, peers.receive) if begins else (peers.receive, peers.send)
    took = []
    for _ in range(num_trips):
        start = time.perf_counter_ns()
        first(ping, other, PROBE)
        second(pong, other, PROBE)
        pong[-1:].tolist()  # waits for a GPU, which receives after the call has returned
        took.append((time.perf_counter_ns() - start) / 1e6)
    return took


ROUNDS = 8
WHAT = "the time of its clock"


def ahead_of_first(peers: GroupPeers, names: Sequence[str]) -> list[int]:
    """Nanoseconds that each rank's clock is ahead of rank 0's. Every process must call it.

    If a link is lost meanwhile, clocks are compared anew over another interface, if there is one.

    Args:
        names: every process's `clock_name`; the first rank of each clock asks rank 0, one after the other.
    """
    firsts = {name: names.index(name) for name in names}
    of_all = peers.gather(peers.repeated(lambda: _ahead_of_first(peers, [*firsts.values()][1:])))
    return [of_all[firsts[name]] for name in names]


def _ahead_of_first(peers: GroupPeers, others: Sequence[int]) -> int:
    """Nanoseconds that this rank's clock is ahead of rank 0's if it is one of `others`, which ask rank 0; else 0."""
    shown = torch.zeros(1, dtype=torch.int64, device="cpu")
    for rank in others if peers.here[0] == 0 else ():
        for _ in range(ROUNDS):
            peers.receive(shown, rank, WHAT)
            shown[0] = time.perf_counter_ns()
            peers.send(shown, rank, WHAT)
    trips = []
    for _ in range(ROUNDS if peers.here[0] in others else 0):
        asked = time.perf_counter_ns()
        peers.send(shown, 0, WHAT)
        peers.receive(shown, 0, WHAT)
        heard = time.perf_counter_ns()
        trips.append((heard - asked, (asked + heard) // 2 - int(shown)))
    return min(trips, default=(0, 0))[1]
