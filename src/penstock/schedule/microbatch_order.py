"""In which order each queue of ops runs its microbatches: ascending, unless the schedule declares another.

A queue is the ops of one kind of one stage in one pipeline. Numbers depend on its order: a gradient is a sum over
microbatches, and a sum of floats rounds differently in another order; a forward may take note of what it was given,
as BatchNorm does. So the order is a part of the schedule, `check` holds the rows to it, and no dispatch changes it.

    rank 1 | F0 F1 F2 B2 B1 B0             order of B on stage 1: 2 1 0

F has an order of its own. B, I, W and R of a stage share one, called that of B: B or I adds the gradients that can't
wait, B or W those that can, and all parameters of a stage are to be summed in one order. A parameter that several
stages share is summed in the order of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.schedule.short_repr import short_repr

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule

Order = Sequence[int] | Literal["ascending", "reversed"]
"""An order as it is given: microbatches, each once; of several pipelines' each queue takes its own from it."""

_SHOWN = 8


@dataclass(frozen=True)
class MicrobatchOrder:
    """The order in which one queue runs its microbatches.

    Attributes:
        kind: F; B for the backward in whatever form (B, I, W and R keep the same order); or a registered kind.
        stage: the queue's stage.
        microbatches: those of the queue, each once, first to last; of a registered kind its ops by number.
        pipeline: the queue's pipeline; 0 for registered kinds.

    Raises:
        ScheduleError: microbatches that are not whole numbers.

    Examples:
        >>> import penstock as ps
        >>> s = ps.schedule.declare_order(ps.build("gpipe", 2, 3), backward="reversed", stages=[1])
        >>> s.microbatch_orders
        (MicrobatchOrder(kind='B', stage=1, microbatches=(2, 1, 0)),)
    """

    kind: str
    stage: int
    microbatches: tuple[int, ...]
    pipeline: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        try:
            given = tuple(map(index, self.microbatches))
        except TypeError:
            said = f"the order of {self.kind} on stage {self.stage} is {self.microbatches!r}"
            raise _refused(f"{said}: give microbatches, like (2, 1, 0)") from None
        object.__setattr__(self, "microbatches", given)


def order_kind(kind: str) -> str:
    """The kind by whose name the order of an op's queue is declared: B stands for I, W and R too."""
    return BACKWARD if kind in (INPUT, WEIGHT, RECOMPUTE) else kind


def ascending_order(schedule: Schedule, kind: str, stage: int, pipeline: int) -> Sequence[int]:
    """The microbatches of a queue, ascending; the numbers of a registered kind's ops."""
    graph = schedule.stage_graph
    if graph is not None:
        if registered := graph.registered_of.get((kind, stage)):
            return registered.numbers
        if graph.num_microbatches:
            return range(graph.num_microbatches[stage])
    return schedule.pipeline_microbatches[pipeline]


def declared(schedule: Schedule, orders: Iterable[MicrobatchOrder]) -> tuple[MicrobatchOrder, ...]:
    """The orders that say more than "ascending", sorted: two schedules that mean the same hold the same.

    Raises:
        ScheduleError: an order of a queue that is not there, a second one of the same queue, or one that does not
            hold each of the queue's microbatches once.
    """
    found: dict[tuple[str, int, int], MicrobatchOrder] = {}
    for order in orders:
        _require_queue(schedule, order)
        key = order.kind, order.pipeline, order.stage
        if key in found:
            raise _refused(f"the order of {queue_name(schedule, order)} is declared twice")
        found[key] = order
    kept = []
    for key in sorted(found):
        order = found[key]
        own = tuple(ascending_order(schedule, order.kind, order.stage, order.pipeline))
        if order.microbatches != own:
            _require_permutation(schedule, order, own)
            kept.append(order)
    return tuple(kept)


def _refused(message: str) -> ScheduleError:
    return ScheduleError(message, rule="microbatches")


def _require_queue(schedule: Schedule, order: MicrobatchOrder) -> None:
    graph, kind, stage, pipeline = schedule.stage_graph, order.kind, order.stage, order.pipeline
    registered = graph is not None and (kind, stage) in graph.registered_of
    num_pipelines = 1 if registered else schedule.placement.num_pipelines
    if kind not in (FORWARD, BACKWARD) and not registered:
        raise _refused(
            f"an order is declared for {kind} of stage {stage}: declare that of F, that of B (which I, W and R keep "
            "too), or that of a kind registered for the stage; updates and messages have none"
        )
    if not 0 <= stage < schedule.num_stages:
        there = f"stages go from 0 to {schedule.num_stages - 1}"
        raise _refused(f"an order is declared for stage {stage}, which is not there: {there}")
    if not 0 <= pipeline < num_pipelines:
        where = f"{kind} of stage {stage} in pipeline {pipeline}, where there are none"
        raise _refused(f"an order is declared for {where}: pipelines go from 0 to {num_pipelines - 1}")


def _require_permutation(schedule: Schedule, order: MicrobatchOrder, own: Sequence[int]) -> None:
    given = order.microbatches
    missing, others = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if sorted(given) != list(own):
        wrong = f"{others[0]} is none of them" if others else "some are there twice"
        raise _refused(
            f"the order declared for {queue_name(schedule, order)} is {shown(given)}, and "
            f"{f'{missing[0]} is missing' if missing else wrong}; give each of its microbatches once, which are "
            f"{shown(own)}"
        )


def queue_name(schedule: Schedule, order: MicrobatchOrder) -> str:
    """A queue in words."""
    where = f" in pipeline {order.pipeline}" if schedule.placement.num_pipelines > 1 else ""
    return f"{order.kind} of stage {order.stage}{where}"


def shown(microbatches: Sequence[int]) -> str:
    """An order for an error, cut short where it is long."""
    first = " ".join(map(str, microbatches[:_SHOWN]))
    return first + (f" ... ({len(microbatches)} of them)" if len(microbatches) > _SHOWN else "")


def declare_order(
    schedule: Schedule,
    forward: Order | None = None,
    backward: Order | None = None,
    *,
    stages: Iterable[int] | None = None,
    pipelines: Iterable[int] | None = None,
) -> Schedule:
    """The schedule with the order of its forwards, of its backwards, or of both declared. Its rows stay as they are.

        rank 0 | F0 F1 F2 .  .  B2 B1 B0         declare_order(schedule, backward="reversed")
        rank 1 | .  F0 F1 F2 B2 B1 B0

    Args:
        schedule: any schedule.
        forward: the order of the forwards: "ascending", "reversed", or microbatches, each once. One permutation of
            all microbatches does for all queues: with several pipelines each takes its own from it. None leaves what
            is declared.
        backward: the order of the backwards, given alike.
        stages: the stages whose order it is; all where not given.
        pipelines: the pipelines whose order it is; all where not given.

    Raises:
        ScheduleError: an order that is no permutation of a queue's microbatches, or a stage or pipeline that is not
            there. Whether the rows keep the order, `check` says.

    Examples:
        >>> import penstock as ps
        >>> s = ps.schedule.declare_order(ps.build("gpipe", 2, 3), backward="reversed")
        >>> try:
        ...     ps.check(s)
        ... except ps.ScheduleError as error:
        ...     print(error.rule)
        microbatches
    """
    chosen = range(schedule.num_stages) if stages is None else tuple(stages)
    among = range(schedule.placement.num_pipelines) if pipelines is None else tuple(pipelines)
    orders = {(o.kind, o.stage, o.pipeline): o for o in schedule.microbatch_orders}
    for kind, given in ((FORWARD, forward), (BACKWARD, backward)):
        if given is None:
            continue
        for stage in chosen:
            for pipeline in among:
                placeholder = MicrobatchOrder(kind, stage, (), pipeline)
                _require_queue(schedule, placeholder)
                own = ascending_order(schedule, kind, stage, pipeline)
                orders[kind, stage, pipeline] = replace(placeholder, microbatches=_chosen(schedule, own, given))
    return replace(schedule, microbatch_orders=tuple(orders.values()))


def _chosen(schedule: Schedule, own: Sequence[int], given: Order) -> tuple[int, ...]:
    """A queue's microbatches in the order that was given."""
    if isinstance(given, str) and given in ("ascending", "reversed"):
        return tuple(own if given == "ascending" else reversed(own))
    microbatches: Iterable[Any] = given
    try:
        found = tuple(map(index, microbatches))
    except TypeError:
        text = f"the order is {given!r}: give 'ascending', 'reversed' or a sequence of microbatches"
        raise _refused(text) from None
    if schedule.placement.num_pipelines > 1 and sorted(found) == list(range(schedule.num_microbatches)):
        mine = set(own)
        return tuple(m for m in found if m in mine)
    return found


def declare_shown_order(schedule: Schedule) -> Schedule:
    """The schedule with the orders declared that its rows show, instead of those that it declares.

    For schedules from files that can't say it. Gradients are then summed as the rows have it, not in ascending order.
    Of backwards it is the order of B and W; where I shows another, `check` refuses it. A queue that lacks ops is left
    as it is.

    Args:
        schedule: any schedule.

    Examples:
        >>> import penstock as ps
        >>> declared = ps.schedule.declare_order(ps.build("gpipe", 2, 3), backward="reversed")
        >>> shown = ps.schedule.declare_shown_order(declared)  # whose rows are ascending still
        >>> shown.microbatch_orders, ps.check(shown)
        ((), None)
    """
    return replace(schedule, microbatch_orders=tuple(_shown_orders(schedule)))


def _shown_orders(schedule: Schedule) -> Iterator[MicrobatchOrder]:
    found: dict[tuple[str, int, int], dict[int, None]] = {}
    registered = schedule.graph.registered_of
    num_microbatches, num_stages = schedule.num_microbatches, schedule.num_stages
    for row in schedule.order:
        for kind, stage, microbatch in row:
            if (kind, stage) in registered:
                key = kind, stage, 0
            elif kind in (FORWARD, BACKWARD, WEIGHT) and 0 <= stage < num_stages and microbatch < num_microbatches:
                key = order_kind(kind), stage, schedule.microbatch_pipeline[microbatch]
            else:
                continue
            found.setdefault(key, {})[microbatch] = None  # of ranks that run a stage together, the first one's
    for (kind, stage, pipeline), microbatches in found.items():
        if sorted(microbatches) == list(ascending_order(schedule, kind, stage, pipeline)):
            yield MicrobatchOrder(kind, stage, tuple(microbatches), pipeline)


def grouped(orders: Iterable[MicrobatchOrder]) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    """(kind, pipeline, stages, microbatches): what files write, once for all stages that have the same order."""
    stages: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
    for order in orders:
        stages.setdefault((order.kind, order.pipeline, order.microbatches), []).append(order.stage)
    return [(kind, k, tuple(found), microbatches) for (kind, k, microbatches), found in stages.items()]


def ungrouped(
    kind: str, pipeline: int, stages: Iterable[int], microbatches: tuple[int, ...]
) -> list[MicrobatchOrder]:
    """The orders that such an entry stands for."""
    return [MicrobatchOrder(kind, stage, microbatches, pipeline) for stage in stages]


def places_of(orders: Iterable[MicrobatchOrder]) -> Mapping[tuple[str, int, int], Mapping[int, int]]:
    """By (kind, stage, pipeline) the place of each microbatch in a declared order."""
    return {(o.kind, o.stage, o.pipeline): {m: place for place, m in enumerate(o.microbatches)} for o in orders}
