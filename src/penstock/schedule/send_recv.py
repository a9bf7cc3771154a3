"""Schedules that have their messages as ops: whether each is there at both ends, and in one order.

Messages between two ranks bear no name on the wire: the first that one rank sends is the first that the other
receives. So a rank's sends to a peer and the peer's receives from it must name the same messages in the same
order, activations and gradients together.

    rank 0 | F0 SEND_F0 F1 SEND_F1 ...
    rank 1 | RECV_F1 RECV_F0 ...           wrong: F1 would run on what F0 sent
"""

from __future__ import annotations

from dataclasses import replace

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
