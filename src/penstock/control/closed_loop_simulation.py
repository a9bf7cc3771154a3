"""The controller without a job: rehearsed with simulated iterations, or with the events of a log (`replay`).

    simulate an iteration --> its messages' times --> Controller --> Decision
            ^                                                           |
            +------------- runs `delay` iterations later ---------------+

Links change between the iterations or within them. A rehearsal says what a job would gain before the job runs, and
the runtime then closes the same loop with real messages. If the job has a mesh, links join its nodes, which are
probed every few iterations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from penstock.control.configuration import Configuration, Job
from penstock.control.controller import Controller
from penstock.control.decide import Decision
from penstock.control.events import (
    OP_KINDS,
    ControlError,
    Event,
    IterationEnded,
    Link,
    OpTimes,
    Probed,
    Switched,
    Transfers,
    event_from_json,
    slowest_of,
)
from penstock.control.log import json_lines, read_header
from penstock.control.orchestrator import link_times
from penstock.cost import Costs, Links, Mesh
from penstock.cost.links import LinkQueues
from penstock.simulation import Timeline, simulate
from penstock.simulation.mesh import simulate_mesh
from penstock.simulation.transport import as_transport

PROBE_EVERY = 5
"""Iterations from one round of probes between the nodes of a mesh to the next."""


@dataclass(frozen=True)
class Rehearsed:
    """One iteration of a rehearsal.

    Attributes:
        number: from 0.
        start: when it began, in ms.
        ms: how long it took.
        decision: the number of the decision that was in force; 0 is the start.
        peaks: the most activations that each rank held.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> run = ps.control.rehearse(ps.control.Controller(job), ps.Links(), until=1_000)
        >>> first = run.iterations[0]
        >>> first.start, first.ms == ps.simulate(zb, costs).makespan, first.decision
        (0.0, True, 0)
    """

    number: int
    start: float
    ms: float
    decision: int
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class Rehearsal:
    """What a simulated run with a controller came to.

    Attributes:
        iterations: all iterations, in order.
        decisions: all decisions, in order.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> late = ps.Links.parse("2:3=latency:steps:0ms/0ms,1600ms/60ms")
        >>> run = ps.control.rehearse(ps.control.Controller(job), late, until=8_000)
        >>> len(run.decisions) > 0, run.iterations[0].number
        (True, 0)
    """

    iterations: tuple[Rehearsed, ...]
    decisions: tuple[Decision, ...]

    @property
    def ms(self) -> float:
        """The time of all iterations together."""
        return sum(each.ms for each in self.iterations)


def run_once(job: Job, configuration: Configuration, links: Links, at: float = 0.0) -> Timeline:
    """Simulates one iteration.

    Args:
        job: the costs and the placement.
        configuration: what runs.
        links: the conditions of the links.
        at: the moment of these conditions at which it begins, in ms.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> ps.control.run_once(job, start, ps.Links({(2, 3): 60.0})).makespan > ps.simulate(zb, costs).makespan
        True
    """
    return simulate(configuration.schedule, job.costs, **as_run(job.transport, configuration, links, at))


def as_run(
    transport: str, configuration: Configuration, links: Links | LinkQueues, at: float = 0.0
) -> dict[str, Any]:
    """How an iteration is simulated, as arguments of `simulate` and `simulate_mesh`."""
    return {
        "links": links,
        "links_at": at,
        "dispatch": configuration.dispatch,
        "transport": as_transport(transport, configuration.delegated),
        "memory_limit": configuration.caps if configuration.dispatch.is_dynamic else None,
    }


def measured_events(timeline: Timeline, number: int, costs: Costs) -> list[Event]:
    """What the ranks would report of an iteration: the times of its messages, without waiting, and of its ops.

    Args:
        timeline: the simulated iteration.
        number: the number of the iteration.
        costs: what messages and ops cost, for their bytes.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs.uniform(2, f=10, i=10, w=10)
        >>> t = ps.simulate(ps.build("1f1b", 2, 4), costs, links=ps.Links({(0, 1): 5.0}))
        >>> [type(each).__name__ for each in ps.control.measured_events(t, 0, costs)]
        ['Transfers', 'Transfers', 'OpTimes', 'OpTimes', 'IterationEnded']
    """
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
    delay: int = 1,
    costs: Callable[[float], Costs] | None = None,
) -> Rehearsal:
    """Simulates iterations in which a controller decides, until a moment of the links' conditions.

    Args:
        controller: fresh, or from another rehearsal.
        conditions: the links over time.
        until: the moment at which it ends, in ms.
        delay: iterations that still run the old configuration, from a decision until all ranks have committed it.
        costs: what ops really take in an iteration that begins at a moment (ms); by default what the job assumes.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> late = ps.Links.parse("2:3=latency:steps:0ms/0ms,1600ms/60ms")
        >>> run = ps.control.rehearse(ps.control.Controller(job), late, until=8_000)
        >>> max(each.ms for each in run.iterations) > run.iterations[-1].ms
        True
    """
    job = controller.job
    now, number, when = 0.0, 0, 0
    iterations: list[Rehearsed] = []
    decisions: list[Decision] = []
    in_force = 0
    while now < until:
        waiting = controller.waiting
        if waiting is not None and number >= when:
            in_force = waiting.number
            controller.feed(Switched(waiting.number))
        real = job if costs is None else replace(job, costs=costs(now))
        ms, timelines = _once(real, controller.now, conditions, now)
        held = tuple(map(max, zip(*(each.peak_activations for each in timelines), strict=True)))
        iterations.append(Rehearsed(number, now, ms, in_force, held))
        events = slowest_of(measured_events(each, number, job.costs) for each in timelines)
        events = [replace(each, ms=ms) if isinstance(each, IterationEnded) else each for each in events]
        if job.mesh is not None and (number + 1) % PROBE_EVERY == 0:
            events.append(probes(job.mesh, conditions, now + ms))
        while events:
            if made := controller.feed(events.pop(0)):
                decisions += made
                when = number + 1 + delay
            if not events and controller.search is not None:
                events.append(controller.search())
        now += ms
        number += 1
    return Rehearsal(tuple(iterations), tuple(decisions))


def probes(mesh: Mesh, conditions: Links, at: float) -> Probed:
    """What messages between all nodes of a mesh take at a moment (ms) of the links' conditions."""
    return Probed.of(link_times(combinations(range(mesh.num_nodes), 2), conditions, at))


def _once(job: Job, configuration: Configuration, links: Links, at: float) -> tuple[float, Sequence[Timeline]]:
    """How long an iteration takes (ms), and the pipelines in it."""
    if job.mesh is None:
        timeline = run_once(job, configuration, links, at)
        return timeline.makespan, (timeline,)
    ran = simulate_mesh(
        configuration.schedule,
        job.costs,
        replace(job.mesh, nodes=configuration.nodes),
        ring=job.ring,
        **as_run(job.transport, configuration, links, at),
    )
    return ran.iteration, ran.replicas


def replay(lines: Iterable[str]) -> tuple[Decision, ...]:
    """Feeds a log's events to a new controller, and compares its decisions with those of the log.

    If a log was cut off in the middle of its last line, or before the decision of its last event, it is read up to
    there.

    Args:
        lines: the lines of the log.

    Raises:
        ControlError: it is no log, or one of another version, or a decision differs; the message names the line.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> lines = []
        >>> late = ps.Links.parse("2:3=latency:steps:0ms/0ms,1600ms/60ms")
        >>> run = ps.control.rehearse(ps.control.Controller(job, log=lines.append), late, until=8_000)
        >>> ps.control.replay(lines) == run.decisions
        True
    """
    controller: Controller | None = None
    made, again = list[Decision](), list[str]()
    for number, value in enumerate(json_lines(lines, "the log"), start=1):
        if controller is None:
            controller = Controller(read_header(value), log=again.append)
        elif "event" in value and len(again) < number:
            made += controller.feed(event_from_json(value["event"]))
        replayed = again[number - 1] if len(again) >= number else "null"
        if json.loads(replayed) != value:
            raise ControlError(f"line {number}: the log has {str(value)[:200]}, replayed: {replayed[:200]}")
    if controller is None:
        raise ControlError("an empty log: its first line must name the job")
    return tuple(made)
