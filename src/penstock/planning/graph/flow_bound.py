"""Lower bounds on the makespan of a flow run for many microbatches, shared blocks and memory caps counted.

A rank is busy for its work, and it also stands idle while it waits for its first B, say, or after its last F.
How long is what this file proves, rank by rank; none of it assumes a periodic schedule.

**Forced idle.** Follow one path of needs through the flow and, on it, two blocks of rank r that are neighbours
among those of rank r, with others between them:

    a (on r) -> d1 -> d2 -> ... -> c (on r)          d1, d2, ... run elsewhere

Let m be the turn (microbatch) that is the first one to reach c. While its d's run, no turn has begun c, so r
can run only what does not follow from c (its *fillers*), and while d_k runs, only fillers that have no rank in
common with it: a block shared by all ranks, as the embedding is, never fills. Where r has no such filler it
stands idle for the length of d_k; otherwise at least for what the fillers of all turns together, or of
as many as memory admits, leave over. The waits before the first c of one place and before that of a later
place on the path never overlap, so they add up.

The same holds seen from the end: after the last turn has left a, r runs only what does not lead to a.
Waits before a first c and after a last a don't overlap if c comes no later on the path than a. So for each path
and each place where it is split:

    makespan >= work of r + idle before (up to the split) + idle after (from the split on)

For Tessel's MLLM flow on p ranks the last rank gives 8N + (p - 1) + 3(p - 1), which is what its schedules take.

**Round trips.** A cap lets at most M turns be between the block that takes an activation and the one that
gives it back. M tracks share N such trips, so one track has ceil(N / M) of them, one after the other.

**Barriers.** While an op of all ranks runs nothing else does. Cut the time they take out of any schedule, and what
is left is a schedule of the other blocks: its bound and their time add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.engine.tolerance import EPSILON
from penstock.planning.graph.flow import Block, BlockDependency, Flow
from penstock.schedule import ScheduleError


@dataclass(frozen=True)
class FlowBound:
    """What no schedule of a flow can undercut.

    Attributes:
        makespan: ms.
        reason: which argument gave it, for people.
        period: ms a turn that the steady state takes at least.
    """

    makespan: float
    reason: str
    period: float


def flow_bound(flow: Flow, counts: Sequence[int], caps: Sequence[float] | None = None) -> FlowBound:
    """The best lower bound of this file on running block b in `counts[b]` turns.

    Args:
        caps: most activations each rank may hold, in the units of the blocks; None for no cap.

    Raises:
        ScheduleError: a cap below what one turn holds.
    """
    caps = [math.inf] * flow.num_ranks if caps is None else caps
    found = _direct(flow, counts, caps)
    barriers = {b for b, block in enumerate(flow.blocks) if len(block.ranks) == flow.num_ranks}
    if flow.num_ranks > 1 and 0 < len(barriers) < len(flow.blocks):
        standing = sum(flow.blocks[b].duration * counts[b] for b in barriers)
        kept = [count for b, count in enumerate(counts) if b not in barriers]
        rest = _direct(_without(flow, barriers), kept, caps)
        each = sum(flow.blocks[b].duration for b in barriers)
        reason = f"ops of all ranks take {standing:g} ms, and besides, {rest.reason}"
        period = max(found.period, rest.period + each)
        total, reason = max((found.makespan, found.reason), (rest.makespan + standing, reason))
        return FlowBound(total, reason, period)
    return found


def _direct(flow: Flow, counts: Sequence[int], caps: Sequence[float]) -> FlowBound:
    period = max(flow.work)
    found = [(flow.latency, "one turn alone takes that long")]
    fronts, backs = _ForcedIdleTime(flow, counts, caps), _ForcedIdleTime(flow.reversed(), counts[::-1], caps)
    last = len(flow.blocks) - 1
    for rank, row in enumerate(flow.on_rank):
        if not row:
            continue
        busy = sum(flow.blocks[b].duration * counts[b] for b in row)
        before, after = fronts.before(rank), backs.before(rank)
        idle = max(before[b] + after[last - b] for b in row)
        found.append((busy + idle, f"rank {rank} works {busy:g} ms and stands idle for at least {idle:g}"))
    for trip in round_trips(flow, caps):
        period = max(period, trip.duration / trip.num_held)
        turns = math.ceil(counts[trip.first] / trip.num_held)
        ends = f"{flow.blocks[trip.first].name} to {flow.blocks[trip.last].name}"
        reason = f"{turns} round trips of {trip.duration:g} ms from {ends}, {trip.num_held} turns at a time"
        found.append((trip.head + turns * trip.duration + trip.tail, reason))
    best, reason = max(found)
    return FlowBound(best, reason, period)


def _without(flow: Flow, left_out: set[int]) -> Flow:
    """The flow without some blocks: what needed them needs what they needed. Delays may lie in the gaps: none."""
    place: dict[int, int] = {}
    blocks: list[Block] = []
    sources: list[set[int]] = []
    for b, block in enumerate(flow.blocks):
        needed = {source for need in block.needs for source in sources[need.block]}
        if b in left_out:
            sources.append(needed)
            continue
        sources.append({b})
        place[b] = len(blocks)
        blocks.append(replace(block, needs=tuple(BlockDependency(place[source]) for source in sorted(needed))))
    return Flow(tuple(blocks))


class _ForcedIdleTime:
    """Idle time forced on a rank before it first reaches a block: see the file's head."""

    def __init__(self, flow: Flow, counts: Sequence[int], caps: Sequence[float]) -> None:
        self.flow, self.counts, self.caps = flow, counts, caps
        self.follows = follows(flow)

    def before(self, rank: int) -> list[float]:
        """Per block of `rank`, the most idle time that lies before it on any path; 0 for blocks elsewhere."""
        idle = [0.0] * len(self.flow.blocks)
        for c in self.flow.on_rank[rank]:
            fillers = [b for b in self.flow.on_rank[rank] if b not in self.follows[c] and self._duration(b) > 0]
            for a, ways in self._ways_to(c, rank, fillers).items():
                room = sum(self._duration(b) * self._runs(b, a, c, rank) for b in fillers)
                gap = max(forced + max(0.0, open_time - room) for forced, open_time in ways)
                idle[c] = max(idle[c], gap + (idle[a] if a is not None else 0.0))
        return idle

    def _duration(self, block: int) -> float:
        return self.flow.blocks[block].duration

    def _ways_to(self, c: int, rank: int, fillers: list[int]) -> dict[int | None, list[tuple[float, float]]]:
        """For the block of `rank` (None: the flow's start) before c on each path: (forced, open) ms between them.

        Of all the paths the one with the most forced and the one with the most time in all are kept.
        """
        blocks = self.flow.blocks
        onward: dict[int, list[tuple[float, float]]] = {c: [(0.0, 0.0)]}
        found: dict[int | None, list[tuple[float, float]]] = {}
        for d in range(c, -1, -1):
            if d not in onward:
                continue
            ways = onward.pop(d)
            if d != c:
                idle = all(set(blocks[d].ranks) & set(blocks[b].ranks) for b in fillers)
                ways = [_add(way, blocks[d].duration, idle) for way in ways]
            if not blocks[d].needs:
                found[None] = _longest([*found.get(None, ()), *ways])
            for need in blocks[d].needs:
                delayed = [_add(way, need.delay, not fillers) for way in ways]
                if rank in blocks[need.block].ranks:
                    found[need.block] = _longest([*found.get(need.block, ()), *delayed])
                else:
                    onward[need.block] = _longest([*onward.get(need.block, ()), *delayed])
        return found

    def _runs(self, b: int, a: int | None, c: int, rank: int) -> float:
        """Most runs of filler b in the gap between a and the first c."""
        block = self.flow.blocks[b]
        given_back = sum(
            self.flow.blocks[x].releases
            for x in self.flow.on_rank[rank]
            if x in self.follows[b] and x not in self.follows[c]
        )
        kept = block.acquires - given_back
        runs = float(self.counts[b])
        if kept > EPSILON and self.caps[rank] < math.inf:
            runs = min(runs, math.floor(self.caps[rank] / kept + EPSILON))
        # The turn whose way this is has b behind it.
        return runs - 1 if a is not None and a in self.follows[b] else runs


def _add(way: tuple[float, float], time: float, idle: bool) -> tuple[float, float]:
    return (way[0] + time, way[1]) if idle else (way[0], way[1] + time)


def _longest(ways: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [max(ways), max(ways, key=sum)] if len(ways) > 1 else ways


def follows(flow: Flow) -> list[set[int]]:
    """`follows[b]`: b and all that needs it, directly or through others."""
    result = [{b} for b in range(len(flow.blocks))]
    for b in reversed(range(len(flow.blocks))):
        for need in flow.blocks[b].needs:
            result[need.block] |= result[b]
    return result


@dataclass(frozen=True)
class RoundTrip:
    """From a block that takes an activation to one of the same rank that gives some of it back.

    Attributes:
        first, last: the two blocks.
        duration: ms from the start of the one to the end of the other, at least.
        num_held: most turns that may be on the way at once.
        head, tail: ms before and after, at least.
    """

    first: int
    last: int
    duration: float
    num_held: int
    head: float
    tail: float


def round_trips(flow: Flow, caps: Sequence[float]) -> list[RoundTrip]:
    """All round trips that the caps bound.

    Raises:
        ScheduleError: a cap below what one turn holds.
    """
    after = follows(flow)
    heads, tails = _heads(flow), _heads(flow.reversed())[::-1]
    trips = []
    for rank, row in enumerate(flow.on_rank):
        if caps[rank] == math.inf:
            continue
        for first in row:
            acquired = flow.blocks[first].acquires
            if acquired <= 0:
                continue
            if acquired > caps[rank] + EPSILON:
                raise ScheduleError(
                    f"rank {rank} may hold {caps[rank]:g} activations, but one {flow.blocks[first].name} keeps "
                    f"{acquired:g} (rule: memory); raise the cap or cut the model into more stages",
                    rule="memory",
                    rank=rank,
                )
            for last in row:
                if last == first or last not in after[first] or flow.blocks[last].releases <= 0:
                    continue
                sooner = sum(flow.blocks[x].releases for x in row if x in after[first] and x not in after[last])
                kept = acquired - sooner
                if kept > EPSILON:
                    way = _longest_way(flow, first, last)
                    num_held = math.floor(caps[rank] / kept + EPSILON)
                    trips.append(RoundTrip(first, last, way, num_held, heads[first], tails[last]))
    return trips


def _heads(flow: Flow) -> list[float]:
    """The earliest start of every block (ms)."""
    heads: list[float] = []
    for block in flow.blocks:
        heads.append(
            max((heads[n.block] + flow.blocks[n.block].duration + n.delay for n in block.needs), default=0.0)
        )
    return heads


def _longest_way(flow: Flow, first: int, last: int) -> float:
    """Milliseconds from the start of `first` to the end of `last`, which follows it, at least."""
    ends = {first: flow.blocks[first].duration}
    for b in range(first + 1, last + 1):
        before = [ends[n.block] + n.delay for n in flow.blocks[b].needs if n.block in ends]
        if before:
            ends[b] = max(before) + flow.blocks[b].duration
    return ends[last]
