"""A ring: how long the gradients of data-parallel replicas take to add up over the links between them.

    all-reduce of dp members: 2 (dp - 1) steps, in each of which every member sends 1/dp of the bytes to the next

    link a -> b   |1|2|3|4|.......|5|6|7|8|          chunks; a window of 4 of them may be under way
                    \\ \\ \\ \\ latency
    member b             |1|2|3|4|       |5|         a chunk goes on as soon as it has come, so steps overlap

Patarasuk and Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations* (2009), is the algorithm;
each link carries 2 (dp - 1) / dp of the bytes. The window makes a late link expensive: it carries no more than one
window in its latency, whatever its bandwidth. That is how 10 to 30 ms cost a data-parallel group up to 8 times
(PipeMorph, Figure 19), where a pipeline's few messages are late once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.cost.conditions import LinkCondition, LinkQueue
from penstock.cost.errors import CostError
from penstock.cost.links import Links
from penstock.schedule.short_repr import short_repr


@dataclass(frozen=True)
class Ring:
    """How a ring moves bytes.

    Attributes:
        window: bytes that a link holds under way before its sender waits for a chunk to arrive. NCCL's is its
            buffers: 4 MiB a channel (NCCL_BUFFSIZE), so 8 channels hold 33.6 MB. `math.inf`: any number.
        num_chunks: chunks a window is made of.

    Raises:
        CostError: numbers that let nothing pass.

    Examples:
        >>> import penstock as ps
        >>> mesh, costs, zb = ps.Mesh(pp=4, dp=2), ps.cost.costs_preset("gpt2-7b"), ps.build("zb", 4, 12)
        >>> late = ps.Links.parse("6:7=latency:30ms+bandwidth:50GB/s")
        >>> rings = [ps.cost.Ring(window=32e6), ps.cost.Ring(window=256e6)]
        >>> small, large = (ps.simulation.simulate_mesh(zb, costs, mesh, links=late, ring=ring) for ring in rings)
        >>> small.iteration > large.iteration
        True
    """

    window: float = 8 * 4 * 2**20
    num_chunks: int = 4

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not self.window > 0:
            raise CostError(f"a ring with a window of {self.window:g} bytes can carry nothing: give more than 0")
        if self.num_chunks < 1:
            raise CostError(f"a window of {self.num_chunks} chunks can carry nothing: give at least 1")

    @property
    def under_way(self) -> int:
        """Chunks that a link holds at most; 0 for any number."""
        return self.num_chunks if self.window < math.inf else 0

    def chunks(self, num_bytes: float, num_members: int) -> tuple[int, float]:
        """How many chunks each member's part is sent in, and how many bytes each has."""
        part = num_bytes / num_members
        count = max(1, math.ceil(part * self.num_chunks / self.window)) if part and self.window < math.inf else 1
        return count, part / count

    def all_reduce_ms(
        self, num_bytes: float, links: Sequence[LinkCondition | None], base: float = 0.0, at: float = 0.0
    ) -> float:
        """Milliseconds from when all members are there until each has the sum.

        Args:
            num_bytes: of each member's gradients.
            links: of each member to the next, around; none, or one member alone: there is nothing to add up.
            base: ms that every message takes besides.
            at: when it begins, in ms of the conditions' own time.
        """
        if len(links) < 2 or num_bytes <= 0:
            return 0.0
        steady = all(link is None or link.is_steady for link in links)
        return _all_reduce_ms(self, float(num_bytes), tuple(links), base, 0.0 if steady else at)


@lru_cache(maxsize=4096)
def _all_reduce_ms(
    ring: Ring, num_bytes: float, links: tuple[LinkCondition | None, ...], base: float, begin: float
) -> float:
    """Every chunk over every link, by the same `LinkCondition` that other messages pass."""
    num = len(links)
    count, size = ring.chunks(num_bytes, num)
    under_way = ring.under_way
    conditions = [
        Links({(member, (member + 1) % num): link} if link is not None else {}, base=base)
        for member, link in enumerate(links)
    ]
    queues = [LinkQueue(begin, begin)] * num
    # Between two members both directions are one link.
    shared = num == 2 and any(link is not None and link.half_duplex for link in links)
    came: list[list[float]] = [[] for _ in links]  # of each link, when its chunks arrived
    handed = [begin] * num
    for message in range(2 * (num - 1) * count):
        for member in range(num):
            at = handed[member]
            if message >= count:
                at = max(at, came[member - 1][message - count])
            if under_way and message >= under_way:
                at = max(at, came[member][message - under_way])
            handed[member] = at
            way = 0 if shared else member
            passage = conditions[member].delay_of(member, (member + 1) % num, size, at, queues[way])
            queues[way] = passage.queue
            came[member].append(passage.arrived)
    return max(arrivals[-1] for arrivals in came) - begin
