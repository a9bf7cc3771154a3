"""Lower bounds of problems of any stages: no schedule, however clever, ends sooner.

    paths      before an op starts, and after it has ended, the longest path over what it needs, the order within
               queues, and memory: a forward waits for an older microbatch to be freed
    Jackson    for each row, all its ops between these heads and tails, cut into pieces at will (Jackson's
               preemptive schedule)
    idle       the work of a row, plus the time it must stand idle (`periodic.bound`)

A forward's wait for memory is that of `planning.bounds`: with what its stage holds, and, where all have the same
microbatches, what stages on the same row hold from which a path leads to it.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.engine.needs import last_needed
from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.planning.graph.flow_bound import flow_bound
from penstock.planning.graph.problem import GraphProblem
from penstock.planning.jackson import preemptive_span

_MOST_BLOCKS = 250
"""Blocks of a turn above which the bound that counts idle time takes longer than it is worth."""


def lower_bound(problem: GraphProblem, sequence: Array, value: float = math.inf) -> float:
    """The best bound on the makespan (ms).

    Args:
        sequence: any within the caps.
        value: its makespan (ms); a bound that meets it is the best, whatever the others say.
    """
    bound, flow = 0.0, problem.flow
    if flow.is_whole and min(flow.counts) > 0 and len(flow.flow.blocks) <= _MOST_BLOCKS:
        caps = problem.cap[: flow.flow.num_ranks].tolist()
        bound = flow_bound(flow.flow, flow.counts, caps).makespan
    return bound if bound >= value else max(bound, jackson_bound(problem, sequence))


def jackson_bound(problem: GraphProblem, sequence: Array) -> float:
    """The largest over rows of Jackson's preemptive schedule, between heads and tails."""
    heads, tails = heads_and_tails(problem, sequence)
    on_row: list[list[int]] = [[] for _ in range(problem.graph.num_rows)]
    duration = np.repeat(problem.network.duration, problem.network.size)
    for q in range(problem.graph.num_queues):
        for r in problem.graph.hosts(q):
            on_row[r] += range(int(problem.network.op_first[q]), int(problem.network.op_first[q + 1]))
    bound = float((heads + duration + tails).max())
    for ops in on_row:
        bound = max(bound, preemptive_span(heads[ops].tolist(), duration[ops].tolist(), tails[ops].tolist()))
    return bound


def heads_and_tails(problem: GraphProblem, sequence: Array) -> tuple[Array, Array]:
    """Per op, ms before it can start at best, and ms that must follow its end."""
    network = problem.network
    duration = network.duration.tolist()
    op_first = network.op_first.tolist()
    waits = memory_waits(problem)
    needs = [problem.needs(q) for q in range(problem.graph.num_queues)]
    heads, tails = np.zeros((2, problem.num_ops))
    edges: list[tuple[int, int, float]] = []
    order = problem.ops_of(sequence).tolist()
    queues = np.asarray(sequence).tolist()
    for q, op in zip(queues, order, strict=True):
        j = op - op_first[q]
        found = [
            (op_first[source] + last_needed(j, before, after), duration[source], delay)
            for source, delay, before, after in needs[q]
        ]
        if j > 0:
            found.append((op - 1, duration[q], 0.0))
        found += [(op_first[back] + j - lag, duration[back], 0.0) for back, lag in waits[q] if j >= lag]
        for source, long, delay in found:
            heads[op] = max(heads[op], heads[source] + long + delay)
            edges.append((source, op, delay))
    of_op = np.repeat(network.duration, network.size)
    for source, op, delay in reversed(edges):
        tails[source] = max(tails[source], tails[op] + of_op[op] + delay)
    return heads, tails


def memory_waits(problem: GraphProblem) -> list[list[tuple[int, int]]]:
    """Per queue of forwards, (queue, lag): op j cannot start before op j - lag of that queue has ended."""
    graph = problem.graph
    number = {label: q for q, label in enumerate(graph.labels)}
    above = _ancestors(problem)
    found: list[list[tuple[int, int]]] = [[] for _ in graph.labels]
    # Registered ops may give memory back whenever they run.
    plain = not any(problem.gives[q] for q, (_, kind, _) in enumerate(graph.labels) if kind not in ("B", "I", "W"))
    for q, (pipeline, kind, stage) in enumerate(graph.labels):
        if kind != "F" or problem.takes[q] <= 0 or not plain:
            continue
        back = number.get((pipeline, "I", stage), number.get((pipeline, "B", stage)))
        weight = number.get((pipeline, "W", stage))
        for row in graph.hosts(q):
            cap = float(problem.cap[row]) * (1 + EPSILON)
            if math.isinf(cap):
                continue
            held = sum(
                float(problem.takes[number[pipeline, "F", other]])
                for other in above[stage]
                if row in graph.hosts(number[pipeline, "F", other])
            )
            room = cap / (held + float(problem.takes[q]))
            if back is not None and room < problem.network.size[q]:
                found[q].append((back, max(1, math.floor(room))))
            if weight is not None and problem.gives[weight] > 0:
                kept = float(problem.gives[weight] / problem.takes[q])
                behind = 1 + math.floor((cap / float(problem.takes[q]) - 1) / kept + EPSILON)
                if behind < problem.network.size[q]:
                    found[q].append((weight, max(1, behind)))
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
