"""Tessel's own search (Lin et al., HPCA 2024), on embedding and head that all ranks share: the baseline of Table 5.

A repetend is the steady state: every block of the model once, each of some microbatch. Tessel takes repetends of one
microbatch, of two, and so on. For each number it goes through every way to say which block runs which of them, where
a later block of the chain never runs a later microbatch, and asks a solver for the order with the shortest period
that is below the best so far. It ends where the period is as long as the rank with most work needs, which no
repetend can beat. Warm-up and cool-down follow from the repetend.

    2 ranks, 3 microbatches:   E2 F2 f1 H1 h1 b1 B0 e0      one of C(7, 2) = 21 ways

What is not Tessel's: the solver, CP-SAT in place of Z3; memory, which is not limited; warm-up and cool-down, which
take the repetend's order, each op as soon as it can run, where Tessel has its solver order them too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import comb
from typing import NamedTuple

import penstock as ps
from experiments.flexpipe.flow import Block, BlockDependency, Flow
from penstock.engine.network import of_queues
from penstock.engine.sweep import Timer

UNITS = 64
"""Whole numbers that the work of the busiest rank is told to the solver in, where durations are not whole; those of
Tessel's examples are. What is found is timed with the durations as they are."""


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

        Each rank runs its own in this order.
        """
        places = sorted(
            start_order(self.flow, block, turn, start + turn * self.period)
            for block, start in enumerate(self.starts)
            for turn in range(counts[block])
        )
        return [(block, turn) for _, _, block, turn in places]


def start_order(flow: Flow, block: int, turn: int, start: float) -> tuple[float, bool, int, int]:
    """What to sort ops by, to have them in the order of their starts, those that take no time before the others.

    Of those that take no time the one that is needed comes first, as it does in the flow.
    """
    return start, flow.blocks[block].duration > 0, block, turn


class BlockInstance(NamedTuple):
    """One run of a block: `block` (its place in the flow) in turn `turn`, from `start` (ms)."""

    block: int
    turn: int
    start: float


def retimed(flow: Flow, sequence: Sequence[tuple[int, int]]) -> list[BlockInstance]:
    """Starts every (block, turn) of `sequence` as soon as its ranks and needs allow; turns of a block ascend."""
    rows: list[list[int]] = [[] for _ in range(flow.num_ranks)]
    place, size = [], [0] * len(flow.blocks)
    for index, _ in sequence:
        place.append(size[index])
        size[index] += 1
        for rank in flow.blocks[index].ranks:
            rows[rank].append(index)
    network, irregular = of_queues(
        size,
        [block.duration for block in flow.blocks],
        [block.ranks for block in flow.blocks],
        [[(need.block, need.delay, 1, 1) for need in block.needs] for block in flow.blocks],
        flow.num_ranks,
    )
    start = Timer(network, irregular).time(list(chain(*rows))).start
    first = network.op_first
    return [BlockInstance(b, turn, start[first[b] + at]) for (b, turn), at in zip(sequence, place, strict=True)]


def makespan(flow: Flow, timed: Sequence[BlockInstance]) -> float:
    """Last end (ms); the first start is at 0."""
    return max(one.start + flow.blocks[one.block].duration for one in timed)


@dataclass(frozen=True)
class TesselFound:
    """What the search has come to.

    Attributes:
        repetend: with the shortest period found; None where there was no time for one.
        is_shortest: whether the search ended by itself.
        num_tried: ways that the solver was asked about. num_ways: of all there are with as many microbatches as
            stages of the chain.
        seconds: of the search.
    """

    repetend: Repetend | None
    is_shortest: bool
    num_tried: int
    num_ways: int
    seconds: float

    def makespan(self, num_microbatches: int) -> float | None:
        """Milliseconds of so many microbatches in the repetend's order; None without one."""
        if self.repetend is None:
            return None
        flow = self.repetend.flow
        return makespan(flow, retimed(flow, self.repetend.sequence([num_microbatches] * len(flow.blocks))))


@dataclass(frozen=True)
class Whole:
    """Durations of blocks and of the messages before them, as whole numbers of `unit` ms."""

    unit: float
    durations: tuple[int, ...]
    delays: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, flow: Flow) -> Whole:
        times = [block.duration for block in flow.blocks]
        unit = 1.0 if all(each == round(each) for each in times) else max(flow.work) / UNITS
        late = tuple(tuple(round(need.delay / unit) for need in block.needs) for block in flow.blocks)
        return cls(unit, tuple(max(1, round(each / unit)) for each in times), late)


def flow_of(costs: ps.Costs, links: ps.Links, num_ranks: int) -> Flow:
    """One microbatch through a stage that all ranks share, one stage per rank, and another shared one, and back."""
    everyone = tuple(range(num_ranks))
    hosts = [everyone, *((rank,) for rank in everyone), everyone]
    forward = [("F", stage) for stage in range(num_ranks + 2)]
    chain = [*forward, *(("B", stage) for _, stage in reversed(forward))]
    blocks: list[Block] = []
    for place, (kind, stage) in enumerate(chain):
        needs: tuple[BlockDependency, ...] = ()
        if place:
            first, *others = hosts[chain[place - 1][1]]  # what several ranks share is there already on each
            late = 0.0 if others else max((links.delay(first, b) for b in hosts[stage] if b != first), default=0.0)
            needs = (BlockDependency(place - 1, late),)
        blocks.append(Block(f"{stage}{kind}", hosts[stage], costs.duration(kind, stage), needs))
    return Flow(tuple(blocks))


def ways(num_blocks: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """The microbatch of each block of a chain, from the highest down to 0, every one of them at some block."""
    for drops in combinations(range(1, num_blocks), num_microbatches - 1):
        yield tuple(sum(at > place for at in drops) for place in range(num_blocks))


def search(flow: Flow, seconds: float) -> TesselFound:
    """The repetend with the shortest period, as far as `seconds` last."""
    began = time.perf_counter()
    units = Whole.of(flow)
    least = max(sum(units.durations[b] for b in row) for row in flow.on_rank)
    best: tuple[int, tuple[float, ...]] | None = None
    tried = 0
    num_blocks = len(flow.blocks)
    num_ways = sum(comb(num_blocks - 1, count) for count in range(num_blocks))

    def ended(is_shortest: bool) -> TesselFound:
        repetend = None if best is None else Repetend(flow, best[0] * units.unit, best[1])
        return TesselFound(repetend, is_shortest, tried, num_ways, time.perf_counter() - began)

    for num_microbatches in range(1, num_blocks + 1):
        for way in ways(num_blocks, num_microbatches):
            left = seconds - (time.perf_counter() - began)
            if left <= 0:
                return ended(False)
            tried += 1
            found = _shortest(flow, units, way, least, None if best is None else best[0], left)
            if found is not None:
                period, positions = found
                starts = (at + (num_microbatches - 1 - of) * period for at, of in zip(positions, way, strict=True))
                best = period, tuple(start * units.unit for start in starts)
                if period <= least:
                    return ended(True)
    return ended(True)


def _shortest(
    flow: Flow, units: Whole, way: tuple[int, ...], least: int, below: int | None, seconds: float
) -> tuple[int, list[int]] | None:
    """The shortest period of a way and where its blocks start, if it is below another; None where there is none."""
    from ortools.sat.python import cp_model as sat

    model = sat.CpModel()
    horizon = sum(units.durations) + sum(map(sum, units.delays))
    most = horizon if below is None else below - 1
    if most < least:
        return None
    period = model.new_int_var(least, most, "period")
    starts = [model.new_int_var(0, horizon, block.name) for block in flow.blocks]
    intervals = [
        model.new_fixed_size_interval_var(start, length, block.name)
        for start, length, block in zip(starts, units.durations, flow.blocks, strict=True)
    ]
    for row in flow.on_rank:
        model.add_no_overlap([intervals[b] for b in row])
        for a in row:
            for b in row:
                if a != b:  # the next turn begins on a rank when this one has ended there
                    model.add(starts[a] + units.durations[a] <= starts[b] + period)
    for b, block in enumerate(flow.blocks):
        for need, late in zip(block.needs, units.delays[b], strict=True):
            turns = way[need.block] - way[b]
            model.add(starts[b] + turns * period >= starts[need.block] + units.durations[need.block] + late)
    model.minimize(period)
    solver = sat.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(model) not in (sat.OPTIMAL, sat.FEASIBLE):
        return None
    return solver.value(period), [solver.value(start) for start in starts]
