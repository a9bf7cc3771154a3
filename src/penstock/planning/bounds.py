"""Lower bounds: no schedule of the problem, however clever, ends sooner. From the weakest to the strongest:

    busy        the way to a rank, all its work, the way from it to the end
    Jackson     for each rank, all its ops between the earliest moments they can start (heads) and the least that
                must follow them (tails), cut into pieces at will (Jackson's preemptive schedule). Both are longest
                paths, with the order within queues and with memory: a forward waits for an older microbatch to be
                freed
    work        Jackson's again, with heads and tails that also count all the work an op's own rank must do before
                and after it; it costs the square of a rank's ops
    ramp        for each rank, all its work and the time for which it must stand idle at both ends: till the first
                microbatches come back, what it may run is what its memory has room for (see `ramps`)

A forward's wait for memory, from FIFO order alone: with room for c = cap / activation microbatches of which I frees
the share s, F(j) needs I(j - floor(c)) ended, since no microbatch is freed before its I; and as at most j of the I
can have ended, W(j - 1 - floor((c - 1) / (1 - s))) too. Where a rank hosts several stages, a microbatch that has not
run I of one stage also holds what the stages before it keep, so c is smaller.

`OpArrays` has ops on rows with their heads, their tails and what each of them needs, as CP-SAT takes them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.cost import Costs, Links
from penstock.engine.compiled import compiled
from penstock.engine.network import NONE, Array, Network, OpGraph
from penstock.engine.sweep import Timer
from penstock.engine.tolerance import EPSILON
from penstock.planning import longest_paths, ramps
from penstock.planning.options import in_turn
from penstock.planning.problem import Problem
from penstock.planning.ramps import RankWays
from penstock.program import Program
from penstock.schedule import Placement


@dataclass(frozen=True)
class OpArrays:
    """Ops on rows, and what each of them needs.

    Attributes:
        duration: ms of each op.
        head, tail: ms that pass before each op can start, and after it has ended, at least.
        rows: the ops of each row. An op may stand in several rows at once.
        source, to, delay: of each need, the op that must have ended, the op that waits, and ms in between.
        takes, gives: memory that each op takes on its rows at its start, and gives back at its end.
        cap: the most that each row may hold.
        taker: of each op that gives memory back, the op that took it, where every op gives back what one took.
    """

    duration: Array
    head: Array
    tail: Array
    rows: Sequence[Array]
    source: Array
    to: Array
    delay: Array
    takes: Array
    gives: Array
    cap: Sequence[float]
    taker: Array | None = None

    def jackson_bound(self) -> float:
        """No order of these ops ends sooner (ms): the longest path, or for some row Jackson's preemptive schedule."""
        through = self.head + self.duration + self.tail
        each = (
            preemptive_span(*(of[row].tolist() for of in (self.head, self.duration, self.tail))) for row in self.rows
        )
        return max(float(through.max(initial=0.0)), *each)


def paths(duration: Array, source: Array, to: Array, delay: Array) -> tuple[Array, Array]:
    """The longest path to the start of each op, and from its end, over what each needs (ms)."""
    ops = np.arange(len(duration))
    # Every op stands in a row of its own, so it waits for what it needs alone.
    graph = OpGraph(np.arange(len(ops) + 1), ops, source, to, delay)
    head = Timer(*graph.network(duration)).time(ops).start
    tail = Timer(*graph.turned().network(duration[::-1])).time(ops).start
    return np.asarray(head), np.asarray(tail)[::-1]


def preemptive_span(heads: Sequence[float], durations: Sequence[float], tails: Sequence[float]) -> float:
    """Jackson's preemptive schedule of one row: of the ops that are there, that with the longest tail runs at every
    moment, and ops are cut at will.

    For ops in any order, one by one. `longest_paths.jackson` is the compiled one, of queues whose microbatches come
    in turn.

    Args:
        heads, durations, tails: of each op the ms before it can start at best, that it takes, and that must follow.

    Returns the ms from 0 until the last tail is over; 0 where there are no ops.
    """
    waiting = sorted(range(len(heads)), key=lambda op: heads[op], reverse=True)
    there: list[tuple[float, int, float]] = []
    now = most = 0.0
    while waiting or there:
        if not there:
            now = max(now, heads[waiting[-1]])
        while waiting and heads[waiting[-1]] <= now:
            op = waiting.pop()
            heapq.heappush(there, (-tails[op], op, durations[op]))
        behind, op, left = heapq.heappop(there)
        until = heads[waiting[-1]] if waiting else math.inf
        if now + left > until:
            heapq.heappush(there, (behind, op, left - (until - now)))
            now = until
        else:
            now += left
            most = max(most, now - behind)
    return most


_NOTHING = np.empty((0, 1), np.int64)


class QueueWaits(NamedTuple):
    """What `longest_paths.heads` needs besides the queues: a topological order, and waits for memory."""

    order: Array
    release: Array
    lag: Array


def waits(problem: Problem) -> QueueWaits:
    """The order of the queues and which op each forward waits for to be freed."""
    queues, number = problem.queues, problem.number
    num_queues = len(queues.rank)
    release, lag = np.full((2, num_queues), NONE, np.int64), np.zeros((2, num_queues), np.int64)
    for (kind, stage, pipeline), q in number.items():
        if kind != "F":
            continue
        r = int(queues.rank[q])
        before = sum(
            float(queues.memory[other])
            for other in range(queues.rank_first[r], queues.rank_first[r + 1])
            if problem.kind[other] == "F" and queues.pipeline[other] == pipeline and problem.stage[other] < stage
        )
        back = number.get(("I", stage, pipeline), number.get(("B", stage, pipeline), NONE))
        weight = number.get(("W", stage, pipeline), NONE)
        late = 0.0 if weight == NONE else -float(queues.memory[weight])
        held, cap, size = float(queues.memory[q]), float(queues.cap[r]), int(queues.size[q])
        for row, (freed, steps) in enumerate(zip((back, weight), lags(held, before, late, cap), strict=True)):
            if steps is not None and steps < size:
                release[row, q], lag[row, q] = freed, steps
    return QueueWaits(topological(queues), release, lag)


def lags(held: float, before: float, late: float, cap: float) -> tuple[int | None, int | None]:
    """How far behind a forward its stage's I (or B) and W are that must have ended; None where that is not known.

    Args:
        held: what the forward takes.
        before: what stages before it hold of a microbatch that has not run this stage's I.
        late: what the W gives back, 0 where the I gives back all.
    """
    cap *= 1 + EPSILON
    if held <= 0 or math.isinf(cap):
        return None, None
    back = max(1, math.floor(cap / (held + before)))
    return back, max(1, 1 + math.floor((cap - held) / late + EPSILON)) if late > 0 else None


def topological(queues: Network) -> Array:
    """Queues, each after those it waits for, one chain at a time so that walking them touches memory in order."""
    order: list[int] = []
    needs = (queues.message_from >= 0).astype(int) + (queues.local_from >= 0)
    ready = [q for q in range(len(needs) - 1, -1, -1) if needs[q] == 0]
    missing = needs.tolist()
    to = [queues.message_to.tolist(), queues.local_to.tolist()]
    while ready:
        q = ready.pop()
        order.append(q)
        for after in (to[1][q], to[0][q]):
            if after >= 0:
                missing[after] -= 1
                if missing[after] == 0:
                    ready.append(after)
    return np.array(order, np.int64)


def turned_waits(given: QueueWaits) -> QueueWaits:
    """The same for the problem with time turned round: what frees memory there is what takes it here."""
    release, lag = np.full_like(given.release, NONE), np.zeros_like(given.lag)
    for row, steps in zip(given.release, given.lag, strict=True):
        for q in np.flatnonzero(row >= 0):
            free = 0 if release[0, row[q]] == NONE else 1
            release[free, row[q]], lag[free, row[q]] = q, steps[q]
    return QueueWaits(given.order[::-1].copy(), release, lag)


_FAR = 2**40
"""Further back than any op."""


def behind(queues: Network, given: QueueWaits) -> Array:
    """How far behind the other queues of its rank each is at least, by shortest paths; see `longest_paths.heads`."""
    width = int(np.diff(queues.rank_first).max(initial=1))
    result = np.full((len(queues.rank), width), _FAR, np.int64)
    for r in range(queues.num_ranks):
        first, end = int(queues.rank_first[r]), int(queues.rank_first[r + 1])
        steps = np.full((end - first, end - first), _FAR, np.int64)
        for q in range(first, end):
            steps[q - first, q - first] = 1
            for before, lag in (
                (queues.message_from[q], 0),
                (queues.local_from[q], 0),
                (given.release[0, q], given.lag[0, q]),
                (given.release[1, q], given.lag[1, q]),
            ):
                if first <= before < end:
                    steps[q - first, before - first] = min(steps[q - first, before - first], lag)
        for k in range(end - first):
            steps = np.minimum(steps, steps[:, k : k + 1] + steps[k : k + 1, :])
        result[first:end, : end - first] = np.minimum(steps, _FAR)
    return result


def heads_and_tails(problem: Problem, given: QueueWaits | None = None, work: bool = False) -> tuple[Array, Array]:
    """Per op, ms before it can start, and ms that must follow its end (numbered from each queue's last op).

    With `work`, both count the work of the op's own rank too.
    """
    queues = problem.queues
    given = waits(problem) if given is None else given
    turned, back = queues.turned(), turned_waits(given)
    return (
        _heads(queues, given, queues.release[queues.rank], behind(queues, given) if work else _NOTHING),
        _heads(turned, back, queues.tail[queues.rank], behind(turned, back) if work else _NOTHING),
    )


def own_tails(queues: Network, tail: Array) -> Array:
    """Tails that are numbered from each queue's last op, numbered as the ops are; and the other way."""
    first, size = np.repeat(queues.op_first[:-1], queues.size), np.repeat(queues.size, queues.size)
    return tail[2 * first + size - 1 - np.arange(queues.num_ops)]


def _heads(queues: Network, given: QueueWaits, floor: Array, work: Array, first_only: bool = False) -> Array:
    head = np.empty(queues.num_ops)
    compiled(longest_paths).heads(queues, given.order, given.release, given.lag, floor, first_only, work, head)
    return head


def quick_bound(
    deals: Array,
    placement: Placement,
    num_ranks: int,
    way: Sequence[float],
    work: Sequence[float],
    links: Links | None = None,
) -> Array:
    """Of each deal, ms that no schedule ends before: for each rank, the way to its first stage, and its work.

    Args:
        deals: rows of counts, how many microbatches each pipeline has.
        way: of each stage, ms that pass there before a rank of the next one can begin.
        work: ms of a microbatch on each stage.
        links: between ranks, if messages take time.
    """
    links = links or Links()
    works, to = np.zeros((num_ranks, placement.num_pipelines)), np.full(num_ranks, np.inf)
    for p, hosts in enumerate(placement.pipelines):
        passed = 0.0
        for s, r in enumerate(hosts):
            if s:
                passed += way[s - 1] + links.delay(hosts[s - 1], r) * (hosts[s - 1] != r)
            for each in placement.hosts(p, s):
                to[each] = min(to[each], passed)
                works[each, p] += work[s]
    taken = deals @ works.T
    return np.where(taken > 0, taken + np.where(np.isinf(to), 0.0, to), 0.0).max(axis=1, initial=0.0)


def least_work(costs: Costs) -> list[float]:
    """ms of a microbatch on each stage at least."""
    return [f + min(b, i + w) for f, b, i, w in zip(costs.f, costs.b, costs.i, costs.w, strict=True)]


def least_ms(program: Program) -> float:
    """A lower bound (ms) for every schedule of a program: the way to a rank's first stage, and the rank's work."""
    costs, placement = program.all_costs, program.placement
    halves = [f + i + w for f, i, w in zip(costs.f, costs.i, costs.w, strict=True)]
    work = halves if program.split is True else least_work(costs)
    deal = np.array([in_turn(program.num_microbatches, placement.num_pipelines)])
    return float(quick_bound(deal, placement, program.num_ranks, costs.f, work)[0])


def busy_bound(problem: Problem) -> float:
    """For each rank: the shortest way to one of its ops, all its work, the shortest way on from one of its ops."""
    queues = problem.queues
    if queues.num_ops == 0:
        return 0.0
    order = topological(queues).tolist()
    to, onwards = _way(queues, order), _way(queues.turned(), order[::-1])
    work = queues.duration * queues.size
    bound = 0.0
    for r in range(queues.num_ranks):
        mine = [q for q in range(queues.rank_first[r], queues.rank_first[r + 1]) if queues.size[q] > 0]
        if mine:
            bound = max(bound, min(to[q] for q in mine) + float(work[mine].sum()) + min(onwards[q] for q in mine))
    return bound


def ways(queues: Network) -> list[float]:
    """The longest path of one microbatch to each queue (ms)."""
    return _way(queues, topological(queues).tolist())


def _way(queues: Network, order: Sequence[int]) -> list[float]:
    way = [0.0] * len(queues.rank)
    for q in order:
        message, local = int(queues.message_from[q]), int(queues.local_from[q])
        if message >= 0:
            way[q] = max(way[q], way[message] + float(queues.duration[message] + queues.delay[q]))
        if local >= 0:
            way[q] = max(way[q], way[local] + float(queues.duration[local]))
    return way


def jackson_bound(problem: Problem, given: QueueWaits | None = None, work: bool = False) -> float:
    """The largest over ranks of Jackson's preemptive schedule with heads and tails.

    Args:
        given: what queues wait for; by default what `waits` finds.
        work: whether heads and tails count the work of an op's own rank too.
    """
    queues = problem.queues
    head, tail = heads_and_tails(problem, given, work)
    width = int(np.diff(queues.rank_first).max(initial=1))
    return float(compiled(longest_paths).jackson_all(queues, head, tail, np.empty(width, np.int64), np.empty(width)))


def work_bound(problem: Problem) -> float:
    """The same with heads and tails that count the work of an op's own rank."""
    return jackson_bound(problem, work=True)


def work_seconds(problem: Problem) -> float:
    """About how long `work_bound` takes, compiled."""
    return float((np.diff(problem.queues.row_first).astype(float) ** 2).sum()) / 2e8


def op_arrays(problem: Problem) -> OpArrays:
    """A problem's ops one by one: needs within queues and between them, and forwards that wait for memory."""
    queues = problem.queues
    given = waits(problem)
    head, tail = heads_and_tails(problem, given, work=work_seconds(problem) < 1.0)
    cap, release = queues.cap.copy(), given.release.copy()
    for r in range(queues.num_ranks):
        mine = slice(queues.rank_first[r], queues.rank_first[r + 1])
        # Where memory is freed at one op alone, waits say all. Elsewhere they cost the solver more than they tell it.
        if np.count_nonzero(queues.memory[mine] > 0) == np.count_nonzero(queues.memory[mine] < 0) == 1:
            cap[r] = np.inf
        else:
            release[:, mine] = NONE
    queue_of, number = problem.queue_of, problem.number_of
    before = [queue_of, queues.message_from[queue_of], queues.local_from[queue_of], *release[:, queue_of]]
    lag = [np.ones_like(number), np.zeros_like(number), np.zeros_like(number), *given.lag[:, queue_of]]
    late = [np.zeros(len(number)), queues.delay[queue_of], *np.zeros((3, len(number)))]
    there = [np.flatnonzero((q >= 0) & (number >= steps)) for q, steps in zip(before, lag, strict=True)]
    source = [
        queues.op_first[q[to]] + number[to] - steps[to] for q, steps, to in zip(before, lag, there, strict=True)
    ]
    memory = queues.memory[queue_of]
    keys = zip(problem.stage, queues.pipeline.tolist(), strict=True)
    forward = np.array([problem.number["F", stage, pipeline] for stage, pipeline in keys])
    return OpArrays(
        duration=queues.duration[queue_of],
        head=head,
        tail=own_tails(queues, tail),
        rows=np.split(np.arange(queues.num_ops), queues.row_first[1:-1]),
        source=np.concatenate(source),
        to=np.concatenate(there),
        delay=np.concatenate([ms[to] for ms, to in zip(late, there, strict=True)]),
        takes=np.maximum(memory, 0.0),
        gives=np.maximum(-memory, 0.0),
        cap=cap,
        taker=queues.op_first[forward[queue_of]] + number,
    )


_MOST_MOMENTS = 256
"""At both ends, the moments till which a rank's idle time is asked for."""


def ramp_bound(problem: Problem, known: float = 0.0) -> float:
    """For each rank: all its work, and how long it must stand idle while pipelines fill and drain under its cap.

    Heads and tails are those of `work_bound`.

    Args:
        known: a lower bound (ms), which is raised.
    """
    queues = problem.queues
    ends = heads_and_tails(problem, work=True)
    module = compiled(ramps)
    room = np.empty(len(queues.rank)), np.empty(len(queues.rank)), np.empty(4 * len(queues.rank))
    bound = known
    for r in range(queues.num_ranks):
        if queues.row_first[r] == queues.row_first[r + 1]:
            continue
        mine = slice(queues.rank_first[r], queues.rank_first[r + 1])
        moments, idle = [], []
        for network, head, turned in ((queues, ends[0], False), (queues.turned(), ends[1], True)):
            first = head[queues.row_first[r] : queues.row_first[r + 1]]
            asked = np.unique(first)
            asked = asked[:: 1 + len(asked) // _MOST_MOMENTS].copy()
            found = np.empty(len(asked))
            ways_over = RankWays(*_ways_over(problem, r, turned), turned, _late(network, mine), *room)
            module.idle_till(network, r, head, ways_over, asked, found)
            moments.append(asked)
            idle.append(found)
        total = float((queues.duration[mine] * queues.size[mine]).sum())
        bound = float(module.with_both_ends(bound, total, moments[0], idle[0], moments[1], idle[1]))
    return bound


def _ways_over(problem: Problem, r: int, turned: bool) -> tuple[Array, Array, Array]:
    """The queues of a rank as each pipeline's microbatches come to them, their W, and where each pipeline begins."""
    queues, number = problem.queues, problem.number
    mine = [q for q in range(queues.rank_first[r], queues.rank_first[r + 1]) if problem.kind[q] != "W"]
    way: list[int] = []
    first = [0]
    for pipeline in sorted(set(queues.pipeline[mine].tolist())):
        there = [q for q in mine if queues.pipeline[q] == pipeline]
        there.sort(key=lambda q: (problem.kind[q] != "F", problem.stage[q] * (1 if problem.kind[q] == "F" else -1)))
        way += there[::-1] if turned else there
        first.append(len(way))
    weight = [
        number.get(("W", problem.stage[q], int(queues.pipeline[q])), NONE) if problem.kind[q] == "I" else NONE
        for q in way
    ]
    return np.array(way, np.int64), np.array(weight, np.int64), np.array(first, np.int64)


def _late(queues: Network, mine: slice) -> Array:
    """Per queue of a rank, how long before (ms) what gives back memory counts.

    How much of a queue has run is the mean, over a time as long as its op, of how many ops have started. Taken over
    the same time, the shortest of all takers, the means keep to the cap as well; the ends of a giver are its starts,
    its own length later.
    """
    shift = np.zeros(len(queues.rank))
    takers = queues.duration[mine][queues.memory[mine] > 0]
    if len(takers):
        shift[mine] = np.minimum(takers.min(), queues.duration[mine])
    return shift


def span_bound(problem: Problem) -> float:
    """No rank's span (last end less first start) can be shorter for all ranks: the largest of its bounds.

    A rank that hosts stages of one pipeline begins with the first op of the first of them. Jackson's schedule
    with heads counted from there, and tails to the last op on the same rank.
    """
    queues = problem.queues
    given = waits(problem)
    back = turned_waits(given)
    module = compiled(longest_paths)
    bound = 0.0
    for r in range(queues.num_ranks):
        mine = np.arange(queues.rank_first[r], queues.rank_first[r + 1])
        work = float((queues.duration[mine] * queues.size[mine]).sum())
        bound = max(bound, work)
        if len(mine) == 0 or len(set(queues.pipeline[mine].tolist())) != 1:
            continue
        root = min(mine.tolist(), key=lambda q: (problem.kind[q] != "F", problem.stage[q]))
        floor = np.full(len(queues.rank), longest_paths.NEVER)
        floor[root] = 0.0
        head = _heads(queues, given, floor, _NOTHING, first_only=True)
        floor = np.full(len(queues.rank), longest_paths.NEVER)
        floor[mine] = 0.0
        tail = _heads(queues.turned(), back, floor, _NOTHING)
        bound = max(
            bound, float(module.jackson(queues, r, head, tail, np.empty(len(mine), np.int64), np.empty(len(mine))))
        )
    return bound
