"""What links take by themselves: short messages there and back between all nodes, in rounds of disjoint pairs.

    round 0    0-3 1-2        round 1    0-2 3-1        round 2    0-1 2-3

Between two steps nothing else is under way, so the shortest of a few round trips is what the link takes. The first
node gathers what all have found and tells every process: a late link holds this up only where it is one of the first
node's. An all-reduce would cross it several times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from penstock.runtime.mesh.collective import wait_for

TRIPS = 3
"""Round trips of which the shortest counts."""


def rounds(num_nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of nodes once, in rounds in which each node is in one pair at most (the circle method)."""
    seats: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def probe(nodes: Sequence[Sequence[int]], timeout: float) -> dict[tuple[int, int], float]:
    """Milliseconds one way between each two nodes, the same in every process. All of torch.distributed must call it.

    Args:
        nodes: the processes of each; the first of them measures.

    Raises:
        DeadlineExceeded, PeerLost: a process is late or gone.
    """
    me, num = dist.get_rank(), len(nodes)
    firsts = [processes[0] for processes in nodes]
    found = torch.zeros(num, num, dtype=torch.float64)
    if me in firsts:
        node = firsts.index(me)
        for pairs in rounds(num):
            for a, b in pairs:
                if node in (a, b):
                    found[a, b] = _round_trip(node == a, firsts[a + b - node], timeout) / 2
    _tell_all(found, firsts, timeout)
    return {(a, b): float(found[a, b]) for a in range(num) for b in range(a + 1, num)}


def _tell_all(found: torch.Tensor, firsts: Sequence[int], timeout: float) -> None:
    """Adds up what nodes found in their first processes; all of torch.distributed has the sum then."""
    me, root = dist.get_rank(), firsts[0]
    if me == root:
        rows = {other: torch.zeros_like(found) for other in firsts[1:]}
        for other, work in [(other, dist.irecv(row, other)) for other, row in rows.items()]:
            _wait(work, other, timeout)
        for row in rows.values():
            found += row
        others = [other for other in range(dist.get_world_size()) if other != root]
        for other, work in [(other, dist.isend(found, other)) for other in others]:
            _wait(work, other, timeout)
        return
    if me in firsts:
        _wait(dist.isend(found, root), root, timeout)
    _wait(dist.irecv(found, root), root, timeout)


def _round_trip(begins: bool, other: int, timeout: float) -> float:
    """The shortest round trip (ms); 0 on the side that only answers."""
    ball, shortest = torch.zeros(1), float("inf")
    for _ in range(TRIPS):
        start = time.perf_counter_ns()
        if begins:
            _wait(dist.isend(ball, other), other, timeout)
            _wait(dist.irecv(ball, other), other, timeout)
        else:
            _wait(dist.irecv(ball, other), other, timeout)
            _wait(dist.isend(ball, other), other, timeout)
        shortest = min(shortest, (time.perf_counter_ns() - start) / 1e6)
    return shortest if begins else 0.0


def _wait(work: object, peer: int, timeout: float) -> None:
    wait_for(work, dist.get_rank(), peer, "a probe of a link", timeout)
