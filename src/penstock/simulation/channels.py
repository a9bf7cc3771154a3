"""Times a schedule that has its messages as ops: when each is posted, when its data leaves and when it arrives.

    rank 0 | F0 SEND_F0 F1 ...          posted when rank 0 gets there
                  |  .  .  .            waits for the receive, and for what is before it on the stream
                  '---------.           leaves
    rank 1 |  RECV_F0        '--> F0    travels as the link says, and arrives

The nodes and what each waits for are those of `schedule.messages`, which proves that none hangs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from penstock.cost import Costs
from penstock.cost.conditions import LinkQueue
from penstock.cost.links import LinkQueues
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.messages import GLOO, MessageNetwork, message_at, message_network, remove_communication
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
