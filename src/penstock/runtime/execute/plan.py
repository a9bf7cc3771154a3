"""What a step of some kind needs to know about its schedule, worked out once and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.cost import Costs
from penstock.runtime.transport.channel import ExpectedMessages, Tags, expected_by_channel
from penstock.runtime.transport.wiring import Wiring, wire
from penstock.schedule import Schedule
from penstock.schedule.liveness import most_ahead, run_untimed
from penstock.schedule.op import BACKWARD, FORWARD, RECOMPUTE
from penstock.simulation.simulator import frozen_peaks, memory_changes

EVALUATION_WINDOW = 4
"""Messages of a channel under way in evaluation, where no answers say what was taken."""


@dataclass(frozen=True)
class StepPlan:
    """Attributes:
    wiring: of the schedule, or of its forwards alone.
    memory_change: per op; caps: most activations each rank may hold.
    expected: messages from other processes, for the rank here.
    window: slot -> most messages of a channel under way, for channels that bring no answers.
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
