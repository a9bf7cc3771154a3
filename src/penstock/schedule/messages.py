"""Schedules that have their messages as ops: whether each is there at both ends, what carries them, and what hangs.

Messages between two ranks bear no name on the wire: the first that one rank sends is the first that the other
receives. So a rank's sends to a peer and the peer's receives from it must name the same messages in the same
order, activations and gradients together.

    rank 0 | F0 SEND_F0 F1 SEND_F1 ...
    rank 1 | RECV_F1 RECV_F0 ...           wrong: F1 would run on what F0 sent

On a channel, a rank posts a SEND or a RECV when its row gets there, and goes on. The data of the message then leaves:

    buffered    when the send is posted; Penstock's own transports
    gloo        when the send is posted and the sender knows of the receive, which takes the way back
    nccl        when both ends are the oldest on their rank's one stream (one communicator)
    nccl-pair   the same, with a stream for each pair of ranks
    nccl-edge   the same, with a stream for each directed pair of ranks

A stream carries one message at a time, in the order in which its rank posted them. So two ranks that post two
messages in opposite orders on one stream wait for each other:

    rank 0 | F0 SEND_F0 RECV_B0 ...        rank 0's stream begins with F0's message,
    rank 1 | ... SEND_B0 RECV_F0           rank 1's stream with B0's: neither begins

`message_network` says what waits for what, as nodes and their needs. `find_circle` proves that every node is
reached; `simulation.channels` times the same nodes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from penstock.schedule.dependencies import compute_op, predecessors
from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, COMMUNICATION, FORWARD, INPUT, Op
from penstock.schedule.schedule import Schedule, require_schedule


def has_communication(schedule: Schedule) -> bool:
    """Whether any message is an op of the schedule."""
    return schedule.columns is None and any(op.kind in COMMUNICATION for row in schedule.order for op in row)


def remove_communication(schedule: Schedule) -> Schedule:
    """The schedule without SEND_F, RECV_F, SEND_B and RECV_B: ranks send what they have, and take what has come.

    Args:
        schedule: with messages as ops.

    Raises:
        ScheduleError: it is no schedule.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("1f1b", 2, 2)
        >>> ps.passes.remove_communication(ps.passes.add_communication(s)) == s
        True
    """
    require_schedule(schedule)
    if not has_communication(schedule):
        return schedule
    rows = tuple(tuple(op for op in row if op.kind not in COMMUNICATION) for row in schedule.order)
    return replace(schedule, order=rows)


def other_end(op: Op) -> Op:
    """The receive of a send, the send of a receive."""
    way, direction = op.kind.split("_")
    step = 1 if (way == "SEND") == (direction == "F") else -1
    return Op(f"{'RECV' if way == 'SEND' else 'SEND'}_{direction}", op.stage + step, op.microbatch)


def find_mismatch(schedule: Schedule) -> tuple[int, int, Op, str, str] | None:
    """The first wrong message of a schedule on a plain chain of stages, whose ops are each there once.

    Returns:
        Its rank, step and op, what is wrong with it, and the other end that is missing or does not match.
    """
    place = {op: (rank, step) for rank, row in enumerate(schedule.order) for step, op in enumerate(row)}
    between: dict[tuple[int, int], tuple[list[Op], list[Op]]] = {}
    for op, (rank, step) in place.items():
        if op.kind in COMMUNICATION:
            other = other_end(op)
            if other not in place:
                return rank, step, op, f"its other end, {other}, is nowhere", str(other)
            peer = place[other][0]
            if peer == rank:
                return rank, step, op, f"its other end, {other}, is on this rank too; leave both out", str(other)
            sending = op.kind.startswith("SEND")
            between.setdefault((rank, peer) if sending else (peer, rank), ([], []))[not sending].append(op)
        elif (send := send_of(op)) is not None and 0 <= other_end(send).stage < schedule.num_stages:
            receiver = schedule.rank_of(other_end(send).stage, op.microbatch)
            if receiver != rank and send not in place:
                message = (
                    f"its result goes to rank {receiver}, but there is no {send}; this schedule has messages as ops"
                )
                return rank, step, op, message, str(send)
    for (sender, receiver), (sends, receives) in between.items():
        for number, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            if other_end(send) != receive:
                message = (
                    f"it is number {number} from rank {sender} to rank {receiver}, but number {number} to be sent is "
                    f"{send}, at step {place[send][1]} there; messages are matched by their order, so it would get "
                    "other data"
                )
                return *place[receive], receive, message, str(send)
    return None


def send_of(op: Op) -> Op | None:
    """The send of a compute op's result."""
    if op.kind == FORWARD:
        return Op("SEND_F", op.stage, op.microbatch)
    if op.kind in (BACKWARD, INPUT):
        return Op("SEND_B", op.stage, op.microbatch)
    return None


BUFFERED, GLOO, NCCL, NCCL_PAIR, NCCL_EDGE = CHANNELS = ("buffered", "gloo", "nccl", "nccl-pair", "nccl-edge")


def require_channel(name: str) -> str:
    """The name of a channel. Raises ScheduleError for any other text."""
    if name not in CHANNELS:
        raise ScheduleError(f"channels {name!r}: give one of {', '.join(CHANNELS)}", rule="channels")
    return name


def shares_streams(channel: str) -> bool:
    """Whether messages of different directed links share a stream, so that their order can hang."""
    return channel in (NCCL, NCCL_PAIR)


def stream_of(channel: str, rank: int, source: int, target: int) -> Hashable | None:
    """The stream that carries a message from `source` to `target` at its end on `rank`; None without streams."""
    if channel == NCCL:
        return (rank,)
    if channel == NCCL_PAIR:
        return rank, min(source, target), max(source, target)
    return (rank, source, target) if channel == NCCL_EDGE else None


@dataclass(frozen=True)
class PlacedMessage:
    """A message between two ranks, with both its ends as ops.

    Attributes:
        send, receive: its ends, as ops of the rows of the ranks `source` and `target`.
        made, used: the compute op whose result the message carries, and the compute op that needs this result.
    """

    send: Op
    receive: Op
    source: int
    target: int
    made: Op
    used: Op


@dataclass(frozen=True)
class MessageNetwork:
    """What waits for what in a schedule that has its messages as ops, on one channel.

    Nodes are the ops, row by row, and after them the transfers.

    Attributes:
        ops: the op of each of the first nodes. rank: its rank. step: its place in the row.
        transfers: the message of each of the other nodes.
        needs: of each node, the nodes that must have ended. The first need of an op is the op before it in its row.
    """

    ops: list[Op]
    rank: list[int]
    step: list[int]
    transfers: list[PlacedMessage]
    needs: list[list[int]]

    def count_needs(self) -> tuple[list[list[int]], list[int]]:
        """For each node, the nodes that need it, and the number of its own needs. The caller may count them down."""
        unlocks: list[list[int]] = [[] for _ in self.needs]
        for node, needs in enumerate(self.needs):
            for need in needs:
                unlocks[need].append(node)
        return unlocks, [len(needs) for needs in self.needs]


def message_network(schedule: Schedule, channel: str) -> MessageNetwork:
    """What waits for what in a schedule whose messages are there at both ends (see `find_mismatch`)."""
    spots = [(op, rank, step) for rank, row in enumerate(schedule.order) for step, op in enumerate(row)]
    number = {op: node for node, (op, _, _) in enumerate(spots)}
    sends = [node for node, (op, _, _) in enumerate(spots) if op.kind.startswith("SEND_")]
    transfers = []
    for node in sends:
        send, source, _ = spots[node]
        receive = other_end(send)
        made, used = (compute_op(end, number) for end in (send, receive))
        transfers.append(PlacedMessage(send, receive, source, spots[number[receive]][1], made, used))
    by_send = {transfer.send: len(spots) + index for index, transfer in enumerate(transfers)}
    by_end = by_send | {transfer.receive: by_send[transfer.send] for transfer in transfers}
    needs: list[list[int]] = [[node - 1] if step else [] for node, (_, _, step) in enumerate(spots)]
    needs += [
        [number[transfer.send], *([] if channel == BUFFERED else [number[transfer.receive]])]
        for transfer in transfers
    ]
    latest: dict[Hashable, int] = {}
    for node, (op, rank, _) in enumerate(spots):
        if op.kind not in COMMUNICATION:
            needs[node] += [by_send.get(each, number[each]) for each in predecessors(op, schedule.graph, number)]
            continue
        carried = transfers[by_end[op] - len(spots)]
        stream = stream_of(channel, rank, carried.source, carried.target)
        if stream is not None:
            if stream in latest:
                needs[by_end[op]].append(latest[stream])
            latest[stream] = by_end[op]
    return MessageNetwork(
        [op for op, _, _ in spots], [rank for _, rank, _ in spots], [step for *_, step in spots], transfers, needs
    )


def message_at(network: MessageNetwork, node: int) -> PlacedMessage:
    """The message that a node stands for. The node must not be an op."""
    return network.transfers[node - len(network.ops)]


def find_circle(network: MessageNetwork) -> list[int]:
    """Nodes that wait in a circle, each for the next and the last for the first. Empty if all nodes are reached."""
    unlocks, missing = network.count_needs()
    ready = [node for node, count in enumerate(missing) if not count]
    while ready:
        for after in unlocks[ready.pop()]:
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    if not any(missing):
        return []
    node = next(node for node, count in enumerate(missing) if count)
    path: list[int] = []
    while node not in path:
        path.append(node)
        node = next(need for need in network.needs[node] if missing[need])
    return path[path.index(node) :]


def explain_circle(network: MessageNetwork, circle: list[int]) -> list[str]:
    """A sentence for each wait in a circle, except where an op only waits for the op before it in its row."""
    lines = []
    for node, need in zip(circle, [*circle[1:], circle[0]], strict=True):
        if node < len(network.ops):
            if need >= len(network.ops):
                sent = message_at(network, need)
                lines.append(f"{_at(network, node)} waits for {sent.send} from rank {sent.source}")
            continue
        message = message_at(network, node)
        name = f"the message {message.send} from rank {message.source} to rank {message.target}"
        if need < len(network.ops):
            lines.append(f"{name} waits until {_at(network, need)} is reached")
        else:
            before = message_at(network, need)
            rank, step = next(
                (rank, network.step[first])
                for first, rank in _ends_of(network, before)
                for second, other in _ends_of(network, message)
                if rank == other and first < second
            )
            lines.append(f"{name} waits behind {before.send}, which rank {rank} posts earlier, at step {step}")
    return lines


def _ends_of(network: MessageNetwork, message: PlacedMessage) -> list[tuple[int, int]]:
    """The nodes of the two ends of a message, each with its rank."""
    return [
        (network.ops.index(end), rank)
        for end, rank in ((message.send, message.source), (message.receive, message.target))
    ]


def _at(network: MessageNetwork, node: int) -> str:
    return f"rank {network.rank[node]} at step {network.step[node]}, {network.ops[node]},"
