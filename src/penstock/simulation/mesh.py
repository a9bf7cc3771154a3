"""One iteration of a mesh: the pipelines of all replicas, then what adds their gradients up, then the update.

    replica 0, rank 1   F0 F1 .. W10 W11|          |
    replica 1, rank 1   F0 F1 .... W10 W11|        |
    ring of rank 1                        |=ring===|U|    begins when all replicas have run the stage's last W

A rank adds up one stage after the other, in the order of their last W or B, while it goes on computing. An iteration
ends when all have updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.cost import CostError, Costs, Links
from penstock.cost.mesh import Mesh, Ring
from penstock.dispatch import Dispatch
from penstock.schedule import Op, Schedule, ScheduleError
from penstock.schedule.messages import remove_communication
from penstock.schedule.short_repr import short_repr
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.simulation.transport import SimulatedTransport

WEIGHT_KINDS = ("W", "B")
"""What adds to a stage's gradients."""


class TimedReduction(NamedTuple):
    """The gradients of one stage, added up over all replicas.

    Attributes:
        rank: the rank that adds up.
        stage: the stage whose gradients are added up.
        ready: when the last replica had run the stage's last W or B (ms).
        start, end: later than `ready` where the rank was still adding up another stage.

    Examples:
        >>> import penstock as ps
        >>> mesh = ps.Mesh(pp=4, dp=2)
        >>> ran = ps.simulation.simulate_mesh(ps.build("zb", 4, 12), ps.cost.costs_preset("gpt2-7b"), mesh)
        >>> [each.rank for each in ran.reductions], all(each.start >= each.ready for each in ran.reductions)
        ([0, 1, 2, 3], True)
    """

    rank: int
    stage: int
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class MeshTimeline:
    """One iteration of a mesh.

    Attributes:
        mesh: where the nodes lay.
        replicas: the timeline of each one's pipeline.
        reductions: one per stage, by rank and start; none where there is one replica.
        iteration: first op's start to the last update's end (ms).

    Examples:
        >>> import penstock as ps
        >>> mesh = ps.Mesh(pp=4, dp=2)
        >>> ran = ps.simulation.simulate_mesh(ps.build("zb", 4, 12), ps.cost.costs_preset("gpt2-7b"), mesh)
        >>> len(ran.replicas), len(ran.reductions), ran.iteration >= ran.replicas[0].makespan
        (2, 4, True)
    """

    mesh: Mesh
    replicas: tuple[Timeline, ...]
    reductions: tuple[TimedReduction, ...]
    iteration: float

    __repr__ = short_repr

    @property
    def makespan(self) -> float:
        """The longest of the pipelines alone (ms)."""
        return max(timeline.makespan for timeline in self.replicas)

    @property
    def exposed(self) -> float:
        """How much of the iteration only adds gradients up, besides updates (ms)."""
        last = max((each.end for each in self.reductions), default=0.0)
        return max(0.0, last - max(t.end for timeline in self.replicas for t in timeline.ops))


def simulate_mesh(
    schedule: Schedule,
    costs: Costs,
    mesh: Mesh,
    *,
    links: Links | None = None,
    ring: Ring | None = None,
    dispatch: Dispatch | str = Dispatch.FROZEN,
    transport: SimulatedTransport | str = "decoupled",
    memory_limit: float | Sequence[float] | None = None,
    links_at: float = 0.0,
) -> MeshTimeline:
    """Runs `schedule` on every replica of `mesh` and adds up gradients over its rings. Deterministic.

    Args:
        schedule: of one pipeline; every replica runs it.
        mesh: replicas, and the node at each of their places.
        costs: per stage; gradients weigh `gradient_bytes` (`weight_bytes` where not given), an update takes what
            kind "U" costs.
        links: between nodes, not ranks. Each serves what `mesh.use` says.
        ring: how rings move bytes.
        dispatch: of every replica, as in `simulate`.
        transport: of every replica, as in `simulate`; delegated links are pairs of ranks.
        memory_limit: of every replica, as in `simulate`.
        links_at: when the iteration begins, in ms of the links' own time.

    Raises:
        ScheduleError: for another number of ranks, with several pipelines, or with updates as ops.
        CostError: as `simulate`; a link that names a node which is not there; several replicas and no bytes.

    Examples:
        >>> import penstock as ps
        >>> mesh, costs = ps.Mesh(pp=4, dp=2), ps.cost.costs_preset("gpt2-7b")
        >>> zb = ps.build("zb", num_ranks=4, num_microbatches=12)
        >>> late = ps.Links.parse("6:7=latency:30ms+bandwidth:50GB/s")
        >>> print(mesh.use(6, 7), round(ps.simulation.simulate_mesh(zb, costs, mesh, links=late).iteration))
        DP ring of rank 3 3653
    """
    schedule = remove_communication(schedule)
    conditions = Links.of(links)
    require_mesh(schedule, costs, mesh, conditions)
    replicas = tuple(
        simulate(
            schedule,
            costs,
            links=mesh.links_of(conditions, replica),
            dispatch=dispatch,
            transport=transport,
            memory_limit=memory_limit,
            links_at=links_at,
        )
        for replica in range(mesh.dp)
    )
    ends = [[row[-1].end if row else 0.0 for row in timeline.rows] for timeline in replicas]
    ring = ring or Ring()

    def ring_ms(rank: int, num_bytes: float, start: float) -> float:
        return ring.all_reduce_ms(num_bytes, mesh.ring_links(conditions, rank), conditions.base, links_at + start)

    reductions, iteration = after_pipelines(
        last_gradients(schedule),
        [_done(timeline) for timeline in replicas],
        ends,
        costs,
        mesh,
        ring_ms,
    )
    return MeshTimeline(mesh, replicas, reductions, iteration)


def require_mesh(schedule: Schedule, costs: Costs, mesh: Mesh, conditions: Links) -> None:
    """Raises what `simulate_mesh` says of a schedule or costs that do not go with a mesh."""
    if schedule.num_ranks != mesh.pp:
        raise ScheduleError(
            f"the schedule is for {schedule.num_ranks} ranks, the mesh has {mesh.pp} per replica: "
            f"give pp={schedule.num_ranks}",
            rule="mesh",
        )
    if schedule.updates is not None or schedule.placement.num_pipelines > 1:
        raise ScheduleError(
            f"{schedule.name} adds gradients up between its own copies, or has its updates in the order; a mesh is "
            "simulated for schedules of one pipeline whose updates are no ops: use ps.simulate, or another schedule",
            rule="mesh",
        )
    for a, b in conditions.conditions:
        if not (0 <= a < mesh.num_nodes and 0 <= b < mesh.num_nodes):
            raise CostError(f"link {a}:{b}: nodes go from 0 to {mesh.num_nodes - 1}")
    if mesh.dp > 1 and not gradient_bytes(costs):
        raise CostError(
            "replicas add gradients up, and the costs have neither gradient_bytes nor weight_bytes; give one"
        )


def gradient_bytes(costs: Costs) -> Sequence[float]:
    """What each stage's gradients weigh."""
    return costs.gradient_bytes or costs.weight_bytes


def last_gradients(schedule: Schedule) -> list[list[Op]]:
    """Of each rank, the op after which each of its stages has its whole gradient, in the order of the schedule."""
    found = []
    for row in schedule.order:
        last = {op.stage: op for op in row if op.kind in WEIGHT_KINDS}
        place = {op: at for at, op in enumerate(row)}
        found.append(sorted(last.values(), key=place.__getitem__))
    return found


def _done(timeline: Timeline) -> dict[int, float]:
    """When each stage had its whole gradient."""
    done: dict[int, float] = {}
    for timed in timeline.ops:
        if timed.op.kind in WEIGHT_KINDS:
            done[timed.op.stage] = max(done.get(timed.op.stage, 0.0), timed.end)
    return done


def after_pipelines(
    last: Sequence[Sequence[Op]],
    done: Sequence[Mapping[int, float]],
    ends: Sequence[Sequence[float]],
    costs: Costs,
    mesh: Mesh,
    ring_ms: Callable[[int, float, float], float],
) -> tuple[tuple[TimedReduction, ...], float]:
    """Lays out reductions and updates behind the pipelines of all replicas.

    Args:
        last: of each rank, its stages' last ops, in order. done: of each replica, when each stage had its gradient.
        ends: of each replica, when each rank ended its last op.
        ring_ms: how long a rank's ring takes for bytes, beginning at a moment.

    Returns:
        The reductions, and when the last rank has updated (ms).
    """
    weighs, reductions, iteration = gradient_bytes(costs), [], 0.0
    for rank, ops in enumerate(last):
        free = 0.0
        for op in ops if mesh.dp > 1 else ():
            ready = max(times[op.stage] for times in done)
            start = max(ready, free)
            num_bytes = weighs[op.stage]
            free = start + ring_ms(rank, num_bytes, start)
            reductions.append(TimedReduction(rank, op.stage, ready, start, free))
        update = sum(costs.duration("U", op.stage) for op in ops)
        iteration = max(iteration, max(free, *(row[rank] for row in ends)) + update)
    return tuple(reductions), iteration
