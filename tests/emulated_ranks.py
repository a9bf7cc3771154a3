"""Emulated ranks, a thread each, over mailboxes that the test makes: what a transport does to a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import penstock as ps
from penstock.cost import Links
from penstock.dispatch import Dispatch, Dispatcher
from penstock.runtime.emulation.backend import EmulatedBackend
from penstock.runtime.execute.executors import run_rank
from penstock.runtime.execute.timeline import measured_timeline
from penstock.runtime.execute.worker import Worker
from penstock.runtime.transport.base import StepMessages, TransferRecord, Transport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from penstock.runtime.transport.loopback import Mailbox, loopback_ends
from penstock.runtime.transport.wiring import WiredOp, Wiring, wire
from penstock.schedule import Op, Schedule
from penstock.simulation import Timeline
from penstock.simulation.lowered import frozen_caps, memory_changes
from waiting import PATIENCE


@dataclass(frozen=True)
class Ran:
    """One step.

    Attributes:
        times: (op, start, end) in ns, by rank.
        crossings: by the rank that they came to.
    """

    times: list[list[tuple[Op, int, int]]]
    crossings: list[list[TransferRecord]]
    timeline: Timeline

    def started(self) -> dict[Op, int]:
        return {op: start for row in self.times for op, start, _ in row}


def in_thread(
    boxes: Sequence[Mailbox[Any]], rank: int, conditions: Conditions, timeout: float, depth: int | None = None
) -> Transport:
    """The end of a rank that is a thread, with conditions and perhaps a bound."""
    return loopback_ends(boxes, conditions, timeout, depth)[rank]


def wired_op(wiring: Wiring, op: Op) -> WiredOp:
    """An op with its edges."""
    return wiring.wired_ops[wiring.graph.number[op]]


def start_worker(wiring: Wiring, rank: int, costs: ps.Costs, dispatch: str, transport: Transport) -> Worker:
    change = memory_changes(wiring.graph, costs)
    caps = frozen_caps(wiring.graph, change)
    dispatcher = Dispatcher(wiring.graph, rank, Dispatch(dispatch), change, caps[rank])
    return Worker(wiring, rank, dispatcher, EmulatedBackend(wiring, costs, rank=rank), transport)


def run_threads(
    schedule: Schedule,
    costs: ps.Costs,
    links: str = "",
    depth: int | None = None,
    delegated: Sequence[Collection[tuple[int, int]]] = ((),),
    dispatch: str = "frozen",
    timeout: float = PATIENCE,
) -> list[Ran]:
    """One step for each of `delegated`, one after the other with no pause between: a rank that is done goes on."""
    wiring = wire(schedule)
    ranks = range(schedule.num_ranks)
    conditions = Conditions(Links.parse(links))
    boxes = [Mailbox() for _ in ranks]
    transports = [in_thread(boxes, rank, conditions, timeout, depth) for rank in ranks]
    found: list[list[Rank]] = [[] for _ in ranks]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        transport = transports[rank]
        try:
            for links_by_delegate in delegated:
                worker = start_worker(wiring, rank, costs, dispatch, transport)
                if isinstance(transport, ConditionedTransport):
                    transport.route(links_by_delegate)
                transport.begin(StepMessages())
                run_rank(worker)
                transport.end()
                found[rank].append((worker.times, worker.peak_held, transport.crossings()))
        except BaseException as error:
            errors.append(error)
            for box in boxes:
                box.lose(rank, None)

    in_threads([lambda rank=rank: work(rank) for rank in ranks])  # type: ignore[misc]
    if errors:
        raise errors[0]
    return [ran(wiring, [rows[step] for rows in found], dispatch) for step in range(len(delegated))]


Rank = tuple[list[tuple[Op, int, int]], float, list[TransferRecord]]
"""Of one rank: start and end of its ops, the most it held, what came to it."""


def ran(wiring: Wiring, found: Sequence[Rank], dispatch: str) -> Ran:
    times = [rank[0] for rank in found]
    timeline = measured_timeline(wiring, times, [rank[1] for rank in found], dispatch)
    return Ran(times, [rank[2] for rank in found], timeline)


def in_threads(functions: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def blocked_starts(ran: Ran, depth: int, bounded: Callable[[int, int], bool] = lambda a, b: True) -> int:
    """Checks what a channel of `depth` promises; returns how often it held an op up.

    The message `depth` places behind another is sent, and what its sender runs next starts, only after that one has
    arrived.
    """
    held_up = 0
    by_link: dict[tuple[int, int], list[TransferRecord]] = {}
    for crossings in ran.crossings:
        for crossing in crossings:
            by_link.setdefault((crossing.source, crossing.target), []).append(crossing)
    for (source, target), crossings in by_link.items():
        if not bounded(source, target):
            continue
        crossings.sort(key=lambda crossing: crossing.sent)
        starts = sorted(start for _, start, _ in ran.times[source])
        for first, later in zip(crossings, crossings[depth:], strict=False):
            assert later.sent >= first.arrived, f"{source}>{target}: more than {depth} under way"
            next_start = min((start for start in starts if start >= later.sent), default=None)
            assert next_start is None or next_start >= first.arrived
            # Handed over later than the op before ended: the rank stood still for it.
            ended = max(end for _, _, end in ran.times[source] if end <= later.sent)
            held_up += ended < first.arrived
    return held_up
