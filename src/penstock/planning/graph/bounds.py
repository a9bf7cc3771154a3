"""Lower bounds of problems of any stages: no schedule, however clever, ends sooner.

    paths      before an op starts, and after it has ended, the longest path over what it needs, the order within
               queues, and memory: a forward waits for an older microbatch to be freed
    Jackson    for each row, all its ops between these heads and tails, cut into pieces at will (Jackson's
               preemptive schedule)
    idle       the work of a row, plus the time it must stand idle, where ops need ops of their number

A forward's wait for memory is that of `planning.bounds`: with what its stage holds, and, where all have the same
microbatches, what stages on the same row hold from which a path leads to it.

For the idle time every queue counts once, as the ops of one microbatch; rows may share queues.

**Forced idle.** Follow one path of needs and, on it, two queues of row r that are neighbours among those of row r,
with others between them:

    a (on r) -> d1 -> d2 -> ... -> c (on r)          d1, d2, ... run elsewhere

Let m be the microbatch that is the first one to reach c. While its d's run, no microbatch has begun c, so r can run
only what does not follow from c (its *fillers*), and while d_k runs, only fillers that have no row in common with it:
an op shared by all ranks, as the embedding is, never fills. Where r has no such filler it stands idle for the length
of d_k. Otherwise it does so at least for what the fillers of all microbatches together leave over. The waits before
the first c of one place and before that of a later place on the path never overlap, so they add up.

The same holds seen from the end: after the last microbatch has left a, r runs only what does not lead to a. Waits
before a first c and after a last a do not overlap if c comes no later on the path than a. So for each path and each
place where it is split:

    makespan >= work of r + idle before (up to the split) + idle after (from the split on)

For Tessel's MLLM flow on p ranks the last rank gives 8N + (p - 1) + 3(p - 1), which is what its schedules take.

**Barriers.** While an op of all rows runs nothing else does. Cut the time they take out of any schedule, and what is
left is a schedule of the other ops: its bound and their time add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np

from penstock.engine.needs import last_needed
from penstock.planning.bounds import OpArrays, lags, paths
from penstock.planning.graph.problem import GraphProblem

_MOST_QUEUES = 250
"""Queues above which the bound that counts idle time takes longer than it is worth."""


def lower_bound(problem: GraphProblem, value: float = math.inf) -> float:
    """The best bound on the makespan (ms).

    Args:
        value: that of some order within the caps (ms); a bound that meets it is the best, whatever the others say.
    """
    size, queues = problem.network.size.tolist(), range(problem.graph.num_queues)
    needs = [problem.needs(q) for q in queues]
    one_by_one = all(
        before == after == 1 and size[source] == size[q] > 0 for q in queues for source, _, before, after in needs[q]
    )
    bound = 0.0
    if one_by_one and len(size) <= _MOST_QUEUES:
        rows, duration = [problem.graph.hosts(q) for q in queues], problem.network.duration.tolist()
        bound = idle_bound(rows, duration, size, [[need[:2] for need in found] for found in needs])
    return bound if bound >= value else max(bound, op_arrays(problem).jackson_bound())


def op_arrays(problem: GraphProblem) -> OpArrays:
    """The ops one by one: needs within queues and between them, and forwards that wait for memory."""
    network, waits = problem.network, memory_waits(problem)
    op_first, duration = network.op_first.tolist(), np.repeat(network.duration, network.size)
    rows: list[list[int]] = [[] for _ in problem.cap]
    needs: list[tuple[int, int, float]] = []
    for q, size in enumerate(network.size.tolist()):
        for row in problem.graph.hosts(q):
            rows[row] += range(op_first[q], op_first[q + 1])
        own_needs = problem.needs(q)
        for number in range(size):
            found = [(s, last_needed(number, *group), delay) for s, delay, *group in own_needs]
            found += [(source, number - lag, 0.0) for source, lag in ((q, 1), *waits[q])]
            needs += [(op_first[s] + of, op_first[q] + number, delay) for s, of, delay in found if of >= 0]
    source, to = np.array([need[:2] for need in needs], np.int64).reshape(-1, 2).T
    delay = np.array([need[2] for need in needs])
    head, tail = paths(duration, source, to, delay)
    takes, gives = (np.repeat(each, network.size) for each in (problem.takes, problem.gives))
    on_row = [np.array(row, np.int64) for row in rows]
    return OpArrays(duration, head, tail, on_row, source, to, delay, takes, gives, problem.cap.tolist())


def memory_waits(problem: GraphProblem) -> list[list[tuple[int, int]]]:
    """Per queue of forwards, (queue, lag): op j cannot start before op j - lag of that queue has ended."""
    graph = problem.graph
    number = {label: q for q, label in enumerate(graph.labels)}
    above = _ancestors(problem)
    found: list[list[tuple[int, int]]] = [[] for _ in graph.labels]
    # Registered ops may give memory back whenever they run.
    plain = not any(problem.gives[q] for q, (_, kind, _) in enumerate(graph.labels) if kind not in ("B", "I", "W"))
    for q, (pipeline, kind, stage) in enumerate(graph.labels):
        if kind != "F" or not plain:
            continue
        back = number.get((pipeline, "I", stage), number.get((pipeline, "B", stage)))
        weight = number.get((pipeline, "W", stage))
        held, late = float(problem.takes[q]), 0.0 if weight is None else float(problem.gives[weight])
        for row in graph.hosts(q):
            before = sum(
                float(problem.takes[number[pipeline, "F", other]])
                for other in above[stage]
                if row in graph.hosts(number[pipeline, "F", other])
            )
            steps = lags(held, before, late, float(problem.cap[row]))
            for freed, lag in zip((back, weight), steps, strict=True):
                if freed is not None and lag is not None and lag < problem.network.size[q]:
                    found[q].append((freed, lag))
    return found


def _ancestors(problem: GraphProblem) -> list[set[int]]:
    """Of each stage those before it on some path, where all stages have the same microbatches; else none.

    The backward of each comes after the stage's own, so a microbatch that has not run that holds them all.
    """
    stages = problem.graph.stage_graph
    num_stages = problem.graph.placement.num_stages
    if stages is None:
        return [set(range(stage)) for stage in range(num_stages)]
    above: list[set[int]] = [set() for _ in range(num_stages)]
    if len(set(stages.num_microbatches)) > 1:
        return above
    changed = True
    while changed:
        changed = False
        for stage in range(num_stages):
            more = set(stages.sources[stage]).union(*(above[source] for source in stages.sources[stage]))
            if more - above[stage]:
                above[stage] |= more
                changed = True
    return above


Needed = tuple[int, float]
"""A queue that another needs, and ms until its message is there."""
Way = tuple[float, float]
"""ms on a path between two queues of a row: those for which the row stands idle, and those that it may fill."""


class _Queue(NamedTuple):
    """A queue: its rows, ms of an op, how many ops it has, and what each of them needs of the same microbatch."""

    rows: frozenset[int]
    duration: float
    size: int
    needs: tuple[Needed, ...]


def idle_bound(
    rows: Sequence[Sequence[int]], duration: Sequence[float], size: Sequence[int], needs: Sequence[Sequence[Needed]]
) -> float:
    """ms that no schedule ends before.

    Args:
        rows, duration, size: of each queue, the rows that run it together, ms of an op, and how many ops it has.
        needs: of each queue, (queue, delay in ms) of all that an op needs. An op needs the op of
            the same number, and both queues have equally many.
    """
    order = list(
        TopologicalSorter({q: [source for source, _ in found] for q, found in enumerate(needs)}).static_order()
    )
    place = {q: k for k, q in enumerate(order)}
    queues = [
        _Queue(frozenset(rows[q]), duration[q], size[q], tuple((place[source], late) for source, late in needs[q]))
        for q in order
    ]
    every = frozenset().union(*(queue.rows for queue in queues))
    barriers = {q for q, queue in enumerate(queues) if queue.rows == every}
    bound = _work_and_idle(queues, every)
    if len(every) > 1 and 0 < len(barriers) < len(queues):
        standing = sum(queues[q].duration * queues[q].size for q in barriers)
        bound = max(bound, standing + _work_and_idle(_without(queues, barriers), every))
    return bound


def _work_and_idle(queues: list[_Queue], rows: frozenset[int]) -> float:
    """The most, over rows, of the work of the row and the time that it must stand idle (ms)."""
    last, bound = len(queues) - 1, 0.0
    turned = _turned(queues)
    follows, precedes = _follows(queues), _follows(turned)
    for row in rows:
        mine = [q for q, queue in enumerate(queues) if row in queue.rows]
        before, after = _idle_before(queues, follows, row), _idle_before(turned, precedes, row)
        work = sum(queues[q].duration * queues[q].size for q in mine)
        bound = max(bound, work + max((before[q] + after[last - q] for q in mine), default=0.0))
    return bound


def _turned(queues: list[_Queue]) -> list[_Queue]:
    """The same seen from the end: needs turned round."""
    last = len(queues) - 1
    needs: list[list[Needed]] = [[] for _ in queues]
    for q, queue in enumerate(queues):
        for source, late in queue.needs:
            needs[last - source].append((last - q, late))
    return [queue._replace(needs=tuple(needs[k])) for k, queue in enumerate(reversed(queues))]


def _without(queues: list[_Queue], left_out: set[int]) -> list[_Queue]:
    """The queues without some: what needed them needs what they needed. Delays may lie in the gaps: none."""
    kept: list[_Queue] = []
    sources: list[set[int]] = []
    for q, queue in enumerate(queues):
        needed = {source for before, _ in queue.needs for source in sources[before]}
        sources.append(needed if q in left_out else {len(kept)})
        if q not in left_out:
            kept.append(queue._replace(needs=tuple((source, 0.0) for source in sorted(needed))))
    return kept


def _follows(queues: list[_Queue]) -> list[set[int]]:
    """Of each queue, itself and all that needs it, directly or through others."""
    result = [{q} for q in range(len(queues))]
    for q in reversed(range(len(queues))):
        for source, _ in queues[q].needs:
            result[source] |= result[q]
    return result


def _idle_before(queues: list[_Queue], follows: list[set[int]], row: int) -> list[float]:
    """Per queue of a row, the most idle time that lies before it on any path; 0 for queues elsewhere."""
    idle = [0.0] * len(queues)
    mine = [q for q, queue in enumerate(queues) if row in queue.rows]
    for c in mine:
        fillers = [q for q in mine if q not in follows[c] and queues[q].duration > 0]
        for a, ways in _ways_to(queues, c, row, fillers).items():
            # The microbatch whose way this is has those behind it that follow from a.
            room = sum(queues[q].duration * (queues[q].size - (a is not None and a in follows[q])) for q in fillers)
            gap = max(forced + max(0.0, open_time - room) for forced, open_time in ways)
            idle[c] = max(idle[c], gap + (idle[a] if a is not None else 0.0))
    return idle


def _ways_to(queues: list[_Queue], c: int, row: int, fillers: list[int]) -> dict[int | None, list[Way]]:
    """By the queue of a row (None: the start) before c on each path, what lies between them.

    Of all the paths the one with the most forced and the one with the most time in all are kept.
    """
    onward: dict[int, list[Way]] = {c: [(0.0, 0.0)]}
    found: dict[int | None, list[Way]] = {}
    for d in range(c, -1, -1):
        if d not in onward:
            continue
        ways = onward.pop(d)
        if d != c:
            idle = all(queues[d].rows & queues[q].rows for q in fillers)
            ways = [_add(way, queues[d].duration, idle) for way in ways]
        if not queues[d].needs:
            found[None] = _longest([*found.get(None, ()), *ways])
        for source, late in queues[d].needs:
            delayed = [_add(way, late, not fillers) for way in ways]
            if row in queues[source].rows:
                found[source] = _longest([*found.get(source, ()), *delayed])
            else:
                onward[source] = _longest([*onward.get(source, ()), *delayed])
    return found


def _add(way: Way, time: float, idle: bool) -> Way:
    return (way[0] + time, way[1]) if idle else (way[0], way[1] + time)


def _longest(ways: list[Way]) -> list[Way]:
    return [max(ways), max(ways, key=sum)] if len(ways) > 1 else ways
