"""Separates gradients to fill bubbles: FlexPipe's gradient separation (section 5.2, Figure 10), for any schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.cost import Costs, Links
from penstock.dispatch import Graph
from penstock.engine.sweep import Timer
from penstock.engine.tolerance import slack
from penstock.schedule import Op, Schedule, ScheduleError, check, require_no_updates
from penstock.schedule.async_ops import require_no_streams
from penstock.simulation.lowered import Memory, check_fits, lowered, memory_of

_HORIZONS = 4
"""How many makespans are aimed at, from the one that no order of the weight gradients can beat."""


def separate_gradients(
    schedule: Schedule,
    costs: Costs | None = None,
    links: Links | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """Splits the backwards that hold up others: I runs early, W goes into a later bubble.

        before, 15 ms (B takes two columns)
        rank 0 | F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --
        rank 1 | .  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
        rank 2 | .  .  F0 B0 -- F1 B1 -- F2 B2 --

        after, 11 ms
        rank 0 | F0 F1 F2 .  .  B0 -- B1 -- B2 --
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2

    A bubble stands before an op that is blocked. Whatever it waited for is followed back, along messages and
    along the rows, and every B on the way is split; then the schedule is timed again without the weight halves,
    until no bubble has a B behind it. The weight halves are put into the bubbles that are left, where an op may
    be kept waiting as long as that does not make the whole longer. Splits that bought nothing are undone, so all
    other Bs stay whole.

    Decided beyond the paper, which gives the idea and a figure, on a chain of actors with even times:

    - any costs and links: bubbles are those of the timed schedule, not empty cells of a grid;
    - any schedule: several stages per rank, several pipelines, stage graphs; other ops stay in their order;
      backwards that several ranks run together stay whole, and so do those that ops of your own come after, which
      need their gradients complete, and those of pairs, which stay pairs;
    - the chain is followed through rows as well as through messages, to the start of the step: what a rank did
      before is as much a cause as what it waited for;
    - a weight half need not fit its bubble exactly: it may end as late as the next op may start;
    - the backwards of a stage add to the weights' gradients in the order they had, so sums of floats stay the same
      (a B behind a W that waits is split too);
    - memory: with `memory_limit`, or the schedule's own limit, W runs before the forward that needs its room;
    - the result is never longer than what came in, in the frozen order with decoupled messages; where nothing is
      gained the schedule comes back as it was.

    Args:
        schedule: with full backwards.
        costs: per stage; by default F = I = W = 1 ms for each rank's share of the model (`Costs.assumed`).
        links: delays; by default none.
        memory_limit: most a rank may hold, in the units of the costs' activations; one for all or one per rank.
            The schedule's own limit, in stage activations, holds besides.

    Raises:
        ScheduleError: the schedule is not valid, is itself above the limit, or has updates as ops.
        CostError: costs for another number of stages, or a link between ranks that are not there.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("1f1b", 3, 3)
        >>> split = ps.passes.separate_gradients(s)
        >>> ps.simulate(s).makespan, ps.simulate(split).makespan
        (15.0, 11.0)
    """
    require_no_updates(schedule, "separate_gradients moves weight gradients over time without regard to them")
    check(schedule)
    costs, links = costs or Costs.assumed(schedule.num_ranks, schedule.placement), links or Links()
    net = TimedOps(schedule, costs, links)
    memory = memory_of(schedule, net.graph, costs, memory_limit)
    check_fits(schedule, net.graph, memory, "separating gradients lowers no memory: see penstock.passes.recompute")
    whole = {stage for kind, stage in (need.before for need in schedule.graph.needs) if kind == "B"}
    rows = _Separation(costs, net, memory, whole).best_rows()
    if rows is None:
        return schedule
    result = merged(replace(schedule, order=tuple(map(tuple, rows))), costs, links)
    check(result)
    return result


class TimedOps:
    """The ops of a schedule, to be timed many times under different durations.

    An op that several ranks run together is one node with a place in each of their rows: the first of its numbers.

    Attributes:
        graph: the schedule, lowered.
        durations: of each node, ms.
        node_of: the node of each op.
        nodes: all nodes, each after all it waits for.
        needs: of each node, the nodes that it needs, each with how late their message is (ms).
        before: `needs`, and the node before it in each row, with 0 ms.
        after: the same from the other side: the nodes that need it, and the node after it in each row.

    Raises:
        CostError: costs for another number of stages, or a link between ranks that are not there.
        ScheduleError: an op is missing, or the ranks wait for one another.
    """

    def __init__(self, schedule: Schedule, costs: Costs, links: Links) -> None:
        links.check_ranks(schedule.num_ranks)
        require_no_streams(schedule, "this pass times what ranks run themselves")
        order = lowered(schedule, costs)
        self.graph, self.durations = order.graph, order.duration.tolist()
        ranks, num = range(order.num_ranks), order.num_ops
        delay = np.array([0.0 if a == b else links.delay(a, b) for a in ranks for b in ranks])
        self._ops = order.op_graph(delay)
        self._timer, self._turned = Timer(*self._ops.network()), Timer(*self._ops.turned().network())
        starts, makespan = self.earliest([1.0] * num)
        if makespan < 0:
            raise ScheduleError(
                f"the ranks of {schedule.name} wait for one another (rule: deadlock); ps.check(schedule) shows where",
                rule="deadlock",
            )
        node = self.graph.node_of
        self.node_of: list[int] = node.tolist()
        self.nodes = sorted((o for o, node in enumerate(self.node_of) if o == node), key=starts.__getitem__)
        self.needs: list[list[tuple[int, float]]] = [[] for _ in range(num)]
        self.after: list[list[tuple[int, float]]] = [[] for _ in range(num)]
        sources, targets = node[self._ops.producer].tolist(), node[self._ops.consumer].tolist()
        late = [0.0] * len(sources) if self._ops.delay is None else self._ops.delay.tolist()
        for one, other, ms in zip(sources, targets, late, strict=True):
            self.needs[other].append((one, ms))
            self.after[one].append((other, ms))
        self.before = [list(each) for each in self.needs]
        for first, last in pairwise(self.graph.first):
            for one, other in pairwise(self.node_of[first:last]):
                self.before[other].append((one, 0.0))
                self.after[one].append((other, 0.0))

    def ranks_of(self, node: int) -> list[int]:
        """The ranks that run the node's op."""
        graph, gang = self.graph, self.graph.gang[node]
        if gang < 0:
            return [graph.rank[node]]
        return [graph.rank[o] for o in graph.gang_ops[graph.gang_first[gang] : graph.gang_first[gang + 1]]]

    def earliest(self, durations: Sequence[float]) -> tuple[list[float], float]:
        """The start of every node as soon as possible, and the makespan (ms)."""
        timed = self._timer.time(self._ops.row, np.array(durations))
        return list(timed.start), timed.makespan

    def latest(self, durations: Sequence[float], horizon: float) -> list[float]:
        """The latest start of every node with which all end by `horizon` (ms)."""
        taken = np.array(durations)
        before_end = self._turned.time(self._ops.turned().row, taken[::-1]).start
        latest: list[float] = (horizon - np.array(before_end)[::-1] - taken).tolist()
        return latest


class _Separation:
    """A schedule with its times and its memory, and which of its backwards may run as two halves.

    `whole` are stages whose backwards may not.
    """

    def __init__(self, costs: Costs, net: TimedOps, memory: Memory, whole: Set[int]) -> None:
        self.costs, self.net, self.memory = costs, net, memory
        graph, self.paired = net.graph, set(net.graph.backward_of.values())
        self.can_split = [
            op.kind == "B" and graph.gang[o] < 0 and o not in self.paired and op.stage not in whole
            for o, op in enumerate(graph.ops)
        ]

    def half_ms(self, kind: str, node: int) -> float:
        """Milliseconds of the I or the W of a node's backward."""
        return self.costs.duration(kind, *self.net.graph.ops[node][1:])

    def best_rows(self) -> list[list[Op]] | None:
        """The best order found, or None where none is shorter than the one there is."""
        _, before = self.net.earliest(self.net.durations)
        split, durations, least = self._split_what_blocks()
        return self._filled(split, durations, least, before) if split else None

    def _filled(self, split: set[int], durations: list[float], least: float, before: float) -> list[list[Op]] | None:
        """The order with the weight halves of `split` where they do least harm, if shorter than `before` (ms).

        Args:
            durations: of every node, without those weight halves.
            least: the makespan with these durations (ms).
        """
        margin = slack(before)
        least = max(least, self._work_bound(split, durations))
        best: tuple[float, list[list[Op]]] | None = None
        for step in range(_HORIZONS):
            horizon = least + (before - least) * step / _HORIZONS
            for eager in (True, False):
                if horizon > before - margin or (best is not None and best[0] <= horizon + margin):
                    break
                makespan, rows = _BubbleFiller(self, split, durations, horizon, eager).run()
                if makespan < (before if best is None else best[0]) - margin:
                    best = makespan, rows
        return None if best is None else best[1]

    def _split_what_blocks(self) -> tuple[set[int], list[float], float]:
        """The backwards behind the bubbles, the durations without their W, and the makespan with these."""
        net, graph = self.net, self.net.graph
        durations = list(net.durations)
        split: set[int] = set()
        while True:
            starts, makespan = net.earliest(durations)
            margin = slack(makespan)
            found: set[int] = set()
            seen: set[int] = set()
            for rank in range(graph.num_ranks):
                free = 0.0
                for o in range(graph.first[rank], graph.first[rank + 1]):
                    node = net.node_of[o]
                    if starts[node] > free + margin:
                        self._follow_back(node, starts, durations, margin, seen, found)
                    free = starts[node] + durations[node]
            if not found:
                return split, durations, makespan
            split |= found
            for node in found:
                durations[node] = self.half_ms("I", node)

    def _follow_back(
        self,
        blocked: int,
        starts: list[float],
        durations: list[float],
        margin: float,
        seen: set[int],
        found: set[int],
    ) -> None:
        """Adds to `found` the whole backwards on the paths that made `blocked` as late as it is."""
        net = self.net
        pending = [blocked]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            causes = [s for s, late in net.before[node] if starts[s] + durations[s] + late >= starts[node] - margin]
            for cause in causes:
                if self.can_split[cause] and durations[cause] > self.half_ms("I", cause):
                    found.add(cause)
            pending += causes

    def _work_bound(self, split: set[int], durations: list[float]) -> float:
        """No rank ends before its first op could start and all its work is done."""
        net, graph = self.net, self.net.graph
        starts, _ = net.earliest(durations)
        bound = 0.0
        for rank in range(graph.num_ranks):
            nodes = [net.node_of[o] for o in range(graph.first[rank], graph.first[rank + 1])]
            if nodes:
                work = sum(durations[n] + (self.half_ms("W", n) if n in split else 0.0) for n in nodes)
                bound = max(bound, starts[nodes[0]] + work)
        return bound


class _BubbleFiller:
    """Lays the weight halves into the bubbles: one walk through the ops in an order they can run in."""

    def __init__(
        self, parts: _Separation, split: set[int], durations: list[float], horizon: float, eager: bool
    ) -> None:
        self._parts, self._split, self._durations, self._eager = parts, split, durations, eager
        self._net, self._memory = parts.net, parts.memory
        num_ranks = self._net.graph.num_ranks
        self._latest = self._net.latest(durations, horizon)
        self._margin = slack(horizon)
        self._rows: list[list[Op]] = [[] for _ in range(num_ranks)]
        self._free = [0.0] * num_ranks
        self._held = [0.0] * num_ranks
        self._count = [0.0] * num_ranks
        self._waiting: list[dict[int, deque[tuple[int, Op]]]] = [{} for _ in range(num_ranks)]
        """Of each rank, by stage, the weight halves that wait, with their turns."""

    def run(self) -> tuple[float, list[list[Op]]]:
        """The makespan and every rank's ops."""
        net, ops = self._net, self._net.graph.ops
        ends = [0.0] * len(ops)
        for node in net.nodes:
            ready = max([0.0, *(ends[source] + late for source, late in net.needs[node])])
            ranks = net.ranks_of(node)
            ready = max([ready, *(self._free[rank] for rank in ranks if len(ranks) > 1)])
            for rank in ranks if node not in self._parts.paired else ():
                self._fill(rank, ready, max(ready, self._latest[node]))
                self._make_way(rank, node)
                if node in net.graph.backward_of:
                    self._make_way(rank, net.graph.backward_of[node])
            start = max([ready, *(self._free[rank] for rank in ranks)])
            ends[node] = start + self._run(node, ranks, start)
        for rank in range(len(self._rows)):
            while heads := self._heads(rank):
                self._run_weight(rank, heads[0])
        return max(self._free, default=0.0), self._rows

    def _fill(self, rank: int, ready: float, latest: float) -> None:
        """Runs weight halves in the bubble before an op that is ready then and must start by `latest`."""
        while self._eager or self._free[rank] < ready - self._margin:
            room = latest + self._margin - self._free[rank]
            waiting, costs = self._waiting[rank], self._parts.costs
            fitting = [stage for stage in self._heads(rank) if costs.duration(*waiting[stage][0][1]) <= room]
            if not fitting:
                return
            self._run_weight(rank, fitting[0])

    def _heads(self, rank: int) -> list[int]:
        """The stages of which a weight half waits, the one that has waited longest first."""
        waiting = self._waiting[rank]
        return sorted((stage for stage, halves in waiting.items() if halves), key=lambda stage: waiting[stage][0][0])

    def _make_way(self, rank: int, node: int) -> None:
        """Runs the weight halves that must come before this op: those that hold the memory it needs, and those
        that add to the same gradients as it."""
        op, memory = self._net.graph.ops[node], self._memory
        if op.kind in ("B", "W") and not self._splits(node):
            while self._waiting[rank].get(op.stage):
                self._run_weight(rank, op.stage)
        more, counted = memory.change[node], memory.count[node]
        while (more > 0 and self._held[rank] + more > memory.room(rank)) or (
            counted > 0 and self._count[rank] + counted > memory.max_count
        ):
            heads = self._heads(rank)
            if not heads:
                return
            self._run_weight(rank, heads[0])

    def _splits(self, node: int) -> bool:
        """Whether this backward runs as two halves: it was chosen, or a half of its stage waits before it."""
        if node in self._split:
            return True
        stage, rank = self._net.graph.ops[node].stage, self._net.graph.rank[node]
        return self._parts.can_split[node] and bool(self._waiting[rank].get(stage))

    def _run(self, node: int, ranks: list[int], start: float) -> float:
        op, parts = self._net.graph.ops[node], self._parts
        duration, change, counted = self._durations[node], self._memory.change[node], self._memory.count[node]
        if self._splits(node):
            halves = self._waiting[ranks[0]].setdefault(op.stage, deque())
            halves.append((len(self._rows[ranks[0]]), Op("W", op.stage, op.microbatch)))
            op = Op("I", op.stage, op.microbatch)
            duration, change, counted = parts.costs.duration(*op), parts.costs.memory_change(*op), 0
        for rank in ranks:
            self._rows[rank].append(op)
            self._free[rank] = start + duration
            self._held[rank] += change
            self._count[rank] += counted
        return duration

    def _run_weight(self, rank: int, stage: int) -> None:
        _, op = self._waiting[rank][stage].popleft()
        self._rows[rank].append(op)
        self._free[rank] += self._parts.costs.duration(*op)
        self._held[rank] += self._parts.costs.memory_change(*op)
        self._count[rank] -= 1


def merged(schedule: Schedule, costs: Costs, links: Links) -> Schedule:
    """I and its W become B again, at I's place, wherever every op still starts by its latest start.

        before, 7 ms                          after, 7 ms (B takes two columns)
        rank 0 | F0 F1 .  I0 W0 I1 W1         rank 0 | F0 F1 .  B0 -- B1 --
        rank 1 | .  F0 I0 F1 I1 W0 W1         rank 1 | .  F0 I0 F1 I1 W0 W1

    On rank 0 nothing waits for the gradient. On rank 1 it must leave early, so its halves stay apart.

    The backwards of a stage keep the order in which they add to the weights' gradients, so sums of floats stay
    the same; a half that a registered op waits for by its name stays a half, and so do those that several ranks
    run together. Memory and the makespan (frozen order, decoupled messages) never grow.
    """
    net = TimedOps(schedule, costs, links)
    whole = _whole(schedule, costs, net)
    if not whole:
        return schedule
    graph = net.graph
    gone = {Op("W", op.stage, op.microbatch) for op in whole}
    rows = tuple(
        tuple(Op("B", op.stage, op.microbatch) if op in whole else op for op in row if op not in gone)
        for row in (graph.ops[graph.first[r] : graph.first[r + 1]] for r in range(graph.num_ranks))
    )
    return replace(schedule, order=rows)


def _mergeable(schedule: Schedule, graph: Graph) -> tuple[dict[int, int], dict[int, int]]:
    """Two mappings of nodes.

    The first leads from each I that may be merged to its W; the second from each B or W to the one before it on the
    same rank that adds to the same gradients.
    """
    named = {end for need in schedule.graph.needs for end in (need.before, need.after) if end[0] in "IW"}
    weight: dict[int, int] = {}
    adder_before: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for node, op in enumerate(graph.ops):
        if op.kind in "BW":
            key = graph.rank[node], op.stage
            if key in last:
                adder_before[node] = last[key]
            last[key] = node
        if op.kind == "I" and graph.gang[node] < 0 and not named & {("I", op.stage), ("W", op.stage)}:
            weight[node] = graph.number[Op("W", op.stage, op.microbatch)]
    return weight, adder_before


def _whole(schedule: Schedule, costs: Costs, net: TimedOps) -> set[Op]:
    """The I ops that can become B such that every op still starts by its latest start."""
    ops, durations = net.graph.ops, list(net.durations)
    weight, adder_before = _mergeable(schedule, net.graph)
    whole_ms = {node: costs.duration("B", *ops[node][1:]) for node in weight}
    place = {w: w for w in weight.values()}
    _, horizon = net.earliest(durations)
    found: set[int] = set()
    while more := _merged_in_time(net, durations, horizon, weight, adder_before, whole_ms, dict(place)):
        found.update(more)
        for node in more:
            merged_away = weight.pop(node)
            durations[node], durations[merged_away] = whole_ms[node], 0.0
            place[merged_away] = node
    return {ops[node] for node in found}


def _merged_in_time(
    net: TimedOps,
    durations: list[float],
    horizon: float,
    weight: dict[int, int],
    adder_before: dict[int, int],
    whole_ms: dict[int, float],
    place: dict[int, int],
) -> list[int]:
    """The halves merged by one walk through the ops in the order of time, which moves later ops within their slack.

    The W that is merged stays in its row and takes no time: that is the same as being gone.

    Args:
        horizon: when all must have ended (ms).
        weight, adder_before: as of `_mergeable`.
        whole_ms: how long the B of each I takes.
        place: the node where each W adds to its gradients, which changes.
    """
    latest, margin = net.latest(durations, horizon), slack(horizon)
    starts, taken, found = [0.0] * len(durations), list(durations), []
    for node in net.nodes:
        start = max([0.0, *(starts[s] + taken[s] + late for s, late in net.before[node])])
        starts[node] = start
        half = weight.get(node)
        if half is None:
            continue
        adder = adder_before.get(half)
        if adder is not None and place.get(adder, adder) > node:
            continue
        end = start + whole_ms[node]
        if end > latest[half] + durations[half] + margin:
            continue
        if any(end + late > latest[t] + margin for t, late in net.after[node] if t != half):
            continue
        taken[node], taken[half] = end - start, 0.0
        place[half] = node
        found.append(node)
    return found
