"""The part of `check` that is about the order of microbatches: every queue runs its ops in the order declared."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.schedule.error_context import error_at, name_of
from penstock.schedule.errors import ScheduleError
from penstock.schedule.microbatch_order import RULE, MicrobatchOrder, order_kind, places_of, queue_name, shown
from penstock.schedule.op import BACKWARD, COMMUNICATION, FORWARD, INPUT, RECOMPUTE, UPDATE, WEIGHT, Op
from penstock.schedule.schedule import Schedule

_CHAINS: dict[str, tuple[str, ...]] = {
    FORWARD: (FORWARD,),
    BACKWARD: (INPUT, WEIGHT),
    INPUT: (INPUT,),
    WEIGHT: (WEIGHT,),
    RECOMPUTE: (RECOMPUTE,),
} | dict.fromkeys((*COMMUNICATION, UPDATE), ())
"""The chains that an op is a part of, each of which comes in order; a registered kind has its own. B is in that of I,
as both add to the gradients that do not wait, and in that of W, which adds to those that do. Messages are matched by
a rule of their own, and updates need one another."""


def check_microbatch_order(schedule: Schedule) -> None:
    """Every queue runs its microbatches in its declared order; the ops of a schedule that is covered."""
    places = places_of(schedule.microbatch_orders)
    pipelines = schedule.microbatch_pipeline if schedule.placement.num_pipelines > 1 else None
    some_of = schedule.graph.some_of
    for rank, row in enumerate(schedule.order):
        reached: dict[tuple[str, int, int], int] = {}
        for step, op in enumerate(row):
            kind, stage, m = op
            chains = _CHAINS.get(kind)
            if chains is None:
                chains = (kind,)
                pipeline = 0 if pipelines is None or (kind, stage) not in some_of else pipelines[m]
            else:
                pipeline = 0 if pipelines is None or not chains else pipelines[m]
            place = m
            if places and chains:
                place = _place(places, order_kind(kind), stage, pipeline, m)
            for chain in chains:
                key = chain, stage, pipeline
                if place < reached.get(key, 0):
                    raise _out_of_order(schedule, rank, step, op, pipeline, chain)
                reached[key] = place + 1


def _place(
    places: Mapping[tuple[str, int, int], Mapping[int, int]], kind: str, stage: int, pipeline: int, m: int
) -> int:
    """Where a microbatch comes in the order of its queue; by its number in a queue that declares none."""
    declared = places.get((kind, stage, pipeline))
    return m if declared is None else declared[m]


def _out_of_order(schedule: Schedule, rank: int, step: int, op: Op, pipeline: int, chain: str) -> ScheduleError:
    """The error at the op that comes too late; it tells what came before it."""
    kind = order_kind(op.kind)
    order = schedule.microbatches_of(kind, op.stage, pipeline)
    place = {m: number for number, m in enumerate(order)}
    before = next(
        each
        for each in reversed(schedule.order[rank][:step])
        if each.stage == op.stage
        and chain in _CHAINS.get(each.kind, (each.kind,))
        and (each.kind not in _CHAINS or schedule.pipeline_of(each) == pipeline)
        and place[each.microbatch] > place[op.microbatch]
    )
    queue = queue_name(schedule, MicrobatchOrder(kind, op.stage, (), pipeline))
    others = ", which I, W and R keep too," if kind == BACKWARD else ""
    way = {FORWARD: "forward=[...]", BACKWARD: "backward=[...]"}.get(kind)
    declare = (
        f"ps.schedule.declare_order(schedule, {way})"
        if way
        else f"microbatch_orders=(ps.schedule.MicrobatchOrder({kind!r}, {op.stage}, (...)),)"
    )
    message = (
        f"{name_of(before)} comes before it, at step {schedule.order[rank].index(before)}, but the order of {queue}"
        f"{others} is {shown(order)}. Sums depend on it: keep the order, or declare another with {declare}, for a "
        "file with ps.load(..., declare_order=True) or penstock show --declare-order --out"
    )
    return error_at(schedule, RULE, rank, step, op, message, peer=name_of(before))
