"""Messages as ops of their own: where ranks send and receive, written into the schedule.

Penstock's runtime places messages itself and needs none of this. Runtimes that run a list of actions do,
torch's pipelining among them.

    before   rank 0 | F0 F1 .  .  B0 .  B1
             rank 1 | .  F0 B0 .  F1 B1

    after    rank 0 | F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1
             rank 1 | RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 B1 SEND_B1

A receive stands where its rank is when the message leaves: not later, so that it is posted before the op that
needs it could run; not earlier, so that it blocks no other message on its line. Because a send and its
receive are placed in one moment of one run, all rows agree on an order of all messages. A runtime that lets every
send wait for its receive (a rendezvous, the strictest that there is) can follow that order, so none can hang,
and two messages between the same ranks are never taken for each other.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from penstock.cost import Costs
from penstock.dispatch import lower
from penstock.engine.network import OpGraph
from penstock.engine.timing import Timer
from penstock.schedule import Op, Schedule, ScheduleError, check
from penstock.schedule.send_recv import other_end, remove_communication, send_of

__all__ = ["add_communication", "remove_communication"]

_UNIT = {"B": 2.0}
"""Time of an op where no costs are given, for those that do not take 1."""


def add_communication(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The schedule with SEND_F, RECV_F, SEND_B and RECV_B for every message between two ranks.

    The compute ops keep their order. Messages that were there already are placed anew; stages side by side
    on one rank need none.

    Args:
        schedule: what gets the messages.
        costs: when each op ends decides where receives stand; by default every op takes 1 and B takes 2.

    Raises:
        ScheduleError: the schedule is not valid, or has shared stages, branches or registered kinds, whose
            messages these four kinds cannot tell apart.

    Examples:
        >>> import penstock as ps
        >>> s = ps.passes.add_communication(ps.build("1f1b", 2, 2))
        >>> [str(op) for op in s.order[1][:4]]
        ['1RECV_F0', '1F0', '1RECV_F1', '1B0']
    """
    schedule = remove_communication(schedule)
    _refuse_graphs(schedule)
    check(schedule)
    graph = lower(schedule)
    ops = OpGraph(graph.arrays["first"], graph.arrays["rank"], graph.sources, graph.arrays["edge_to"])
    timer = Timer(*ops.network())
    takes = np.array([_UNIT.get(op.kind, 1.0) if costs is None else costs.duration(*op) for op in graph.ops])
    for forward, backward in graph.backward_of.items():
        pair = (graph.ops[forward], graph.ops[backward])
        takes[forward] = takes[[forward, backward]].sum() if costs is None else costs.pair_duration(*pair)
        takes[backward] = 0.0
    joined = set(graph.backward_of.values())
    start = timer.time(ops.row, takes).start
    depth = timer.time(ops.row, np.ones(graph.num_ops)).start
    """Where ops take no time it says which of those that start together comes first."""
    rows: list[list[Op]] = [[] for _ in schedule.order]
    unsent: list[tuple[float, int, Op, Op]] = []

    def send_until(time: float) -> None:
        while unsent and unsent[0][0] <= time:
            _, sender, send, receive = heapq.heappop(unsent)
            rows[sender].append(send)
            rows[schedule.rank_of(receive.stage, receive.microbatch)].append(receive)

    for number in sorted(range(graph.num_ops), key=lambda o: (start[o], depth[o], graph.rank[o])):
        if number in joined:  # with its forward
            continue
        rank = graph.rank[number]
        send_until(start[number])
        both = (number, graph.backward_of[number]) if number in graph.backward_of else (number,)
        rows[rank] += [graph.ops[each] for each in both]
        for op in (graph.ops[each] for each in both):
            if (send := send_of(op)) is not None:
                receive = other_end(send)
                if (
                    0 <= receive.stage < schedule.num_stages
                    and schedule.rank_of(receive.stage, op.microbatch) != rank
                ):
                    heapq.heappush(unsent, (start[number] + takes[number], rank, send, receive))
    send_until(float("inf"))
    return replace(schedule, order=tuple(tuple(row) for row in rows))


def _refuse_graphs(schedule: Schedule) -> None:
    if schedule.has_shared_ops:
        raise ScheduleError(
            "communication ops are between one rank and another, but this schedule has stages or ops that several "
            "ranks run together; give each stage one rank",
            rule="communication",
        )
    if schedule.updates is not None and schedule.placement.num_pipelines > 1:
        raise ScheduleError(
            "communication ops carry activations and gradients between stages, not what updates send between the "
            "copies of one; give the schedule without its updates (U)",
            rule="communication",
        )
    if not schedule.graph.is_chain:
        raise ScheduleError(
            "communication ops say which stage sends, not to which, so they fit a plain chain of stages; this "
            "schedule has a stage graph (branches, counts of its own or registered kinds)",
            rule="communication",
        )
