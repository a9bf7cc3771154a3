"""A pipeline of emulated devices: dispatch, messages and clocks are real, and ops only take time.

    with EmulatedPipeline(schedule, costs, links=conditions, transport="direct", adapt=ps.AdaptOptions()) as pipe:
        step = pipe.step()
        print(step.number, step.timeline.makespan, pipe.simulated([step])[0].makespan)

    run = ps.emulate(ps.build("1f1b", 8, 16), ps.Costs.uniform(8, 10, 10, 10), links=conditions)
    run.timelines[0].makespan, run.simulated[0].makespan, run.median_error

Each rank is a thread of this process, or a process if torch.distributed is set up with several. A rank sleeps through
its ops, so two cores can stand for sixteen accelerators. `penstock emulate` starts one process per rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from time import perf_counter_ns
from typing import Any

import torch

from penstock.control import Configuration
from penstock.control.closed_loop_simulation import as_run
from penstock.cost import CostError, Costs, Links
from penstock.cost.links import LinkQueues
from penstock.dispatch import Dispatch, lower
from penstock.runtime.adapt import AdaptOptions, RunSetting, Vote, start_agent
from penstock.runtime.compatibility import allowed_adaptation, require_runnable
from penstock.runtime.emulation.backend import EmulatedDevices, Ended, ProcessBarrier, ThreadedRanks
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.executors import StepExecutor
from penstock.runtime.execute.plan import ActivePlan, activate, dispatch_of, require_free, require_switchable
from penstock.runtime.execute.step_end import Notices
from penstock.runtime.execute.timeline import measured_of, measured_timeline
from penstock.runtime.execute.worker import Worker
from penstock.runtime.mesh.interfaces import clock_name
from penstock.runtime.mesh.peers import (
    GroupPeers,
    LocalPeers,
    meeting_groups,
    peers_of,
    require_same,
    schedule_digest,
)
from penstock.runtime.transport.base import TransferRecord, Transport
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.choose import TransportChoice, TransportOptions
from penstock.runtime.transport.link_conditions import Conditions
from penstock.runtime.transport.wiring import num_indices
from penstock.schedule import Op, Schedule, check
from penstock.schedule.messages import remove_communication
from penstock.schedule.placement import ranks_together
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Timeline, simulate
from penstock.simulation.lowered import frozen_caps, memory_changes
from penstock.unknown_names import refuse_unknown


@dataclass(frozen=True)
class EmulatedStep:
    """One emulated step, the same on every rank. All times are as if the stretch were 1.

    Attributes:
        timeline: the measured timeline.
        start: when the step began, in ms of the conditions' time.
        began: when the step began, in ns of the monotonic clock.
        configuration: what ran.
        number: the number of the decision that the configuration comes from; 0 for the start.
        late: how long after its due moment each op ended (ms).
        crossings: messages that arrived at the ranks in this process, in the clock's own times.
    """

    timeline: Timeline
    start: float
    configuration: Configuration
    number: int
    late: tuple[float, ...]
    began: int
    crossings: tuple[TransferRecord, ...] = ()


class EmulatedPipeline:
    """A pipeline of emulated devices: one thread per rank, or one process per rank under torch.distributed.

    With several processes, every rank makes the same calls and gets the same results.

    Args:
        schedule: the schedule to run.
        costs: costs of its stages: milliseconds, and bytes of messages.
        links: conditions that are injected into the transport, in addition to the time that it takes itself.
        dispatch: "frozen", "hinted", "dynamic" or "auto" (the fastest of them, by simulation over `links`).
        memory_limit: most activations per rank, as in `ps.simulate`.
        stretch: factor by which ops and conditions are slowed down, so that noise of the machine matters less.
        timeout: the longest time that any wait may last (seconds).
        mesh: as in `ps.Pipeline`; or `LocalPeers`, whose ranks are threads even if torch.distributed is set up.
        transport: "host", "direct" or "delegate", or `TransportOptions` (without `links`, which are given here).
            Between threads, "delegate" is the same as "host" and copies nothing.
        adapt: how to measure and switch during the run. None: not at all.

    Attributes:
        configuration: what the next step runs.
        number: the number of the decision that the configuration comes from.

    Raises:
        ScheduleError: the schedule is not valid, or a cap is below what it needs.
        CostError: costs for another number of stages, a link that does not exist, or an invalid number.
        ControlError: invalid numbers for adapting.
        RuntimeFailure: a schedule or transport that the runtime can't run (the error names what), other calls on
            other ranks, or a store that cannot be reached.

    Examples:
        >>> import penstock as ps
        >>> s, costs = ps.build("1f1b", 2, 4), ps.Costs.uniform(2, f=2, i=2, w=2)
        >>> with ps.runtime.EmulatedPipeline(s, costs, links=ps.Links({(0, 1): 5.0})) as pipe:
        ...     step = pipe.step()
        >>> step.timeline.source, step.timeline.makespan >= ps.simulate(s, costs).makespan
        ('measured', True)
    """

    @refuse_unknown(RuntimeFailure)
    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        *,
        links: Links | None = None,
        dispatch: Dispatch | str = Dispatch.FROZEN,
        memory_limit: float | Sequence[float] | None = None,
        stretch: float = 1.0,
        timeout: float = 60.0,
        mesh: Any = None,
        transport: TransportOptions | str | None = None,
        adapt: AdaptOptions | None = None,
    ) -> None:
        schedule = remove_communication(schedule)
        check(schedule)
        adapt = allowed_adaptation(schedule, adapt)
        carried = TransportOptions.of(transport)
        if carried.links is not None:
            raise RuntimeFailure("conditions of emulated links are given as links=, not in TransportOptions")
        conditions = Links.of(links)
        conditions.check_ranks(schedule.num_ranks)
        costs.require_stages(schedule.num_stages)
        if not 0 < stretch < float("inf"):
            raise CostError(f"stretched by {stretch:g}: give a stretch above 0")
        if adapt is not None:
            costs = adapt.with_host_copies(costs)
        self.link_conditions, self.stretch = conditions, stretch
        self._costs = costs
        carried = replace(carried, links=conditions)
        self._choice = choice = TransportChoice(carried, adapt is not None and adapt.may_delegate)
        graph = lower(schedule)
        held = adapt.memory_limit if adapt is not None and memory_limit is None else memory_limit
        caps = tuple(frozen_caps(graph, memory_changes(graph, costs), held))
        chosen = dispatch_of(dispatch, schedule, costs, choice, conditions, held)
        self.configuration = Configuration(schedule, chosen, (), caps)
        self._peers = peers = mesh if isinstance(mesh, LocalPeers) else peers_of(mesh, schedule.num_ranks, timeout)
        self._notices = Notices(peers)
        self._rank, self.number = peers.here[0], 0
        self._plan = self._activated(self.configuration)
        self._transport: Transport | None = None
        self._conditions = Conditions(Links())
        with ExitStack() as on_failure:
            self._close = on_failure
            if isinstance(peers, GroupPeers):
                self._connect(peers, timeout)
            else:
                threads = ThreadedRanks(schedule.num_ranks, choice, self._conditions, timeout)
                on_failure.callback(threads.close)
                self._devices = EmulatedDevices(costs, stretch, threads.barrier, num_indices(schedule))
                self._executor = StepExecutor(self._devices, peers.here, choice, threads=threads)
            self._agent = None
            if adapt is not None:
                setting = RunSetting(self.configuration, adapt.costs or costs, choice, stretch)
                self._agent = start_agent(adapt, peers, setting, self._ready)
                on_failure.callback(self._agent.close)
            # Last of all, so that the conditions' time begins with the run, however long its agent takes to start.
            self._conditions.start(conditions, stretch, max(peers.gather(perf_counter_ns())))
            self._close = on_failure.pop_all()

    def _connect(self, peers: GroupPeers, timeout: float) -> None:
        """Opens this process's end of the transport, for its one rank. Every process must call it."""
        plan, choice = self._plan, self._choice
        require_runnable(plan.schedule)
        Conditions(self.link_conditions).require_own_queues()
        facts = {
            "schedule": schedule_digest(plan.schedule),
            "costs": astuple(self._costs),
            "link condition": str(self.link_conditions),
            "dispatch": plan.dispatch.value,
            "stretch": self.stretch,
            "transport": choice.shared,
            "machine, whose clock all go by": clock_name(),
        }
        require_same(peers.gather(facts), "every rank must make the same ps.emulate(...), all on one machine")
        barrier = ProcessBarrier(peers, meeting_groups(plan.schedule, peers), timeout)
        given = None if self.link_conditions == Links() else self._conditions
        self._transport = choice.make(peers, plan.tags, timeout, plan.plan.wiring, torch.device("cpu"), given)
        self._close.callback(self._transport.close)
        self._devices = EmulatedDevices(self._costs, 0.0, barrier, num_indices(plan.schedule))
        self._executor = StepExecutor(self._devices, peers.here, choice)
        # Connects the ranks and tells them all shapes, which later steps need not do.
        self._executor.run(plan, plan.plan, self._transport)
        self._transport.crossings()  # those messages had no conditions, so no step counts them
        self._devices.stretch = self.stretch

    def __enter__(self) -> EmulatedPipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def notices(self) -> list[str]:
        """Messages for the user about adapting: from all ranks in steps so far, and from this process since then."""
        self._notices.note(self._agent.notices if self._agent is not None else ())
        return self._notices.known()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decisions so far, as in the control log. Only rank 0's process has them."""
        return [] if self._agent is None else self._agent.decisions

    def step(self, ended: Ended | None = None) -> EmulatedStep:
        """Runs the schedule once.

        Args:
            ended: called at the end of each op in this process, in the thread of the op's rank.

        Raises:
            DeadlineExceeded, PeerLost: a message did not arrive.
        """
        plan, number, agent, transport = self._plan, self.number, self._agent, self._transport
        stretch, self._devices.ended = self.stretch, ended
        workers = self._executor.run(plan, plan.plan, transport)
        backends = [self._devices.backends[worker.rank] for worker in workers]
        start = backends[0].step_start
        seen = self._choice.seen(transport)
        measured = [measured_of(worker, start, _end(worker, start), *seen) for worker in workers]
        vote = None
        if agent is not None:
            vote = agent.vote(measured)
            self._notices.note(agent.notices)
        rows = [
            (worker.rank, _scaled(worker.times, stretch), _scaled(worker.async_times, stretch)) for worker in workers
        ]
        mine = [
            (*row, worker.peak_held, backend.late)
            for row, worker, backend in zip(rows, workers, backends, strict=True)
        ]
        gathered = self._peers.gather((mine, vote, self._notices.num_new))
        _, times, async_times, peaks, late = zip(*sorted(row for part, *_ in gathered for row in part), strict=True)
        if any(num_new for *_, num_new in gathered):
            self._notices.share()
        if agent is not None:
            following = agent.count_votes([Vote(*each) for _, each, _ in gathered])
            if following is not None:
                self._plan, self.number = following.made, following.number
                self.configuration = self._plan.configuration
        return EmulatedStep(
            measured_timeline(plan.plan.wiring, times, peaks, plan.dispatch.value, async_times),
            (start - self._conditions.origin) / 1e6 / stretch,
            plan.configuration,
            number,
            tuple(ns / 1e6 / stretch for row in late for ns in row),
            start,
            tuple(crossing for each in measured for crossing in each.crossings),
        )

    def reconfigure(self, configuration: Configuration) -> None:
        """Switches to something else from the next step on. Every rank must make the same call.

        Raises:
            RuntimeFailure: another placement, stage graph or number of microbatches; or the run adapts.
            ScheduleError: the schedule is not valid, or its caps are below what its own order needs.
        """
        require_free(self._agent is not None)
        plan = self._ready(configuration)
        gathered = self._peers.gather({"configuration": configuration.digest})
        require_same(gathered, "every rank must switch to the same", shown=False)
        self._plan, self.number = plan, self.number + 1
        self.configuration = configuration

    def simulated(self, steps: Sequence[EmulatedStep]) -> tuple[Timeline, ...]:
        """Simulates steps, one after another, each under the conditions of its time."""
        lines = LinkQueues(self.link_conditions)
        return tuple(
            simulate(
                step.configuration.schedule,
                self._costs,
                **as_run(self._choice.simulated, step.configuration, lines, step.start),
            )
            for step in steps
        )

    def close(self) -> None:
        """Stops adapting and closes the transports."""
        self._close.close()

    def _ready(self, configuration: Configuration) -> ActivePlan:
        require_switchable(configuration.schedule, self.configuration.schedule)
        self._choice.prepare(self._transport, configuration.delegated)
        return self._activated(configuration)

    def _activated(self, configuration: Configuration) -> ActivePlan:
        """Raises ScheduleError for a cap that is below what the schedule's own order needs."""
        plan = activate(configuration, (), self._rank, Tags(configuration.schedule), self._costs)
        frozen_caps(plan.plan.wiring.graph, plan.plan.memory_change, configuration.caps)
        return plan


def _end(worker: Worker, start: int) -> int:
    """When a rank ended its last op (ns)."""
    return worker.times[-1][2] if worker.times else start


def _scaled(times: Sequence[tuple[Op, int, int]], stretch: float) -> list[tuple[Op, int, int]]:
    if stretch == 1:
        return list(times)
    return [(op, round(start / stretch), round(end / stretch)) for op, start, end in times]


@dataclass(frozen=True)
class Lateness:
    """How late ops ended, after the moment at which they were due (ms): errors of sleeping, and a busy machine."""

    median: float
    worst: float


@dataclass(frozen=True)
class Emulation:
    """The result of an emulated run, the same on every rank.

    Attributes:
        timelines: the measured timeline of each step.
        simulated: the simulated timeline of each step, under the conditions at that time.
        own_latency: milliseconds that a message took in addition to the conditions: the median over messages that a
            rank waited for on links without conditions; 0 if there were none.
        conditions: the conditions of the links.
        starts: when each step began, in milliseconds of the conditions' time.
        late: how late the ops of all ranks ended.
        stretch: the factor by which ops and conditions were slowed down in the run. All times here are without it.
        configurations: what each step ran.
        numbers: for each configuration the number of the decision that it comes from; 0 for the start.
        notices: messages for the user about changes during the run.

    Examples:
        >>> import penstock as ps
        >>> s, costs = ps.build("1f1b", 2, 4), ps.Costs.uniform(2, f=2, i=2, w=2)
        >>> ran = ps.emulate(s, costs)
        >>> len(ran.timelines), ran.timelines[0].source, ran.simulated[0].makespan
        (1, 'measured', 30.0)
    """

    timelines: tuple[Timeline, ...]
    simulated: tuple[Timeline, ...]
    own_latency: float
    conditions: Links
    starts: tuple[float, ...]
    late: Lateness
    stretch: float
    configurations: tuple[Configuration, ...] = ()
    numbers: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()

    __repr__ = short_repr

    @property
    def errors(self) -> tuple[float, ...]:
        """`measured / simulated - 1` of each step's makespan."""
        pairs = zip(self.timelines, self.simulated, strict=True)
        return tuple(m.makespan / s.makespan - 1 if s.makespan else 0.0 for m, s in pairs)

    @property
    def median_error(self) -> float:
        """The median over the steps of the error of the simulated makespan, in either direction, as a share."""
        return statistics.median(map(abs, self.errors))


@refuse_unknown(RuntimeFailure)
def emulate(
    schedule: Schedule,
    costs: Costs,
    *,
    links: Links | None = None,
    dispatch: Dispatch | str = Dispatch.FROZEN,
    memory_limit: float | Sequence[float] | None = None,
    num_steps: int = 1,
    stretch: float = 1.0,
    timeout: float = 60.0,
    mesh: Any = None,
    transport: TransportOptions | str | None = None,
    adapt: AdaptOptions | None = None,
) -> Emulation:
    """Runs a schedule on emulated devices, and measures it.

    An emulated device computes nothing: each op takes the time that the costs give. Messages are real. They carry
    `costs.message_bytes`, and 16 bytes that identify them. With several processes, every rank makes the same call and
    gets the same result.

    Args:
        schedule: the schedule to run.
        costs: costs of its stages: milliseconds, and bytes of messages.
        num_steps: how many times to run it, one after another.
        links: delays and conditions of links between ranks. This and all that follows are as for `EmulatedPipeline`.
        dispatch: how a rank picks its next op: "frozen", "hinted", "dynamic" or "auto".
        memory_limit: most activations per rank, in the unit of the costs.
        stretch: factor by which all ops and conditions are slowed down.
        timeout: how long a rank waits for a message (seconds).
        mesh: the processes to run over. Default: all ranks are threads of this process.
        transport: what carries messages; see `TransportOptions`.
        adapt: how to measure links and respond to slow ones; see `AdaptOptions`.

    Raises:
        ScheduleError: the schedule is not valid, or a cap is below what it needs.
        CostError: costs for another number of stages, a link that does not exist, or an invalid number.
        RuntimeFailure: a schedule that the runtime can't run (the error names what), or other calls on other ranks.
        DeadlineExceeded, PeerLost: a message did not arrive.

    Examples:
        >>> import penstock as ps
        >>> found = ps.emulate(ps.build("1f1b", 2, 4), ps.Costs.uniform(2, f=2, i=2, w=2))
        >>> found.timelines[0].source, found.simulated[0].makespan
        ('measured', 30.0)
    """
    if not isinstance(num_steps, int) or num_steps < 1:
        raise CostError(f"num_steps is {num_steps!r}: give a whole number of at least 1")
    with EmulatedPipeline(
        schedule,
        costs,
        links=links,
        dispatch=dispatch,
        memory_limit=memory_limit,
        stretch=stretch,
        timeout=timeout,
        mesh=mesh,
        transport=transport,
        adapt=adapt,
    ) as pipe:
        steps = [pipe.step() for _ in range(num_steps)]
    measured = tuple(step.timeline for step in steps)
    late = [ms for step in steps for ms in step.late]
    return Emulation(
        measured,
        pipe.simulated(steps),
        _own_latency(measured, pipe.link_conditions),
        pipe.link_conditions,
        tuple(step.start for step in steps),
        Lateness(statistics.median(late), max(late)) if late else Lateness(0.0, 0.0),
        stretch,
        tuple(step.configuration for step in steps),
        tuple(step.number for step in steps),
        tuple(pipe.notices),
    )


def _own_latency(timelines: Sequence[Timeline], conditions: Links) -> float:
    """The median time from an op's end to the start of the op that waited for its message."""
    found = []
    for timeline in timelines:
        sent = {(m.source, m.target, m.target_rank): (m.source_rank, m.sent) for m in timeline.messages}
        together = ranks_together(timeline.schedule)
        for timed in timeline.ops:
            if timed.waited_for is None or timed.op in together:  # that may have waited for its other ranks
                continue
            source, end = sent.get((timed.waited_for, timed.op, timed.rank), (timed.rank, 0.0))
            if source != timed.rank and conditions.named(source, timed.rank)[1] is None:
                found.append(max(0.0, timed.start - end))
    return statistics.median(found) if found else 0.0
