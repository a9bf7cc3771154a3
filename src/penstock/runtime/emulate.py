"""Runs a schedule on emulated devices: real dispatch, real messages, real clocks, and ops that only take their time.

    run = ps.emulate(ps.build("1f1b", 8, 16), ps.Costs.uniform(8, 10, 10, 10), links=conditions)
    run.timelines[0].makespan, run.simulated[0].makespan, run.median_error

One thread a rank in this process; or one process a rank where torch.distributed is set up with several. A rank
sleeps through its ops, so that two cores stand for sixteen accelerators.
"""

from __future__ import annotations

import statistics
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.cost import CostError, Costs, LinkConditions, Links
from penstock.cost.conditions import Lines
from penstock.dispatch import Dispatch, Dispatcher
from penstock.runtime.agreement import require_same
from penstock.runtime.devices.emulated import EmulatedDevice, sharpen_timers
from penstock.runtime.errors import PeerLost, RuntimeFailure
from penstock.runtime.measured import measured_timeline
from penstock.runtime.message import Edge
from penstock.runtime.peers import GroupPeers, LocalPeers
from penstock.runtime.setup import peers_of, require_runnable
from penstock.runtime.transports.channel import Tags, expected_by_channel
from penstock.runtime.transports.conditioned import ConditionedTransport, Conditions
from penstock.runtime.transports.mailbox import Mailbox, MailboxTransport
from penstock.runtime.wiring import Wiring, num_indices, wire
from penstock.runtime.worker import Transport, Worker
from penstock.schedule import Op, Schedule, check
from penstock.schedule.messages import remove_communication
from penstock.simulate import Timeline, simulate
from penstock.simulate.simulate import as_dispatch, frozen_caps, memory_changes

LEAD = 5_000_000
"""Nanoseconds from the moment when all ranks are ready to the start of a step, so that all start it together."""


@dataclass(frozen=True)
class Lateness:
    """How long after their due moment ops ended (ms): the error of sleeping and of what a busy machine adds."""

    median: float
    worst: float


@dataclass(frozen=True)
class Emulation:
    """What an emulated run gives, the same on every rank.

    Attributes:
        timelines: measured, one a step; simulated: of the same steps, under the same conditions at that time.
        own_latency: ms that a message took besides what the conditions say: the median over those that a rank
            waited for on links without conditions; 0 where there were none.
        calibrated: simulated with that latency on every link.
        conditions: of the links. starts: of the steps, in ms of the conditions' time.
        late: of all ops of all ranks.
        stretch: by how much ops and conditions were slowed down in the run. All times here are as if it were 1.
    """

    timelines: tuple[Timeline, ...]
    simulated: tuple[Timeline, ...]
    calibrated: tuple[Timeline, ...]
    own_latency: float
    conditions: LinkConditions
    starts: tuple[float, ...]
    late: Lateness
    stretch: float

    @property
    def errors(self) -> tuple[float, ...]:
        """`measured / simulated - 1` of each step's makespan."""
        return _errors(self.timelines, self.simulated)

    @property
    def calibrated_errors(self) -> tuple[float, ...]:
        """The same against the calibrated simulation."""
        return _errors(self.timelines, self.calibrated)

    @property
    def median_error(self) -> float:
        """The median over the steps of how far, in either direction, the makespan was from the simulated one."""
        return statistics.median(map(abs, self.errors))


def _errors(measured: Sequence[Timeline], simulated: Sequence[Timeline]) -> tuple[float, ...]:
    return tuple(m.makespan / s.makespan - 1 if s.makespan else 0.0 for m, s in zip(measured, simulated, strict=True))


def emulate(
    schedule: Schedule,
    costs: Costs,
    *,
    links: Links | LinkConditions | None = None,
    dispatch: Dispatch | str = Dispatch.FROZEN,
    max_held: float | Sequence[float] | None = None,
    num_steps: int = 1,
    stretch: float = 1.0,
    timeout: float = 60.0,
    mesh: Any = None,
) -> Emulation:
    """Runs `schedule` on emulated devices and measures it.

    Between processes every rank makes the same call and gets the same result. Messages carry
    `costs.message_bytes`, and 16 bytes that tell them apart.

    Args:
        links: conditions injected into the transport, on top of what that takes itself.
        max_held: as in `ps.simulate`.
        num_steps: times to run it, one after the other.
        stretch: slows ops and conditions down alike, so that the machine's own noise weighs less.
        timeout: seconds that any wait may last.
        mesh: as in `ps.Pipeline`.

    Raises:
        ScheduleError: the schedule is not valid, or a cap is below what it needs.
        CostError: costs for another number of stages, a link that is not there, a number that makes no sense.
        RuntimeFailure: a schedule that the runtime does not run (the error names what), other calls on other ranks.
        DeadlineExceeded, PeerLost: a message did not come.
    """
    schedule = remove_communication(schedule)
    check(schedule)
    conditions = LinkConditions.of(links)
    conditions.check_ranks(schedule.num_ranks)
    if costs.num_stages != schedule.num_stages:
        raise CostError(f"the costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}")
    if num_steps < 1 or not 0 < stretch < float("inf"):
        raise CostError(f"{num_steps} steps stretched by {stretch:g}: give at least 1 step and a stretch above 0")
    peers = peers_of(mesh, schedule.num_ranks, timeout)
    run = _Run(schedule, costs, conditions, as_dispatch(dispatch), max_held, stretch, timeout)
    if isinstance(peers, GroupPeers):
        ranks: _Ranks = _Processes(run, peers)
    else:
        ranks = _Threads(run)
    return run.carry_out(ranks, num_steps)


class _Waiting(Transport, Protocol):
    """A transport that can wait."""

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str]) -> list[Edge]: ...


Measured = tuple[int, list[tuple[Op, int, int]], float, list[int]]
"""Of one rank: itself, start and end of its ops, the most it held, how late its ops ended."""


class _Run:
    """What all ranks of an emulated run share."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        conditions: LinkConditions,
        dispatch: Dispatch,
        max_held: float | Sequence[float] | None,
        stretch: float,
        timeout: float,
    ) -> None:
        self.schedule, self.costs, self.link_conditions = schedule, costs, conditions
        self.dispatch, self.stretch, self.timeout = dispatch, stretch, timeout
        self.wiring: Wiring = wire(schedule)
        self.change = memory_changes(self.wiring.graph, costs)
        self.caps = frozen_caps(self.wiring.graph, self.change, max_held)
        self._max_held = max_held if dispatch is Dispatch.DYNAMIC else None

    def worker(self, rank: int, transport: Transport, stretch: float) -> tuple[Worker, EmulatedDevice]:
        device = EmulatedDevice(self.wiring, self.costs, stretch)
        dispatcher = Dispatcher(self.wiring.graph, rank, self.dispatch, self.change, self.caps[rank])
        return Worker(self.wiring, rank, dispatcher, device, transport), device

    def carry_out(self, ranks: _Ranks, num_steps: int) -> Emulation:
        measured: list[Timeline] = []
        starts: list[float] = []
        late: list[float] = []
        for _ in range(num_steps):
            found, start = ranks.step()
            rows = [_scaled(times, self.stretch) for _, times, _, _ in found]
            peaks = [peak for _, _, peak, _ in found]
            starts.append((start - ranks.conditions.origin) / 1e6 / self.stretch)
            measured.append(measured_timeline(self.wiring, rows, peaks, self.dispatch.value))
            late += [ns / 1e6 / self.stretch for _, _, _, lates in found for ns in lates]
        own = _own_latency(measured, self.link_conditions)
        return Emulation(
            tuple(measured),
            self._simulated(self.link_conditions, starts),
            self._simulated(replace(self.link_conditions, base=own), starts),
            own,
            self.link_conditions,
            tuple(starts),
            Lateness(statistics.median(late), max(late)) if late else Lateness(0.0, 0.0),
            self.stretch,
        )

    def _simulated(self, conditions: LinkConditions, starts: Sequence[float]) -> tuple[Timeline, ...]:
        lines = Lines(conditions)
        return tuple(
            simulate(
                self.schedule,
                self.costs,
                links=lines,
                dispatch=self.dispatch,
                max_held=self._max_held,
                links_at=start,
            )
            for start in starts
        )


def _own_latency(timelines: Sequence[Timeline], conditions: LinkConditions) -> float:
    """The median time from an op's end to the start of the op that stood waiting for its message."""
    found = []
    for timeline in timelines:
        ended = {timed.op: (timed.rank, timed.end) for timed in timeline.ops}
        for timed in timeline.ops:
            if timed.waited_for is None:
                continue
            source, end = ended[timed.waited_for]
            if source != timed.rank and conditions.named(source, timed.rank)[1] is None:
                found.append(max(0.0, timed.start - end))
    return statistics.median(found) if found else 0.0


def _scaled(times: Sequence[tuple[Op, int, int]], stretch: float) -> list[tuple[Op, int, int]]:
    if stretch == 1:
        return list(times)
    return [(op, round(start / stretch), round(end / stretch)) for op, start, end in times]


class _Ranks(Protocol):
    """The ranks of a run, here or in many processes."""

    conditions: Conditions

    def step(self) -> tuple[list[Measured], int]:
        """Runs one step; returns what every rank measured, by rank, and when it started."""


def _run_rank(worker: Worker, device: EmulatedDevice, transport: _Waiting, start: int) -> None:
    """Runs a worker from `start` (ns) to its end."""
    sharpen_timers()
    while (left := start - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9)
    device.begin()
    while True:
        worker.run_ready()
        if worker.finished:
            return
        before = time.perf_counter_ns()
        edges = transport.wait(worker.awaited(), worker.stuck_on)
        device.waited(before, time.perf_counter_ns())
        for edge in edges:
            worker.arrive(edge)


class _Threads:
    """All ranks in this process, a thread each."""

    def __init__(self, run: _Run) -> None:
        if any(gang >= 0 for gang in run.wiring.graph.gang):
            raise RuntimeFailure(
                f"{run.schedule.name} has ops that several ranks run together, which is not emulated "
                "(ps.simulate takes them)"
            )
        self._run = run
        self._peers = LocalPeers(run.schedule.num_ranks)
        self.conditions = Conditions(run.link_conditions, run.stretch)

    def step(self) -> tuple[list[Measured], int]:
        run, conditions, ranks = self._run, self.conditions, self._peers.here
        boxes = [Mailbox() for _ in ranks]
        transports = [MailboxTransport(boxes, rank, conditions, run.timeout) for rank in ranks]
        workers = [run.worker(rank, transports[rank], run.stretch) for rank in ranks]
        errors: list[BaseException] = []
        start = time.perf_counter_ns() + LEAD

        def work(rank: int) -> None:
            try:
                _run_rank(*workers[rank], transports[rank], start)
            except BaseException as error:
                errors.append(error)
                for box in boxes:
                    box.lose(rank)

        threads = [threading.Thread(target=work, args=(rank,), name=f"penstock-rank-{rank}") for rank in ranks]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            for box in boxes:
                box.lose(0)
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
        return [(w.rank, w.recorder.times, w.peak_held, device.late) for w, device in workers], start


class _Processes:
    """One process a rank; this is one of them."""

    def __init__(self, run: _Run, peers: GroupPeers) -> None:
        require_runnable(run.schedule)
        self._run, self._peers = run, peers
        schedule, rank = run.schedule, peers.here[0]
        told = {
            "schedule": repr((schedule.placement, schedule.order)),
            "costs": repr(run.costs),
            "link condition": str(run.link_conditions),
            "dispatch": run.dispatch.value,
            "stretch": run.stretch,
        }
        require_same(peers.gather(told), "every rank must make the same ps.emulate(...)")
        self._indices = num_indices(schedule)
        tags = Tags(schedule.num_stages, 0, schedule.num_microbatches, schedule.graph.needs, self._indices)
        self._transport = ConditionedTransport(
            peers.group, tags, run.timeout, conditions=Conditions(LinkConditions())
        )
        wiring = run.wiring
        edges = ((edge, wiring.rank_of(edge.producer)) for edge in wiring.expected(rank))
        self._expected = expected_by_channel(edges, tags)
        self._step(stretch=0.0)  # connects the ranks and tells them all shapes, which later steps need not do
        self.conditions = self._transport.conditions = Conditions(run.link_conditions, run.stretch, self._moment())

    def step(self) -> tuple[list[Measured], int]:
        return self._step(self._run.stretch)

    def _step(self, stretch: float) -> tuple[list[Measured], int]:
        run, transport = self._run, self._transport
        worker, device = run.worker(self._peers.here[0], transport, stretch)
        signatures = ["emulated"] * self._indices
        threaded = run.dispatch is Dispatch.DYNAMIC
        transport.begin(self._expected, signatures, zlib.crc32(b"emulated"), threaded, {})
        start = self._moment() + LEAD
        _run_rank(worker, device, transport, start)
        transport.end()
        return self._peers.gather((worker.rank, worker.recorder.times, worker.peak_held, device.late)), start

    def _moment(self) -> int:
        """A moment that all ranks agree on, when all of them are here. Their clocks are one host's."""
        return max(self._peers.gather(time.perf_counter_ns()))
