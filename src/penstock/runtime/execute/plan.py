"""What a pipeline runs: the ops of one kind of step (`StepPlan`), and what is in force between two switches.

A `StepPlan` is what a step of some kind needs to know about its schedule, such as how many messages of a channel may
be under way (`window`). It is computed once and kept. An
`ActivePlan` is a configuration (schedule, costs, dispatch) with the plans of its steps, from the step at which it
came into force.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.control import Configuration
from penstock.cost import Costs, Links
from penstock.dispatch import Dispatch, lower
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.replicas import with_reductions, without_reductions
from penstock.runtime.transport.channel import ExpectedMessages, Tags, expected_by_channel
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.wiring import Wiring, wire
from penstock.schedule import Op, Schedule, check
from penstock.schedule.async_ops import OFFLOAD, with_offload, without_offload
from penstock.schedule.liveness import most_ahead, run_untimed
from penstock.schedule.op import BACKWARD, FORWARD, RECOMPUTE
from penstock.simulation.auto import WITHOUT_WAITING, choose_policy
from penstock.simulation.lowered import frozen_caps, frozen_peaks, memory_changes
from penstock.simulation.simulator import AUTO, as_dispatch

EVALUATION_WINDOW = 4
"""Messages of a channel under way in evaluation, where no answers say what was taken."""


@dataclass(frozen=True)
class StepPlan:
    """What one rank needs to know about a schedule, or its forwards alone, to run a step of it.

    Attributes:
        wiring: of the schedule, or of its forwards alone.
        memory_change: by how much each op changes the activations that its rank holds, in the unit of the costs (in
            activations of a stage, if there are no costs). An op that frees them has a negative number.
        caps: the most activations that each rank may hold, in the same unit.
        expected: messages from other processes, for the rank here.
        window: by slot, the most messages of a channel under way, for channels that bring no answers.
    """

    wiring: Wiring
    memory_change: Sequence[float]
    caps: Sequence[float]
    expected: Sequence[ExpectedMessages]
    window: Mapping[int, int]


def plan_step(
    schedule: Schedule,
    tied_stages: Sequence[Sequence[int]],
    training: bool,
    rank: int,
    tags: Tags,
    costs: Costs | None = None,
    caps: Sequence[float] | None = None,
) -> StepPlan:
    """Plans a step as `rank` sees it. `schedule` holds forwards alone where it is not for training.

    Args:
        costs: whose activations are counted; 1 a stage where not given.
        caps: most activations each rank may hold; its frozen order's own where not given.
    """
    wiring = wire(schedule, tied_stages)
    change = memory_changes(wiring.graph, costs or Costs.assumed(schedule.num_ranks, schedule.placement))
    caps = frozen_peaks(wiring.graph, change) if caps is None else caps
    expected = expected_by_channel(((edge, wiring.sender(edge, rank)) for edge in wiring.expected(rank)), tags)
    if training:
        # A tied stage is at most as far ahead of the next one up as that is ahead of its backwards.
        bound = 2 * most_ahead(schedule) + 1
        window = dict.fromkeys(range(1, len(tied_stages) + 1), bound)
        if schedule.placement.shared:
            # What comes to a shared stage is answered by none of its ranks but one. A rank that sends so much of it
            # has met the others since for what it sent before.
            window[0] = bound
    elif schedule.has_shared_ops:
        window = {}  # its ranks meet again and again, so that none is far ahead
    else:
        window = {} if run_untimed(schedule, EVALUATION_WINDOW).blocked else {0: EVALUATION_WINDOW}
    return StepPlan(wiring, change, caps, expected, window)


def stages_taped_out_of_order(schedule: Schedule) -> frozenset[int]:
    """The stages whose backwards come in another order than the forwards that make their graphs (R, where the forward
    is run again).
    """
    recomputed = Counter(stage for stage, _ in pairs_with(schedule, RECOMPUTE))
    found = set()
    for stage in range(schedule.num_stages):
        if recomputed[stage] == schedule.graph.microbatches_of(stage, schedule.num_microbatches):
            continue  # R comes in the order of the backwards
        pipelines = range(schedule.placement.num_pipelines)
        forwards, backwards = (
            [tuple(schedule.microbatches_of(kind, stage, k)) for k in pipelines] for kind in (FORWARD, BACKWARD)
        )
        if recomputed[stage] or forwards != backwards:
            found.add(stage)
    return frozenset(found)


def pairs_with(schedule: Schedule, kind: str) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) pairs that have an op of this kind."""
    return frozenset((op.stage, op.microbatch) for row in schedule.order for op in row if op.kind == kind)


@dataclass(frozen=True)
class ActivePlan:
    """A configuration with all that a rank needs to run steps of it, until the pipeline switches to another.

    Attributes:
        configuration: the schedule, its dispatch, and which links are delegated.
        plan: of a training step.
        split: (stage, microbatch) pairs whose backward is split into I and W.
        recomputed: (stage, microbatch) pairs whose forward runs again before their backward.
        taped_out_of_order, away: as in `StepSettings`.
        rank, tags: whose plan it is, and the tags of its messages.
    """

    configuration: Configuration
    plan: StepPlan
    split: frozenset[tuple[int, int]]
    recomputed: frozenset[tuple[int, int]]
    taped_out_of_order: frozenset[int]
    away: frozenset[tuple[int, int]]
    rank: int
    tags: Tags
    _forwards: dict[int, StepPlan] = field(default_factory=dict)
    fewer: dict[int, ActivePlan] = field(default_factory=dict, compare=False, repr=False)
    """By number of microbatches, what smaller batches ran."""

    @property
    def schedule(self) -> Schedule:
        return self.configuration.schedule

    @property
    def dispatch(self) -> Dispatch:
        return self.configuration.dispatch

    @cached_property
    def counts(self) -> list[int]:
        """The number of microbatches of each stage."""
        schedule = self.schedule
        return [schedule.graph.microbatches_of(s, schedule.num_microbatches) for s in range(schedule.num_stages)]

    def splits(self, stage: int) -> bool:
        """Whether any backward of the stage is split."""
        return any(s == stage for s, _ in self.split)

    def forward(self, num_microbatches: int) -> StepPlan:
        """The plan of forwards alone, without registered ops and what they wait for."""
        if num_microbatches not in self._forwards:
            schedule = self.schedule.forward_only(num_microbatches)
            if schedule.stage_graph is not None:
                schedule = replace(schedule, stage_graph=replace(schedule.stage_graph, registered=(), needs=()))
            self._forwards[num_microbatches] = plan_step(schedule, (), False, self.rank, self.tags)
        return self._forwards[num_microbatches]


def start_of(
    schedule: Schedule, dispatch: Dispatch, costs: Costs | None, adapt: AdaptOptions | None
) -> Configuration:
    """What a pipeline runs first. By default each rank may hold what its own order holds.

    Raises:
        ScheduleError: a cap below what the schedule's own order needs.
    """
    graph = lower(schedule)
    change = memory_changes(graph, costs or Costs.assumed(schedule.num_ranks, schedule.placement))
    caps = frozen_caps(graph, change, None if adapt is None else adapt.memory_limit)
    return Configuration(schedule, dispatch, (), tuple(caps))


def activate(
    configuration: Configuration, tied_stages: Sequence[Sequence[int]], rank: int, tags: Tags, costs: Costs | None
) -> ActivePlan:
    """Makes of a configuration what `rank` needs to run it.

    Args:
        costs: whose activations the caps count; 1 a stage where not given.
    """
    schedule = configuration.schedule
    plan = plan_step(schedule, tied_stages, True, rank, tags, costs, configuration.caps)
    _ = plan.wiring.wired_ops  # here, and not in the first step that runs it
    return ActivePlan(
        configuration,
        plan,
        pairs_with(schedule, "I"),
        pairs_with(schedule, "R"),
        stages_taped_out_of_order(schedule),
        pairs_with(schedule, OFFLOAD),
        rank,
        tags,
    )


def with_fewer(configuration: Configuration, num: int, mesh: ProcessMesh) -> Configuration:
    """The configuration with the ops of the first `num` microbatches alone, in the same order."""
    whole = without_reductions(configuration.schedule, mesh)
    small, plain = whole.first_microbatches(num), without_offload(whole)
    if whole is not plain:
        named = [(need, pair) for need in whole.graph.needs for pair in need.pairs if max(pair) < num]
        waits = [(Op(*need.before, first), Op(*need.after, then)) for need, (first, then) in named]
        small = with_offload(replace(small, stage_graph=plain.stage_graph), waits)
    check(small)
    return replace(configuration, schedule=with_reductions(small, mesh))


def require_free(adapts: bool) -> None:
    """Raises RuntimeFailure where what runs is not its user's to switch."""
    if adapts:
        raise RuntimeFailure("this run adapts, and so switches by itself; leave adapt out to switch it yourself")


def require_switchable(then: Schedule, now: Schedule) -> None:
    """Proves a schedule that a running pipeline is to switch to.

    Raises:
        ScheduleError: it is not valid.
        RuntimeFailure: it has another placement, stage graph or number of microbatches than what runs, or another
            order where updates are in it.
    """
    check(then)
    then, now = without_offload(then), without_offload(now)  # what waits in host memory may change
    if now.updates is not None and (then.order, then.updates) != (now.order, now.updates):
        raise RuntimeFailure(
            f"{now.name} has its updates in the order, which nothing may change; start a new pipeline, or switch its "
            "dispatch alone"
        )
    for name, what in (
        ("num_microbatches", "number of microbatches"),
        ("placement", "placement"),
        ("graph", "stage graph"),
    ):
        if getattr(then, name) != getattr(now, name):
            raise RuntimeFailure(
                f"{then.name} has another {what} than {now.name}, which runs; a running pipeline keeps it: build the "
                f"schedule for the same, or start a new pipeline"
            )


def dispatch_of(
    given: Dispatch | str,
    schedule: Schedule,
    costs: Costs | None,
    choice: TransportChoice,
    links: Links | None = None,
    memory_limit: float | Sequence[float] | None = None,
    peers: Peers | None = None,
) -> Dispatch:
    """Reads a dispatch, or "auto": the fastest by simulation; of equals one that absorbs what nobody foresaw.

    Args:
        costs: of the schedule's stages; all ops take as long as each other where they are not known.
        choice: how messages travel.
        links: what is known of them; no delays where not given. memory_limit: as in `simulate`.
        peers: where given, all of their processes must call this alike: the first simulates and tells the others.

    Raises:
        ScheduleError: another word, or a policy that waits.
    """
    if given != AUTO:
        return as_dispatch(given)
    if peers is not None and 0 not in peers.here:
        return Dispatch(peers.gather(None)[0])
    costs = costs or Costs.assumed(schedule.num_ranks, schedule.placement)
    chosen = choose_policy(
        schedule,
        costs,
        links=links,
        transport=choice.simulated,
        memory_limit=memory_limit,
        policies=WITHOUT_WAITING,
    ).policy.dispatch
    if peers is not None:
        peers.gather(chosen.value)
    return chosen
