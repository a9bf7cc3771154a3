"""A schedule as arrays, under one set of costs: what `Runner` runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.dispatch import Graph
from penstock.schedule import Schedule
from penstock.simulation.memory import frozen_peaks

Array = Any
"""A numpy array."""


@dataclass(frozen=True, eq=False)
class Order:
    """A schedule as arrays, under one set of costs.

    Attributes:
        schedule: whose order it is. graph: its arrays as lists, where they were made op by op; those of another
            order of the same ops otherwise.
        ints: the arrays of ints that the engine reads, by name; missing: what it counts down.
        duration, change: of each op, ms and what it adds to the activations held.
    """

    schedule: Schedule
    graph: Graph
    base: Array
    ints: dict[str, Array]
    missing: Array
    duration: Array
    change: Array

    @property
    def num_ops(self) -> int:
        return len(self.base)

    @property
    def num_ranks(self) -> int:
        return self.graph.num_ranks

    @property
    def num_rows(self) -> int:
        """Ranks, and streams where ops are asynchronous: what the engine takes for ranks."""
        return self.graph.num_rows

    def ends(self, link: int) -> tuple[int, int]:
        """The two ranks of a link, which the engine numbers `source row * num_rows + target row`."""
        source, target = divmod(link, self.num_rows)
        return source % self.num_ranks, target % self.num_ranks

    @cached_property
    def peaks(self) -> list[float]:
        """Most activations each rank holds when it follows its frozen order."""
        return frozen_peaks(self.graph, self.change)

    @cached_property
    def sources(self) -> Array:
        """The op that each edge begins at."""
        return np.repeat(np.arange(self.num_ops), np.diff(self.ints["edge_first"]))

    @cached_property
    def crossing(self) -> tuple[Array, Array, Array]:
        """Edges between ranks, their source ops and their links (see `ends`)."""
        to, rank, source = self.ints["edge_to"], self.ints["rank_of"], self.sources
        edges = np.flatnonzero((rank[source] - rank[to]) % self.num_ranks)
        return edges, source[edges], rank[source[edges]] * self.num_rows + rank[to[edges]]
