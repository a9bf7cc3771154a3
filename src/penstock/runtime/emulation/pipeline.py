"""A pipeline of emulated devices: stepped and switched like one that trains, with ops that only take their time.

with EmulatedPipeline(schedule, costs, links=conditions, transport="direct", adapt=ps.AdaptOptions()) as pipe:
    step = pipe.step()
    print(step.number, step.timeline.makespan, pipe.simulated([step])[0].makespan)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.control import Configuration
from penstock.cost import CostError, Costs, Links
from penstock.cost.links import Lines
from penstock.dispatch import Dispatch, lower
from penstock.renamed import refuse_old
from penstock.runtime.adapt import AdaptOptions, steer
from penstock.runtime.compatibility import steered
from penstock.runtime.emulation.ranks import Emulated, ProcessRanks, Ranks, ThreadRanks, emulated_plan
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.active_plan import dispatch_of, require_switchable
from penstock.runtime.execute.timeline import measured_timeline
from penstock.runtime.mesh.consistency import require_same
from penstock.runtime.mesh.peers import GroupPeers, peers_of
from penstock.runtime.transport.choose import TransportOptions
from penstock.runtime.transport.transfer_record import TransferRecord
from penstock.schedule import Op, Schedule, check
from penstock.schedule.send_recv import remove_communication
from penstock.simulation import Timeline, simulate
from penstock.simulation.simulator import frozen_caps, memory_changes


@dataclass(frozen=True)
class EmulatedStep:
    """One step, the same on every rank. All times are as if the stretch were 1.

    Attributes:
        timeline: measured. start: when it began, in ms of the conditions' time.
        configuration: what ran. number: of the decision that it comes from, 0 for the start.
        late: how long after its due moment each op ended (ms).
        crossings: messages that came in, with the clock's own times; of the ranks in this process.
    """

    timeline: Timeline
    start: float
    configuration: Configuration
    number: int
    late: tuple[float, ...]
    crossings: tuple[TransferRecord, ...] = ()


KEYWORDS = {
    "max_held": "memory_limit=..., as ps.plan takes",
    "depth": "transport=ps.TransportOptions('direct', depth=...)",
    "delegates": "transport=ps.TransportOptions(delegates=...)",
    "steering": "adapt=ps.AdaptOptions(...)",
}
"""Keywords before 0.2, each with what to write instead."""


class EmulatedPipeline:
    """Emulated devices, a thread a rank; or a process a rank where torch.distributed is set up with several.

    Between processes every rank makes the same calls and gets the same results.

    Args:
        links: conditions injected into the transport, on top of what that takes itself.
        dispatch: "frozen", "hinted", "dynamic" or "auto" (the fastest of them by simulation over `links`).
        memory_limit: as in `ps.simulate`.
        stretch: slows ops and conditions down alike, so that the machine's own noise weighs less.
        timeout: seconds that any wait may last.
        mesh: as in `ps.Pipeline`.
        transport: "host", "direct" or "delegate", or `TransportOptions` that say more (their `links` aside:
            conditions are given here); between threads "delegate" is the same as "host", no copy.
        adapt: how to measure and switch while running; None: not at all.

    Attributes:
        configuration: what the next step runs; number: of the decision that it comes from.

    Raises:
        ScheduleError: the schedule is not valid, or a cap is below what it needs.
        CostError: costs for another number of stages, a link that is not there, a number that makes no sense.
        ControlError: adapting with numbers that make no sense.
        RuntimeFailure: a schedule or transport that the runtime does not run (the error names what), other calls on
            other ranks, a store that cannot be reached.
    """

    @refuse_old(KEYWORDS, RuntimeFailure)
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
        adapt = steered(schedule, adapt)
        carried = TransportOptions.of(transport)
        if carried.links is not None:
            raise RuntimeFailure("conditions of emulated links are given as links=, not in TransportOptions")
        conditions = Links.of(links)
        conditions.check_ranks(schedule.num_ranks)
        if costs.num_stages != schedule.num_stages:
            raise CostError(f"the costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}")
        if not 0 < stretch < float("inf"):
            raise CostError(f"stretched by {stretch:g}: give a stretch above 0")
        self.link_conditions, self.stretch = conditions, stretch
        self._costs = costs
        self._choice = carried.choice(adapt is not None and adapt.may_delegate)
        graph = lower(schedule)
        held = adapt.memory_limit if adapt is not None and memory_limit is None else memory_limit
        caps = tuple(frozen_caps(graph, memory_changes(graph, costs), held))
        chosen = dispatch_of(dispatch, schedule, costs, self._choice, conditions, held)
        self.configuration = Configuration(schedule, chosen, (), caps)
        run = Emulated(costs, conditions, stretch, timeout, self._choice)
        peers = peers_of(mesh, schedule.num_ranks, timeout)
        self._rank, self.number = peers.here[0], 0
        self._plan = emulated_plan(self.configuration, costs, self._rank)
        self._ranks: Ranks = (
            ProcessRanks(run, self._plan, peers) if isinstance(peers, GroupPeers) else ThreadRanks(run, self._plan)
        )
        self._helm = None
        if adapt is not None:
            known = adapt.costs or costs
            try:
                self._helm = steer(adapt, peers, self.configuration, known, self._choice, self._ready, stretch)
            except BaseException:
                self._ranks.close()
                raise

    def __enter__(self) -> EmulatedPipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def notices(self) -> list[str]:
        """What a person should know of the steering."""
        return [] if self._helm is None else list(self._helm.notices)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """What was decided so far, as the control log has it; on rank 0's process."""
        return [] if self._helm is None else self._helm.decisions

    def step(self) -> EmulatedStep:
        """Runs the schedule once.

        Raises:
            DeadlineExceeded, PeerLost: a message did not come.
        """
        plan, number = self._plan, self.number
        ranks, start, following = self._ranks.step(plan, self._helm)
        rows = [_scaled(rank.times, self.stretch) for rank in ranks]
        apart = [_scaled(rank.apart, self.stretch) for rank in ranks]
        peaks = [rank.peak for rank in ranks]
        timeline = measured_timeline(plan.plan.wiring, rows, peaks, plan.dispatch.value, apart)
        if following is not None:
            self._plan, self.number = following.made, following.number
            self.configuration = self._plan.configuration
        return EmulatedStep(
            timeline,
            (start - self._ranks.conditions.origin) / 1e6 / self.stretch,
            plan.configuration,
            number,
            tuple(ns / 1e6 / self.stretch for rank in ranks for ns in rank.late),
            tuple(crossing for rank in ranks for crossing in rank.crossings),
        )

    def reconfigure(self, configuration: Configuration) -> None:
        """Runs something else from the next step on. Every rank must make the same call.

        Raises:
            RuntimeFailure: another placement, stage graph or number of microbatches; or the run is steered.
            ScheduleError: the schedule is not valid, or its caps are below what its own order needs.
        """
        if self._helm is not None:
            raise RuntimeFailure("this run is steered, which switches it; leave adapt out to switch it yourself")
        plan = self._ready(configuration)
        told = self._ranks.peers.gather({"configuration": configuration.digest})
        require_same(told, "every rank must switch to the same")
        self._plan, self.number = plan, self.number + 1
        self.configuration = configuration

    def simulated(self, steps: Sequence[EmulatedStep], base: float = 0.0) -> tuple[Timeline, ...]:
        """What the simulator says of steps, one after the other under the conditions of their time.

        Args:
            base: ms that every message takes besides.
        """
        lines = Lines(replace(self.link_conditions, base=base))
        return tuple(
            simulate(
                step.configuration.schedule,
                self._costs,
                links=lines,
                dispatch=step.configuration.dispatch,
                transport=self._choice.simulated(step.configuration.delegated),
                memory_limit=step.configuration.caps if step.configuration.dispatch.is_dynamic else None,
                links_at=step.start,
            )
            for step in steps
        )

    def close(self) -> None:
        """Ends steering and transports."""
        if self._helm is not None:
            self._helm.close()
        self._ranks.close()

    def _ready(self, configuration: Configuration) -> Any:
        require_switchable(configuration.schedule, self.configuration.schedule)
        self._choice.require_schedule(configuration.schedule)
        self._ranks.prepare(configuration.delegated)
        return emulated_plan(configuration, self._costs, self._rank)


def _scaled(times: Sequence[tuple[Op, int, int]], stretch: float) -> list[tuple[Op, int, int]]:
    if stretch == 1:
        return list(times)
    return [(op, round(start / stretch), round(end / stretch)) for op, start, end in times]
