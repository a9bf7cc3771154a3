"""Where the nodes of a mesh lie, which link serves which group, and how long gradients take around a ring of nodes.

    Mesh(pp=4, dp=2)            rank 0   rank 1   rank 2   rank 3
                  replica 0        0 ------ 2 ------ 4 ------ 6        ---  a link of a pipeline
                                   :        :        :        :         :   a link of a ring: data parallelism
                  replica 1        1 ------ 3 ------ 5 ------ 7

All other links, such as 0-3, are unused. A node is a group of `tp` processes that always stay together on one
machine, so tensor parallelism never leaves the machine.

Rings add up the gradients of the replicas: an all-reduce of dp members is 2 (dp - 1) steps, in each of which every
member sends 1/dp of the bytes to the next.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from penstock.cost.conditions import LinkCondition, LinkQueue
from penstock.cost.errors import CostError
from penstock.cost.links import Links
from penstock.schedule.short_repr import short_repr
from penstock.unknown_names import refuse_unknown

Node = int
Pair = tuple[Node, Node]


class LinkGroup(StrEnum):
    """What a link between two nodes is for."""

    PP = "pp"
    DP = "dp"
    UNUSED = "unused"


class LinkUse(NamedTuple):
    """What a link serves.

    Attributes:
        group: pipeline, ring or unused.
        replica: the replica of a pipeline's link; None for other links.
        ranks: the two ranks that a pipeline's link joins, the lower first. For a ring, its one rank.
    """

    group: LinkGroup
    replica: int | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.group is LinkGroup.PP:
            return f"PP link {self.ranks[0]}:{self.ranks[1]} of replica {self.replica}"
        return f"DP ring of rank {self.ranks[0]}" if self.group is LinkGroup.DP else "unused"


@refuse_unknown(CostError)
@dataclass(frozen=True)
class Mesh:
    """A mesh: replicas of a pipeline side by side, and which node lies at each of the pp * dp places.

    Attributes:
        pp: ranks of a pipeline.
        dp: replicas of the pipeline.
        tp: processes per node.
        nodes: the node of rank p in replica d, at index `p * dp + d`. Default: in ascending order.

    Raises:
        CostError: a size below 1, or nodes that do not name each of 0 to pp * dp - 1 once.

    Examples:
        >>> import penstock as ps
        >>> mesh = ps.Mesh(pp=4, dp=2)
        >>> mesh.num_nodes, mesh.nodes
        (8, (0, 1, 2, 3, 4, 5, 6, 7))
    """

    pp: int
    dp: int = 1
    tp: int = 1
    nodes: tuple[Node, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp"):
            if getattr(self, name) < 1:
                raise CostError(f"a mesh with {name} = {getattr(self, name)}: give at least 1")
        nodes = tuple(self.nodes) or tuple(range(self.num_nodes))
        if sorted(nodes) != list(range(self.num_nodes)):
            raise CostError(f"nodes {nodes}: give each of 0 to {self.num_nodes - 1} once, for {self.pp} x {self.dp}")
        object.__setattr__(self, "nodes", nodes)

    @property
    def num_nodes(self) -> int:
        return self.pp * self.dp

    @cached_property
    def _place(self) -> tuple[int, ...]:
        found = [0] * self.num_nodes
        for place, node in enumerate(self.nodes):
            found[node] = place
        return tuple(found)

    def coordinate(self, node: Node) -> tuple[int, int]:
        """The rank and the replica of a node."""
        return divmod(self._place[node], self.dp)

    def pipeline(self, replica: int) -> tuple[Node, ...]:
        """The nodes of a replica, by rank."""
        return self.nodes[replica :: self.dp]

    def ring(self, rank: int) -> tuple[Node, ...]:
        """The nodes that hold a rank's stages, in the order of their ring."""
        return self.nodes[rank * self.dp : (rank + 1) * self.dp]

    def processes(self) -> list[list[list[int]]]:
        """Process numbers by rank, replica and tensor-parallel place, as torch's DeviceMesh takes them."""
        return [[[node * self.tp + t for t in range(self.tp)] for node in self.ring(rank)] for rank in range(self.pp)]

    def use(self, a: Node, b: Node, joined: Sequence[tuple[int, int]] | None = None) -> LinkUse:
        """What the link between two nodes serves.

        Args:
            joined: the pairs of ranks that exchange messages. Default: neighbours.
        """
        (p, d), (q, e) = sorted((self.coordinate(a), self.coordinate(b)))
        if p == q:
            next_to = (e - d) % self.dp in (1, self.dp - 1)
            return LinkUse(LinkGroup.DP, None, (p,)) if next_to else LinkUse(LinkGroup.UNUSED)
        pairs = (
            {(p, p + 1) for p in range(self.pp - 1)} if joined is None else {*joined, *((y, x) for x, y in joined)}
        )
        return LinkUse(LinkGroup.PP, d, (p, q)) if d == e and (p, q) in pairs else LinkUse(LinkGroup.UNUSED)

    def swapped(self, a: Node, b: Node) -> Mesh:
        """The same mesh with two nodes swapped."""
        other = {a: b, b: a}
        return replace(self, nodes=tuple(other.get(node, node) for node in self.nodes))

    def moved(self, then: Mesh) -> tuple[Node, ...]:
        """The nodes that lie at another place in `then`."""
        return tuple(node for node in range(self.num_nodes) if self.coordinate(node) != then.coordinate(node))

    def links_of(self, conditions: Links, replica: int) -> Links:
        """The link conditions of one replica, by rank, taken from conditions between nodes."""
        rank_of = {node: rank for rank, node in enumerate(self.pipeline(replica))}
        inside = {
            (rank_of[a], rank_of[b]): each
            for (a, b), each in conditions.conditions.items()
            if {a, b} <= rank_of.keys()
        }
        return replace(conditions, conditions=inside)

    def ring_links(self, conditions: Links, rank: int) -> tuple[LinkCondition | None, ...]:
        """The condition of each link of a rank's ring, from each node to the next."""
        return tuple(conditions.named(a, b)[1] for a, b in _round(self.ring(rank)))

    def __str__(self) -> str:
        rows = (" ".join(map(str, self.pipeline(replica))) for replica in range(self.dp))
        return " | ".join(rows)


def _round(ring: Sequence[Node]) -> Iterator[Pair]:
    """The links of a ring."""
    if len(ring) > 1:
        yield from zip(ring, (*ring[1:], ring[0]), strict=True)


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
