"""A rehearsal: the controller against simulated iterations, on links that change between them or within them.

    simulate an iteration --> its messages' times --> Controller --> Decision
            ^                                                           |
            +------------- runs `delay` iterations later ---------------+

It answers what a job would gain, before a job runs; the runtime then closes the same loop with real messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.control.configuration import Configuration, Job
from penstock.control.controller import Controller
from penstock.control.decision import Decision
from penstock.control.events import OP_KINDS, Event, IterationEnded, Link, OpTimes, Switched, Transfers
from penstock.cost import Costs, Links
from penstock.simulation import Timeline, simulate


@dataclass(frozen=True)
class Rehearsed:
    """One iteration.

    Attributes:
        number: from 0; start: when it began (ms); ms: how long it took.
        decision: the number of the decision that was in force; 0 is the start.
        peaks: most activations each rank held.
    """

    number: int
    start: float
    ms: float
    decision: int
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class Rehearsal:
    """All iterations, all decisions."""

    iterations: tuple[Rehearsed, ...]
    decisions: tuple[Decision, ...]

    @property
    def ms(self) -> float:
        """How long all took together."""
        return sum(each.ms for each in self.iterations)

    @property
    def iterations_per_minute(self) -> float:
        return len(self.iterations) / self.ms * 60e3


def run_once(job: Job, configuration: Configuration, links: Links, at: float = 0.0) -> Timeline:
    """One simulated iteration of a configuration that begins at the moment `at` (ms) of the links' conditions."""
    return simulate(
        configuration.schedule,
        job.costs,
        links=links,
        links_at=at,
        dispatch=configuration.dispatch,
        transport=job.transport(configuration.delegated),
        memory_limit=configuration.caps if configuration.dispatch.is_dynamic else None,
    )


def measured_events(timeline: Timeline, number: int, costs: Costs) -> list[Event]:
    """What the ranks would report of an iteration: times of its messages, waiting left out, and of its ops."""
    blocked = {(timed.rank, timed.op): timed.blocked for timed in timeline.ops if timed.blocked}
    rows: dict[Link, list[tuple[float, float, float]]] = {}
    for message in timeline.messages:
        left = message.sent + blocked.get((message.source_rank, message.source), 0.0)
        size = costs.message_size(message.source, message.target)
        rows.setdefault((message.source_rank, message.target_rank), []).append((size, left, message.arrived))
    ops: dict[tuple[int, int], list[tuple[str, float]]] = {}
    for timed in timeline.ops:
        if timed.op.kind in OP_KINDS:
            ops.setdefault((timed.rank, timed.op.stage), []).append((timed.op.kind, timed.end - timed.start))
    return [
        *(Transfers.of(link, each) for link, each in sorted(rows.items())),
        *(OpTimes.of(rank, stage, each) for (rank, stage), each in sorted(ops.items())),
        IterationEnded(number, timeline.makespan),
    ]


def rehearse(
    controller: Controller,
    conditions: Links,
    *,
    until: float,
    begin: float = 0.0,
    delay: int = 1,
    costs: Callable[[float], Costs] | None = None,
) -> Rehearsal:
    """Runs iterations from `begin` until the moment `until` (ms) of the links' conditions.

    Args:
        controller: fresh, or from another rehearsal.
        delay: iterations that still run what ran before, from a decision until all ranks have committed it.
        costs: what ops really take in an iteration that begins at a moment (ms); by default what the job assumes.
    """
    job = controller.job
    now, number, when = begin, 0, 0
    iterations: list[Rehearsed] = []
    decisions: list[Decision] = []
    in_force = 0
    while now < until:
        waiting = controller.waiting
        if waiting is not None and number >= when:
            in_force = waiting.number
            controller.feed(Switched(waiting.number))
        real = job if costs is None else replace(job, costs=costs(now))
        timeline = run_once(real, controller.now, conditions, now)
        iterations.append(Rehearsed(number, now, timeline.makespan, in_force, timeline.peak_activations))
        for event in measured_events(timeline, number, job.costs):
            if made := controller.feed(event):
                decisions += made
                when = number + 1 + delay
        now += timeline.makespan
        number += 1
    return Rehearsal(tuple(iterations), tuple(decisions))
