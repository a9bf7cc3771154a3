"""Simulates one contender: a pass over the common costs. Also says what its order alone determines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.cost import Costs, Links
from penstock.schedule import Schedule, count_versions
from penstock.schedule.op import UPDATE
from penstock.schedule.updates import OWNER
from penstock.simulation import Timeline, simulate
from penstock.simulation.memory_footprint import footprint
from penstock.train.asynchronous import proved_mismatch
from penstock.train.settings import Settings

Costing = Callable[[Schedule], Costs]
"""Makes the costs of a schedule's stages from costs that are the same for all schedules."""


@dataclass(frozen=True)
class SimulatedRun:
    """How all schedules are simulated over the costs.

    Attributes:
        links: between the ranks. On links that are not named, messages arrive at once.
        dispatch: how ranks choose their ops.
    """

    links: Links = field(default_factory=Links)
    dispatch: str = "frozen"

    def words(self) -> str:
        """Links and dispatch, in words that follow a comma."""
        texts = self.links.texts()
        if self.links.default is not None:
            texts.append(f"{'all others' if texts else 'all'} {self.links.default}")
        links = f"links {', '.join(texts)}" if texts else "no delays on links"
        return links if self.dispatch == "frozen" else f"{links} and {self.dispatch} dispatch"


AS_PLANNED = SimulatedRun()
"""No delays, and every rank in its own order."""


@dataclass(frozen=True)
class SimulatedResult:
    """What simulation says of a schedule.

    Attributes:
        milliseconds: of a step, with its share of the update.
        microbatches_per_second: over a whole pass, from its first op to the end of its last update.
        busy: the share of all ranks' time in which they run ops or update.
        memory: bytes that the fullest rank holds: weights, versions, gradients, the optimizer's state, activations,
            messages. None if the costs do not say what weights take.
        activations: the part of `memory` that is activations. If `memory` is None, the most that a rank holds, in the
            units of the costs.
        mismatch: most updates between a microbatch's forward and its backward; 0 for a synchronous schedule.
        versions: most versions of its weights that a copy of a stage holds.
        timeline: of the pass, without the update that follows a synchronous schedule. It is not in the JSON.
    """

    milliseconds: float
    microbatches_per_second: float
    busy: float
    memory: float | None
    activations: float
    mismatch: int
    versions: int
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """All but the timeline."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "timeline"}


def simulated(
    settings: Settings, schedule: Schedule, costs: Costs, run: SimulatedRun = AS_PLANNED
) -> SimulatedResult:
    """Simulates a pass.

    With a synchronous schedule, every rank updates the stages it owns after its last op, and the next step begins
    when the slowest rank has updated. An asynchronous schedule has its updates among the other ops.
    """
    costs = costs.with_predictions(schedule, settings.sharding)
    timeline = simulate(schedule, costs, run.links, dispatch=run.dispatch)
    after = [0.0] * schedule.num_ranks
    if schedule.updates is None:
        for stage in range(schedule.num_stages):
            after[schedule.rank_of(stage, OWNER)] += costs.duration(UPDATE, stage)
    whole = timeline.makespan + max(after)
    held = None
    if costs.weight_bytes:
        held = footprint(schedule, costs, run.links, dispatch=run.dispatch, sharding=settings.sharding)
    return SimulatedResult(
        milliseconds=whole / settings.passes.steps,
        microbatches_per_second=schedule.num_microbatches / whole * 1e3 if whole else 0.0,
        busy=(sum(timeline.busy) + sum(after)) / (schedule.num_ranks * whole) if whole else 1.0,
        memory=None if held is None else held.peak,
        activations=max(timeline.peak_activations),
        mismatch=proved_mismatch(schedule),
        versions=max(count_versions(schedule, sharding=settings.sharding).values(), default=1),
        timeline=timeline,
    )
