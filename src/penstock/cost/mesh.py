"""Where the nodes of a mesh lie, and so which link serves which group.

    Mesh(pp=4, dp=2)            rank 0   rank 1   rank 2   rank 3
                  replica 0        0 ------ 2 ------ 4 ------ 6        ---  a link of a pipeline
                                   :        :        :        :         :   a link of a ring: data parallelism
                  replica 1        1 ------ 3 ------ 5 ------ 7

All other links, such as 0-3, are unused. A node is a group of `tp` processes that always stay together on one
machine, so tensor parallelism never leaves the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from penstock.cost.conditions import LinkCondition
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

    def fetching(self, then: Mesh) -> tuple[tuple[Node, int], ...]:
        """The nodes that run another rank in `then`, each with that rank.

        They must fetch the rank's state. All replicas of a rank hold the same state.
        """
        places = ((node, self.coordinate(node)[0], then.coordinate(node)[0]) for node in self.moved(then))
        return tuple((node, rank) for node, before, rank in places if before != rank)

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
