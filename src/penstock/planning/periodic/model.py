"""A repetend: the ops of one turn, started once a period, forever. Unrolled and retimed it is a schedule.

The word and the idea are Tessel's (Lin et al. 2024): search the steady state, which is small, and let warm-up
and cool-down follow from it. A turn is one microbatch (of each pipeline, where there are several) and a `Block`
is an op without its microbatch. A repetend gives every block a start on the time line of one turn; turn j runs
everything j periods later.

    period 8, two ranks; E, H and their backwards (e, h) are shared: they stand in both rows at once

             |<- period ->|
    rank 0   | E H h F B B B e | E H h F B B B e |     start of F: 3 + 8q, q the periods it lies after E
    rank 1   | E H h B B B F e | E H h B B B F e |

Pure data and arithmetic: nothing here searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from penstock.schedule import ScheduleError


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
        acquires, releases: activation units that each of `ranks` holds from its start, and gives back at its end.
    """

    name: str
    ranks: tuple[int, ...]
    duration: float
    needs: tuple[BlockDependency, ...] = ()
    acquires: float = 0.0
    releases: float = 0.0


@dataclass(frozen=True)
class Flow:
    """What one turn runs: its blocks, in an order in which needs come first.

    Raises:
        ScheduleError: no block, a block without a rank or with a need that does not come before it, or a duration
            that is negative.
    """

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ScheduleError("a flow needs at least one block, got none", rule="placement")
        for index, block in enumerate(self.blocks):
            if not block.ranks or min(block.ranks) < 0:
                raise ScheduleError(
                    f"block {block.name} runs on ranks {block.ranks}: name at least one", rule="placement"
                )
            if not block.duration >= 0:
                raise ScheduleError(f"block {block.name} takes {block.duration} ms: give at least 0", rule="range")
            if late := [need.block for need in block.needs if not 0 <= need.block < index]:
                raise ScheduleError(
                    f"block {index} ({block.name}) needs block {late[0]}: list that first", rule="order"
                )

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

    def reversed(self) -> Flow:
        """The same flow seen from its end: needs turned round, and what was given back is taken."""
        last = len(self.blocks) - 1
        needs: list[list[BlockDependency]] = [[] for _ in self.blocks]
        for index, block in enumerate(self.blocks):
            for need in block.needs:
                needs[last - need.block].append(BlockDependency(last - index, need.delay))
        turned = [
            Block(b.name, b.ranks, b.duration, tuple(needs[place]), b.releases, b.acquires)
            for place, b in enumerate(reversed(self.blocks))
        ]
        return Flow(tuple(turned))

    def repeated(self, num_copies: int) -> Flow:
        """Several turns as one: block b of copy k is number `b + k * len(blocks)`."""
        size = len(self.blocks)
        return Flow(
            tuple(
                replace(
                    block, needs=tuple(BlockDependency(need.block + copy * size, need.delay) for need in block.needs)
                )
                for copy in range(num_copies)
                for block in self.blocks
            )
        )


@dataclass(frozen=True)
class Repetend:
    """A steady state: block b of turn j starts at `starts[b] + j * period` (ms)."""

    flow: Flow
    period: float
    starts: tuple[float, ...]

    @property
    def latency(self) -> float:
        """First start to last end of one turn (ms)."""
        ends = [start + block.duration for start, block in zip(self.starts, self.flow.blocks, strict=True)]
        return max(ends) - min(self.starts)

    def sequence(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """(block, turn) of a whole run, block b for `counts[b]` turns, in the order of their starts.

        Each rank runs its own in this order. Where the flow is several turns as one (`Flow.repeated`), `counts`
        has an entry for each block of a single turn and numbers the turns of each in the order in which they run:
        the k-th of what is needed ends no later than any k-th that needs it starts.
        """
        size = len(counts)
        copies = len(self.starts) // size
        places = sorted(
            start_order(self.flow, block, turn, start + turn * self.period)
            for block, start in enumerate(self.starts)
            for turn in range(-(-counts[block % size] // copies))
        )
        run = [0] * size
        sequence = []
        for _, _, copy_of, _ in places:
            block = copy_of % size
            if run[block] < counts[block]:
                sequence.append((block, run[block]))
                run[block] += 1
        return sequence


def start_order(flow: Flow, block: int, turn: int, start: float) -> tuple[float, bool, int, int]:
    """What to sort ops by, to have them in the order of their starts, those that take no time before the others.

    Of those that take no time the one that is needed comes first, as it does in the flow.
    """
    return start, flow.blocks[block].duration > 0, block, turn
