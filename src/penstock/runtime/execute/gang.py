"""Where ranks of one process meet for an op that they run together: it runs when the last of them has come.

    rank 0 | F0 F1 ........ GATHER0 B0      stands until rank 1 is there, then runs the op
    rank 1 | F0 .. F1 F2    GATHER0 B0      finds what came of it

The first of the ranks runs it for all of them. Between processes nobody meets here: each rank runs its own part, and
what they do together (a collective, say) is the op's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from penstock.dispatch import Graph
from penstock.schedule import Op


class Gang:
    """Who has come to what, in one step of the ranks of this process."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sizes = [last - first for first, last in pairwise(graph.gang_first)]
        self._come: list[set[int]] = [set() for _ in self._sizes]
        self._outcomes: dict[Op, tuple[Any, int]] = {}

    def come(self, number: int) -> None:
        """A rank stands ready for its part of an op."""
        self._come[self._graph.gang[number]].add(number)

    def is_whole(self, number: int) -> bool:
        """Whether all ranks of an op have come to it."""
        gang = self._graph.gang[number]
        return len(self._come[gang]) == self._sizes[gang]

    def may_run(self, number: int) -> bool:
        """Whether all have come, and the first of the ranks has run it, where this is another one's part."""
        return self.is_whole(number) and (self.is_first(number) or self._graph.ops[number] in self._outcomes)

    def is_first(self, number: int) -> bool:
        """Whether this part of an op is that of the first of its ranks, which runs it."""
        return self._graph.number[self._graph.ops[number]] == number

    def leave(self, op: Op, outcome: Any) -> None:
        """Leaves what came of an op for the other ranks."""
        self._outcomes[op] = outcome, self._sizes[self._graph.gang[self._graph.number[op]]] - 1

    def find(self, op: Op) -> Any:
        """What the first rank left; gone once all others have it."""
        outcome, left = self._outcomes[op]
        if left > 1:
            self._outcomes[op] = outcome, left - 1
        else:
            del self._outcomes[op]
        return outcome

    def absent(self, number: int) -> list[int]:
        """The ranks that have not come."""
        graph, gang = self._graph, self._graph.gang[number]
        members = graph.gang_ops[graph.gang_first[gang] : graph.gang_first[gang + 1]]
        return [graph.host(n) for n in members if n not in self._come[gang]]
