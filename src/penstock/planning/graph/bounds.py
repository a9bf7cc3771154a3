"""Lower bounds of problems of any stages: no schedule, however clever, ends sooner.

    paths      before an op starts, and after it has ended, the longest path over what it needs, the order within
               queues, and memory: a forward waits for an older microbatch to be freed
    Jackson    for each row, all its ops between these heads and tails, cut into pieces at will (Jackson's
               preemptive schedule)
    idle       the work of a row, plus the time it must stand idle (`idle_bound`), where ops need ops of their number

A forward's wait for memory is that of `planning.bounds`: with what its stage holds, and, where all have the same
microbatches, what stages on the same row hold from which a path leads to it.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.engine.needs import last_needed
from penstock.planning.bounds import lags
from penstock.planning.graph.idle_bound import idle_bound
from penstock.planning.graph.problem import GraphProblem
from penstock.planning.op_arrays import OpArrays, paths

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
