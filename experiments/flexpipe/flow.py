"""A flow: what one turn of a periodic schedule runs.

A turn is one microbatch (of each pipeline, where there are several), and a `Block` is an op without its microbatch. A
block may be shared by several ranks, which then run it together:

    rank 0   E H h F B B B e        E, H and their backwards (e, h) are shared: they stand in both rows
    rank 1   E H h B B B F e

Pure data and arithmetic: nothing here searches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class BlockDependency(NamedTuple):
    """A block waits for `block` (its place in the list) to end, and `delay` ms more for the message."""

    block: int
    delay: float = 0.0


@dataclass(frozen=True)
class Block:
    """An op of every turn.

    Attributes:
        name: for errors, like "3B".
        ranks: who runs it, all at once.
        duration: milliseconds.
        needs: what must have ended before, in the same turn.
    """

    name: str
    ranks: tuple[int, ...]
    duration: float
    needs: tuple[BlockDependency, ...] = ()


@dataclass(frozen=True)
class Flow:
    """What one turn runs: its blocks, one at least, in an order in which needs come first."""

    blocks: tuple[Block, ...]

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(max(block.ranks) for block in self.blocks)

    @cached_property
    def on_rank(self) -> tuple[tuple[int, ...], ...]:
        """`on_rank[rank]` are the blocks it runs."""
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for index, block in enumerate(self.blocks):
            for rank in block.ranks:
                rows[rank].append(index)
        return tuple(map(tuple, rows))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Milliseconds each rank spends on one turn: no period is shorter than the longest."""
        return tuple(sum(self.blocks[b].duration for b in row) for row in self.on_rank)

    @cached_property
    def latency(self) -> float:
        """Milliseconds one turn takes when it has the ranks for itself."""
        ends: list[float] = []
        for block in self.blocks:
            start = max((ends[need.block] + need.delay for need in block.needs), default=0.0)
            ends.append(start + block.duration)
        return max(ends)
