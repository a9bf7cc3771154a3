"""Messages over channels: where each is best posted, when its data leaves and when it arrives.

    rank 0 | F0 SEND_F0 F1 ...          posted when rank 0 gets there
                  |  .  .  .            waits for the receive, and for what is before it on the stream
                  '---------.           leaves
    rank 1 |  RECV_F0        '--> F0    travels as the link says, and arrives

`run_channels` times a schedule that has its messages as ops. The nodes and what each waits for are those of
`schedule.messages`, which proves that none hangs.

`place_messages` puts them in. One principle serves all channels: run the compute order once while an arbiter that
sees all ranks serves the channel, and write down what it did. Each message op stands where its rank was when the
message left. So every wait of the rows points forward in time, and none can hang; replaying the rows is never slower
than the arbiter's run.

- "buffered", "gloo", "nccl-edge": messages between two ranks keep out of each other's way. Each is sent at once, and
  each receive is posted as early as a bound on posted receives allows. That needs hardly any knowledge of links.
- "nccl", "nccl-pair": a stream carries one message at a time. The arbiter starts a message as soon as the streams at
  both its ends are free. Of several it takes the first by a rule; the best of a few rules counts.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.cost import Costs
from penstock.cost.conditions import LinkQueue
from penstock.cost.links import LinkQueues
from penstock.dispatch.graph import Graph
from penstock.schedule import Op, Schedule, ScheduleError
from penstock.schedule.messages import (
    GLOO,
    MessageNetwork,
    message_at,
    message_network,
    other_end,
    remove_communication,
    send_of,
    shares_streams,
    stream_of,
)
from penstock.schedule.op import COMMUNICATION
from penstock.simulation.lowered import Order
from penstock.simulation.timeline import Message, TimedOp, Timeline

NodeTimes = tuple[list[float], list[float]]
"""When each node of a network started, with all its needs met, and when it ended (ms)."""


def run_channels(
    schedule: Schedule, order: Order, costs: Costs, lines: LinkQueues, channel: str, at: float = 0.0
) -> Timeline:
    """The timeline of a schedule with its messages as ops, whose ranks follow their rows.

    Args:
        schedule: with messages at both ends.
        order: the schedule without its messages, lowered under the costs.
        lines: the links, and the messages that an earlier run left in them.
        channel: one of `schedule.messages.CHANNELS`.
        at: when the run starts, in ms of the links' own time.

    Raises:
        ScheduleError (rule "deadlock"): the run stops before its end.
    """
    network = message_network(schedule, channel)
    takes = dict(zip(order.graph.ops, order.duration.tolist(), strict=True))
    times = _time_nodes(network, [takes.get(op, 0.0) for op in network.ops], costs, lines, channel, at)
    return _timeline(remove_communication(schedule), network, times, order.peaks, channel)


def _time_nodes(
    network: MessageNetwork,
    takes: Sequence[float],
    costs: Costs,
    lines: LinkQueues,
    channel: str,
    at: float,
) -> NodeTimes:
    num_ops, num_nodes = len(network.ops), len(network.needs)
    unlocks, missing = network.count_needs()
    start, end = [0.0] * num_nodes, [0.0] * num_nodes
    # Nodes are taken in the order of time, as the queue of a link takes its messages.
    ready = [(0.0, node) for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    taken = 0
    while ready:
        now, node = heapq.heappop(ready)
        taken += 1
        if node < num_ops:
            end[node] = now + takes[node]
        else:
            way = message_at(network, node)
            size = costs.message_size(way.made, way.used)
            end[node] = lines.arrival_in_run(way.source, way.target, size, now, at)
        for after in unlocks[node]:
            there = end[node]
            if channel == GLOO and after >= num_ops and network.ops[node].kind.startswith("RECV_"):
                way = message_at(network, after)
                there = lines.links.delay_of(way.target, way.source, 0, there + at, LinkQueue()).arrived - at
            start[after] = max(start[after], there)
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, (start[after], after))
    if taken < num_nodes:
        stuck = next(node for node in range(num_ops) if missing[node])
        rank, op = network.rank[stuck], network.ops[stuck]
        raise ScheduleError(
            f"the run stops after {taken} of {num_nodes} ops and messages: rank {rank} never gets to {op} "
            f"(rule: deadlock); ps.check(schedule, channels={channel!r}) shows why",
            rule="deadlock",
            rank=rank,
            op=op,
        )
    return start, end


def _timeline(
    schedule: Schedule, network: MessageNetwork, times: NodeTimes, peaks: Sequence[float], channel: str
) -> Timeline:
    num_ops, (start, end) = len(network.ops), times
    number = {op: node for node, op in enumerate(network.ops)}
    before = [0.0] * schedule.num_ranks
    ops: list[TimedOp] = []
    for node, op in enumerate(network.ops):
        if op.kind in COMMUNICATION:
            continue
        rank, begun, cause = network.rank[node], start[node], None
        if begun > before[rank]:
            last = max(network.needs[node], key=end.__getitem__)
            cause = network.ops[last] if last < num_ops else message_at(network, last).made
        ops.append(TimedOp(rank, op, begun, end[node], cause, begun - before[rank]))
        before[rank] = end[node]
    messages = tuple(
        Message(
            way.made,
            way.used,
            way.source,
            way.target,
            sent=end[number[way.send]],
            left=start[node],
            arrived=end[node],
            taken=start[number[way.used]],
            posted=end[number[way.receive]],
        )
        for node, way in enumerate(network.transfers, num_ops)
    )
    return Timeline(schedule, tuple(ops), messages, tuple(map(float, peaks)), channels=channel)


TOLERANCE = 1e-9
"""Moments (ms) that are no further apart are one: sums of the same times in another order."""


@dataclass(frozen=True)
class Crossing:
    """A message between two ranks: the numbers of the ops that make and need it, its SEND, and its bytes."""

    made: int
    used: int
    source: int
    target: int
    send: Op
    size: float


def place_messages(
    schedule: Schedule,
    order: Order,
    costs: Costs,
    lines: Callable[[], LinkQueues],
    channel: str,
    most_posted: int,
    at: float = 0.0,
) -> Schedule:
    """The schedule with SEND_F, RECV_F, SEND_B and RECV_B placed for a channel.

    Args:
        schedule: proved, without messages. order: the same, lowered under the costs.
        lines: makes the queues of the links as they are before a run.
        channel: one of `schedule.messages.CHANNELS`.
        most_posted: most receives that a rank has posted and not used, where that delays no op.
        at: when the run starts, in ms of the links' own time.
    """
    crossings, run = arbitrate(order, costs, lines, channel, at)
    if shares_streams(channel):
        rows = write_rows(order, crossings, run.served)
    else:
        rows = _place_early(order, crossings, run, channel, most_posted)
    return replace(schedule, order=tuple(map(tuple, rows)))


def arbitrate(
    order: Order, costs: Costs, lines: Callable[[], LinkQueues], channel: str, at: float = 0.0
) -> tuple[list[Crossing], ArbiterRun]:
    """The messages of a compute order, and the arbiter's best run of them; args as of `place_messages`."""
    crossings = list(crossings_of(order.graph, costs))
    free_run = _arbitrate(order, crossings, lines(), None, lambda message: 0.0, at)
    if not shares_streams(channel):
        return crossings, free_run
    rules = _rules(order, crossings, free_run)
    runs = [_arbitrate(order, crossings, lines(), channel, rule, at) for rule in rules]
    return crossings, min(runs, key=lambda run: run.makespan)


@dataclass(frozen=True)
class ArbiterRun:
    """One run of the arbiter: when ops and messages ran, and in which order messages were served.

    Attributes:
        makespan: when the last op ended (ms). start: of each op. left, arrived: of each message.
        served: the messages in the order in which they left, each with how many ops its two ranks had run.
    """

    makespan: float
    start: list[float]
    left: list[float]
    arrived: list[float]
    served: list[tuple[int, int, int]]


def crossings_of(graph: Graph, costs: Costs) -> Iterator[Crossing]:
    """The messages between ranks of a compute order."""
    for made, used in zip(graph.sources.tolist(), graph.edge_to, strict=True):
        source, target = graph.host(made), graph.host(used)
        send = send_of(graph.ops[made])
        if source != target and send is not None:
            size = costs.message_size(graph.ops[made], graph.receives(made, used))
            yield Crossing(made, used, source, target, send, size)


def _arbitrate(
    order: Order,
    crossings: list[Crossing],
    lines: LinkQueues,
    channel: str | None,
    rule: Callable[[int], float],
    at: float,
) -> ArbiterRun:
    """Runs the compute order; messages that share a stream take it one at a time, in the order of a rule.

    Args:
        channel: None where no message waits for another.
        rule: message -> its turn among those that could leave, the lowest first.
    """
    graph, num_ops = order.graph, order.num_ops
    duration = order.duration.tolist()
    missing = list(graph.num_needed)
    carried: list[list[int]] = [[] for _ in range(num_ops)]
    for number, message in enumerate(crossings):
        carried[message.made].append(number)
    done = [0] * graph.num_ranks
    running = [False] * graph.num_ranks
    start, left, arrived = [0.0] * num_ops, [0.0] * len(crossings), [0.0] * len(crossings)
    streams = [
        [stream_of(channel, rank, message.source, message.target) for rank in (message.source, message.target)]
        if channel is not None
        else []
        for message in crossings
    ]
    busy: set[object] = set()
    waiting: list[int] = []
    served: list[tuple[int, int, int]] = []
    events: list[tuple[float, int]] = []  # an op's end, or (from num_ops on) a message's arrival
    now = makespan = 0.0

    def begin(rank: int) -> None:
        op = graph.first[rank] + done[rank]
        if not running[rank] and op < graph.first[rank + 1] and not missing[op]:
            running[rank], start[op] = True, now
            heapq.heappush(events, (now + duration[op], op))

    def leave(number: int) -> None:
        message = crossings[number]
        left[number] = now
        busy.update(streams[number])
        served.append((number, done[message.source], done[message.target]))
        arrived[number] = lines.arrival_in_run(message.source, message.target, message.size, now, at)
        heapq.heappush(events, (arrived[number], num_ops + number))

    for rank in range(graph.num_ranks):
        begin(rank)
    while events:
        now = events[0][0]
        while events and events[0][0] <= now + TOLERANCE:
            _, event = heapq.heappop(events)
            if event >= num_ops:
                busy.difference_update(streams[event - num_ops])
                used = crossings[event - num_ops].used
                missing[used] -= 1
                begin(graph.host(used))
                continue
            rank, makespan = graph.host(event), now
            running[rank] = False
            done[rank] += 1
            for after in graph.successors(event):
                if graph.host(after) == rank:
                    missing[after] -= 1
            waiting += carried[event]
            begin(rank)
        held = []
        for number in sorted(waiting, key=rule):
            if busy.isdisjoint(streams[number]):
                leave(number)
            else:
                held.append(number)
        waiting = held
    if sum(done) < num_ops:
        raise ScheduleError("the run stops before its end (rule: deadlock); ps.check shows why", rule="deadlock")
    return ArbiterRun(makespan, start, left, arrived, served)


def _rules(order: Order, crossings: list[Crossing], free: ArbiterRun) -> list[Callable[[int], float]]:
    """Rules that say which of several messages goes first, each as message -> its turn, the lowest first."""
    graph, duration = order.graph, order.duration.tolist()
    travels = {(m.made, m.used): free.arrived[n] - free.left[n] for n, m in enumerate(crossings)}
    tail = [0.0] * order.num_ops
    for op in sorted(range(order.num_ops), key=lambda o: (free.start[o], o), reverse=True):
        after = [tail[op + 1]] if op + 1 < graph.first[graph.rank[op] + 1] else []
        after += [tail[o] + travels.get((op, o), 0.0) for o in graph.successors(op)]
        tail[op] = duration[op] + max(after, default=0.0)
    due = [free.start[message.used] for message in crossings]
    spare = [free.start[message.used] - free.arrived[n] for n, message in enumerate(crossings)]
    last = 1.0 + max(free.start, default=0.0)
    gradient = [last * (message.send.kind == "SEND_B") for message in crossings]
    return [
        lambda n: free.left[n],  # made first
        lambda n: due[n],  # needed first
        lambda n: due[n] - gradient[n],
        lambda n: due[n] + gradient[n],
        lambda n: -tail[crossings[n].used],  # the longest way from its use to the end
        lambda n: spare[n],  # the least time between arrival and use
    ]


def _place_early(
    order: Order, crossings: list[Crossing], free: ArbiterRun, channel: str, most_posted: int
) -> list[list[Op]]:
    """Rows in which each message is sent at once, and each receive is posted as early as the bound allows.

    If no link takes time, late links may just not be known. Each rank then posts its receives in the order in which
    their messages leave. If a link takes time, a receive is due two ways before its message is used, and a rank posts
    its receives in the order in which they are due. On gloo any number of messages may be under way on a link. The
    messages of a link are then sent in the order of their use: a message that is used later loses no time if it is
    sent together with the message before it.
    """
    is_late = free.arrived != free.left
    graph, ops = order.graph, order.graph.ops
    links: dict[tuple[int, int], list[int]] = {}
    needed = Counter(message.used for message in crossings)
    for number in sorted(range(len(crossings)), key=lambda n: (free.left[n], crossings[n].made)):
        links.setdefault((crossings[number].source, crossings[number].target), []).append(number)
    sends: dict[int, list[Op]] = {}
    receives: list[list[tuple[float, int, int]]] = [[] for _ in range(graph.num_ranks)]
    for (_, target), numbers in links.items():
        if channel == GLOO and is_late:
            numbers.sort(key=lambda n: crossings[n].used)
        made, due, dues = -1, math.inf, []
        for number in numbers:
            made = max(made, crossings[number].made)
            sends.setdefault(made, []).append(crossings[number].send)
        for number in reversed(numbers):
            due = min(due, free.start[crossings[number].used] - 2 * (free.arrived[number] - free.left[number]))
            dues.append((due, 0, number) if is_late else (free.left[number], crossings[number].made, number))
        receives[target] += reversed(dues)
    backward_of = graph.backward_of
    rows: list[list[Op]] = []
    for rank in range(graph.num_ranks):
        row: list[Op] = []
        queue = [number for *_, number in sorted(receives[rank], key=lambda each: each[:2])]
        posted = outstanding = 0
        there: dict[int, int] = {}
        for op in range(graph.first[rank], graph.first[rank + 1]):
            while posted < len(queue) and (outstanding < most_posted or there.get(op, 0) < needed.get(op, 0)):
                message = crossings[queue[posted]]
                row.append(other_end(message.send))
                there[message.used] = there.get(message.used, 0) + 1
                posted += 1
                outstanding += 1
            row.append(ops[op])
            outstanding -= needed.get(op, 0)
            if op in backward_of:
                continue  # its backward follows at once
            for made in (op - 1, op) if op - 1 in backward_of else (op,):
                row += sends.get(made, [])
        rows.append(row)
    return rows


def write_rows(order: Order, crossings: list[Crossing], served: Iterable[tuple[int, int, int]]) -> list[list[Op]]:
    """Rows with each message where its ranks were when it left; `served` as in `ArbiterRun`."""
    graph = order.graph
    at: dict[tuple[int, int], list[Op]] = {}
    for number, sender_ran, receiver_ran in served:
        message = crossings[number]
        at.setdefault((message.source, sender_ran), []).append(message.send)
        at.setdefault((message.target, receiver_ran), []).append(other_end(message.send))
    rows: list[list[Op]] = []
    for rank in range(graph.num_ranks):
        first = graph.first[rank]
        row: list[Op] = []
        for place, op in enumerate(range(first, graph.first[rank + 1])):
            row += [*at.get((rank, place), ()), graph.ops[op]]
        rows.append([*row, *at.get((rank, graph.first[rank + 1] - first), ())])
    return rows
