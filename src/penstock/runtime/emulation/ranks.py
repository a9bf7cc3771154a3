"""The ranks of an emulated run: threads of this process, or one process each."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, Protocol

import torch

from penstock.control import Configuration, Event
from penstock.cost import Costs, Links
from penstock.dispatch import Dispatcher
from penstock.runtime.adapt import Agent, MeasuredStep, Offer, Readied
from penstock.runtime.compatibility import require_runnable
from penstock.runtime.emulation.backend import EmulatedBackend, Ended, sharpen_timers
from penstock.runtime.emulation.gang import EmulatedGang, ProcessGang, ThreadGang
from penstock.runtime.errors import PeerLost
from penstock.runtime.execute.active_plan import ActivePlan, running
from penstock.runtime.execute.executors import run_rank
from penstock.runtime.execute.worker import Worker
from penstock.runtime.mesh.consistency import require_same, schedule_digest
from penstock.runtime.mesh.groups import meeting_groups
from penstock.runtime.mesh.peers import GroupPeers, LocalPeers, Peers
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.bounded import BoundedTransport
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.conditioned import ConditionedTransport, Conditions
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.transfer_record import TransferRecord
from penstock.runtime.transport.wiring import num_indices
from penstock.schedule import Op
from penstock.simulation.simulator import frozen_caps

LEAD = 5_000_000
"""Nanoseconds from the moment when all ranks are ready to the start of a step, so that all start it together."""


@dataclass(frozen=True)
class Emulated:
    """What stays the same over an emulated run."""

    costs: Costs
    conditions: Links
    stretch: float
    timeout: float
    choice: TransportChoice


class RankStep(NamedTuple):
    """What one rank measured of a step: its ops, the most it held, how late ops ended (ns), what came in; and its
    asynchronous ops.
    """

    rank: int
    times: list[tuple[Op, int, int]]
    peak: float
    late: list[int]
    crossings: list[TransferRecord]
    apart: list[tuple[Op, int, int]]


class RanksStep(NamedTuple):
    """A step of all ranks, by rank; when it started (ns); and what the agent says to run from the next one on."""

    ranks: list[RankStep]
    start: int
    next: Readied | None


class Ranks(Protocol):
    """The ranks of a run, here or in many processes."""

    conditions: Conditions
    peers: Peers

    def step(self, plan: ActivePlan, helm: Agent | None) -> RanksStep:
        """Runs one step."""

    def prepare(self, delegated: Collection[tuple[int, int]]) -> None:
        """Starts the delegates of links, before they are needed."""

    def close(self) -> None:
        """Ends the transports."""


def emulated_plan(configuration: Configuration, costs: Costs, rank: int) -> ActivePlan:
    """Works a configuration out, as `rank` runs it.

    Raises:
        ScheduleError: a cap is below what the schedule's own order needs.
    """
    plan = running(configuration, (), rank, Tags.of(configuration.schedule), costs)
    frozen_caps(plan.plan.wiring.graph, plan.plan.memory_change, configuration.caps)
    return plan


def _worker(
    run: Emulated, plan: ActivePlan, rank: int, transport: Transport, stretch: float, ended: Ended | None = None
) -> tuple[Worker, EmulatedBackend]:
    """A rank at the begin of a step, and what runs its ops."""
    step = plan.plan
    backend = EmulatedBackend(step.wiring, run.costs, stretch, ended)
    dispatcher = Dispatcher(step.wiring.graph, rank, plan.dispatch, step.memory_change, step.caps[rank])
    return Worker(step.wiring, rank, dispatcher, backend, transport), backend


def _run_rank(
    worker: Worker, backend: EmulatedBackend, transport: Transport, start: int, meeting: EmulatedGang | None
) -> RankStep:
    """Runs a worker from `start` (ns) to its end."""
    sharpen_timers()
    while (left := start - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9)
    backend.begin(worker.rank, meeting)
    stream = worker.run_apart(transport.wake)
    try:
        run_rank(worker, transport)
    finally:
        if stream is not None:
            stream.close()
    times, apart = worker.recorder.times, worker.recorder.apart
    return RankStep(worker.rank, times, worker.peak_held, backend.late, transport.crossings(), apart)


def _measured(
    step: RankStep, start: int, events: Sequence[Event] = (), counters: Mapping[str, int] | None = None
) -> MeasuredStep:
    end = step.times[-1][2] if step.times else start
    return MeasuredStep(step.rank, start, end, step.times, step.crossings, events, step.peak, counters)


class ThreadRanks:
    """All ranks in this process, a thread each."""

    def __init__(self, run: Emulated, plan: ActivePlan) -> None:
        self._run = run
        self.peers: Peers = LocalPeers(plan.schedule.num_ranks)
        self.conditions = conditions = Conditions(run.conditions, run.stretch)
        self._boxes = [Mailbox() for _ in self.peers.here]
        self._transports: list[Transport] = []
        for rank in self.peers.here:
            made = ConditionedTransport(LoopbackTransport(self._boxes, rank, run.timeout), conditions)
            depth = run.choice.depth
            self._transports.append(made if depth is None else BoundedTransport(made, depth))

    def step(self, plan: ActivePlan, helm: Agent | None, ended: Ended | None = None) -> RanksStep:
        """Runs one step. `ended` is called at the end of each op."""
        run, boxes, transports = self._run, self._boxes, self._transports
        workers = [_worker(run, plan, rank, transports[rank], run.stretch, ended) for rank in self.peers.here]
        meeting = ThreadGang(run.timeout)
        found: dict[int, RankStep] = {}
        errors: list[BaseException] = []
        for transport in transports:
            run.choice.route(transport, plan.configuration.delegated)
            transport.begin((), (), 0, True, {})
        start = time.perf_counter_ns() + LEAD

        def work(rank: int) -> None:
            try:
                found[rank] = _run_rank(*workers[rank], transports[rank], start, meeting)
            except BaseException as error:
                errors.append(error)
                meeting.lose(rank)
                for box in boxes:
                    box.lose(rank)

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"penstock-rank-{rank}") for rank in self.peers.here
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            meeting.lose(0)
            for box in boxes:
                box.lose(0)
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
        ranks = [found[rank] for rank in self.peers.here]
        if helm is None:
            return RanksStep(ranks, start, None)
        helm.ended([_measured(rank, start) for rank in ranks])
        return RanksStep(ranks, start, helm.settle([helm.offer()]))

    def prepare(self, delegated: Collection[tuple[int, int]]) -> None:
        """There is nothing to start."""

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


class ProcessRanks:
    """One process a rank; this is one of them."""

    def __init__(self, run: Emulated, plan: ActivePlan, peers: GroupPeers) -> None:
        require_runnable(plan.schedule)
        Conditions(run.conditions).require_own_queues()
        self._run = run
        self.peers: Peers = peers
        self._meeting = ProcessGang(meeting_groups(plan.schedule, peers), run.timeout)
        self._rank = peers.here[0]
        schedule = plan.schedule
        told = {
            "schedule": schedule_digest(schedule),
            "costs": astuple(run.costs),
            "link condition": str(run.conditions),
            "dispatch": plan.dispatch.value,
            "stretch": run.stretch,
            "transport": run.choice.shared,
        }
        require_same(peers.gather(told), "every rank must make the same ps.emulate(...)")
        self._indices = num_indices(schedule)
        self.conditions = Conditions(Links())
        given = None if run.conditions == Links() else self.conditions
        self._transport = run.choice.make(
            peers, plan.tags, run.timeout, plan.plan.wiring, plan.dispatch, torch.device("cpu"), given
        )
        self._step(plan, stretch=0.0)  # connects the ranks and tells them all shapes, which later steps need not do
        self.conditions.start(run.conditions, run.stretch, self._moment())

    def step(self, plan: ActivePlan, helm: Agent | None) -> RanksStep:
        mine, start = self._step(plan, self._run.stretch)
        offer = None
        if helm is not None:
            choice, transport = self._run.choice, self._transport
            helm.ended([_measured(mine, start, choice.link_events(transport), choice.counters(transport))])
            offer = helm.offer()
        told = self.peers.gather((mine._replace(crossings=[]), offer))
        offers = [Offer(*each) for _, each in told if each is not None]
        return RanksStep(
            [RankStep(*rank) for rank, _ in told], start, helm.settle(offers) if helm is not None else None
        )

    def _step(self, plan: ActivePlan, stretch: float) -> tuple[RankStep, int]:
        transport, rank = self._transport, self._rank
        worker, backend = _worker(self._run, plan, rank, transport, stretch)
        signatures = ["emulated"] * self._indices
        threaded = plan.dispatch.is_dynamic or bool(plan.schedule.asynchronous)
        self._run.choice.route(transport, plan.configuration.delegated)
        transport.begin(plan.plan.expected, signatures, zlib.crc32(b"emulated"), threaded, plan.plan.window)
        start = self._moment() + LEAD
        found = _run_rank(worker, backend, transport, start, self._meeting)
        transport.end()
        return found, start

    def prepare(self, delegated: Collection[tuple[int, int]]) -> None:
        self._run.choice.prepare(self._transport, delegated)

    def close(self) -> None:
        self._transport.close()

    def _moment(self) -> int:
        """A moment that all ranks agree on, when all of them are here. Their clocks are one host's."""
        return max(self.peers.gather(time.perf_counter_ns()))
