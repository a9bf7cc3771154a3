"""Asynchronous ops: a rank starts them and goes on, as a device does with its communication stream.

    order      rank 1 | F0 F1 G0* B0 F2                     (* is asynchronous; B0 needs it)
    runs as    rank 1 | F0 F1 ~~~~~~ B0 F2
               stream |       G0====

A rank comes to such an op when all before it in its row have ended. From then on it waits on the rank's stream, and
begins when what it needs is there and the asynchronous ops before it have ended; one of several ranks, when it may
begin on all of them. So everything that runs an order runs rows: those of the ranks, and where there are asynchronous
ops as many streams, whose ops also wait until the rank has come to them.

Asynchronous ops may hold memory. What one takes it holds from its start; what one gives back is free at its end, and
held until then. So under a memory limit what needs the room waits for that end, like F2 here:

    limit 2    rank 0 | F0 D0* F1 F2          (D0 gives back what F0 keeps)
    runs as    rank 0 | F0 F1 .  F2
               stream |    D0===

Those that Penstock knows by name move activations to host memory: OFFLOAD takes one away after its forward, RELOAD
brings it back before its backward. They are registered ops, of those microbatches alone that go away, and they run
one after the other: the way to host memory is one link of the rank.

    rank 0 | F0 OFFLOAD0 F1 F2 .  B1 RELOAD0 B2 B0
    stream |    OFFLOAD0==      (F2 needs the room)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from penstock.engine.memory import levels_at_most
from penstock.engine.tolerance import EPSILON, is_within
from penstock.schedule.dependencies import predecessors
from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Op
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_graph import Needs, Registered, StageGraph


def rows_of(schedule: Schedule) -> tuple[tuple[Op, ...], ...]:
    """What runs one after the other: the ops of each rank; then, where ops are asynchronous, those of its stream."""
    apart = schedule.asynchronous
    if not apart:
        return schedule.order
    ranks = tuple(tuple(op for op in row if op[:2] not in apart) for row in schedule.order)
    return ranks + tuple(tuple(op for op in row if op[:2] in apart) for row in schedule.order)


def launches(schedule: Schedule) -> Iterator[tuple[Op, Op, int]]:
    """(the last op that a rank runs itself before it comes to an asynchronous one, that one, the rank)."""
    apart = schedule.asynchronous
    for rank, row in enumerate(schedule.order if apart else ()):
        before: Op | None = None
        for op in row:
            if op[:2] not in apart:
                before = op
            elif before is not None:
                yield before, op, rank


def in_executed_order(schedule: Schedule, rows: Sequence[tuple[Op, ...]]) -> Schedule:
    """The schedule with the ranks' own ops in the order in which they ran. The asynchronous ones are put in: each
    once what it comes after in the schedule has run, and what it needs of its rank.

    A dynamic run keeps to memory in the unit of its costs, in which an I can give back what `max_in_flight` counts
    until the W. Where more were in flight than the schedule's own `max_in_flight`, the one returned has none.
    """
    order = tuple(rows)
    if schedule.asynchronous:
        after = {(op, rank): before for before, op, rank in launches(schedule)}
        order = joined(schedule.graph, rows, rows_of(schedule)[schedule.num_ranks :], after)
    ran = replace(schedule, order=order)
    limit = ran.max_in_flight
    return ran if limit is None or keeps_to(ran, limit) else replace(ran, max_in_flight=None)


def joined(
    graph: StageGraph,
    rows: Sequence[Sequence[Op]],
    streams: Sequence[Sequence[Op]],
    after: Mapping[tuple[Op, int], Op] | None = None,
) -> tuple[tuple[Op, ...], ...]:
    """The rows of ranks and of their streams as one row per rank, each asynchronous op as early as it may be.

    Args:
        after: by (asynchronous op, rank) what else of the rank's row it comes after.
    """
    present = {op: rank for rank, row in enumerate(rows) for op in row}
    present |= {op: rank for rank, row in enumerate(streams) for op in row}
    after = after or {}
    found = []
    for rank, (row, stream) in enumerate(zip(rows, streams, strict=True)):
        place = {op: number for number, op in enumerate(row)}
        put: list[list[Op]] = [[] for _ in range(len(row) + 1)]
        latest = -1
        before = _needed_before(graph, row, stream, present)
        for op, needing in zip(stream, before, strict=True):
            needed = predecessors(op, graph, present)
            if (op, rank) in after:
                latest = max(latest, min(place[after[op, rank]], needing - 1))
            latest = max([latest, *(place[each] for each in needed if each in place)])
            put[latest + 1].append(op)
        found.append((*put[0], *(each for op, more in zip(row, put[1:], strict=True) for each in (op, *more))))
    return tuple(found)


def _needed_before(
    graph: StageGraph, row: Sequence[Op], stream: Sequence[Op], present: Mapping[Op, int]
) -> list[int]:
    """Of each op of a stream, the first place of the row that waits for it or for one after it."""
    number = {op: index for index, op in enumerate(stream)}
    found = [len(row)] * len(stream)
    for place, op in reversed(list(enumerate(row))):
        for each in predecessors(op, graph, present):
            if each in number:
                found[number[each]] = place
    for index in range(len(found) - 1, 0, -1):
        found[index - 1] = min(found[index - 1], found[index])
    return found


def activations_added(
    op: Op, recomputed: Set[tuple[int, int]], holds: Mapping[tuple[str, int], float] | None = None
) -> float:
    """What `op` adds to the stage activations its rank holds: they live from F (or R) to B or W.

    `recomputed` holds (stage, microbatch) of every R: those F keep only their input, which is not counted. `holds` is
    that of the stage graph.
    """
    if op.kind == FORWARD:
        return 0 if (op.stage, op.microbatch) in recomputed else 1
    if op.kind == RECOMPUTE:
        return 1
    if op.kind in (BACKWARD, WEIGHT):
        return -1
    return holds.get(op[:2], 0) if holds else 0


def memory_edges(schedule: Schedule, limit: float) -> list[tuple[Op, Op]]:
    """(asynchronous op, later op of the same rank) where the later one needs the room that the first gives back.

    With these no rank holds more than `limit` while it follows its order, whatever comes late. There are none where
    waiting does not help: `check` says what is wrong then.
    """
    if not any(name in schedule.asynchronous for name in schedule.graph.holds):
        return []
    return [edge for row in schedule.order for edge in walk_memory(schedule, row, limit)[1]]


def walk_memory(
    schedule: Schedule, row: Sequence[Op], limit: float | None
) -> tuple[list[float], list[tuple[Op, Op]]]:
    """The stage activations that a rank holds at most from the start of each op of its row, and its memory edges."""
    apart, graph = schedule.asynchronous, schedule.graph
    again = {(op.stage, op.microbatch) for op in row if op.kind == RECOMPUTE}
    stream = [op for op in row if op[:2] in apart]
    number = {op: index for index, op in enumerate(stream, start=1)}
    present = dict.fromkeys(row, 0)
    awaited = [max([0, *(number.get(each, 0) for each in predecessors(op, graph, present))]) for op in row]
    changes = [activations_added(op, again, graph.holds) for op in row]
    room = math.inf if limit is None else limit * (1 + EPSILON)
    levels, waits = levels_at_most(changes, [op in number for op in row], awaited, room)
    return levels, [(stream[index - 1], row[place]) for place, index in waits]


def keeps_to(schedule: Schedule, limit: float) -> bool:
    """Whether no rank ever holds more than `limit` stage activations in its order."""
    rows = (walk_memory(schedule, row, schedule.max_in_flight)[0] for row in schedule.order)
    return all(is_within(max(levels, default=0.0), limit) for levels in rows)


def require_no_streams(schedule: Schedule, what: str) -> None:
    """Raises ScheduleError where ops are asynchronous; `what` says who takes none."""
    if schedule.asynchronous:
        kinds = ", ".join(sorted({kind for kind, _ in schedule.asynchronous}))
        raise ScheduleError(
            f"{schedule.name} has asynchronous ops ({kinds}), and {what}; give it without them (rule: kind)",
            rule="kind",
        )


OFFLOAD, RELOAD = "OFFLOAD", "RELOAD"
MOVES = frozenset((OFFLOAD, RELOAD))


def with_offload(schedule: Schedule, waits: Iterable[tuple[Op, Op]] = ()) -> Schedule:
    """Registers the OFFLOAD and RELOAD ops that stand in a schedule's rows, with what they need and what needs them.

    Args:
        waits: (offload, forward) that starts when the offload has given its memory back, where no memory limit of the
            schedule says so.

    Raises:
        ScheduleError: one of the two is there without the other.
    """
    found: dict[int, dict[str, set[int]]] = {}
    for row in schedule.order:
        for op in row:
            if op.kind in MOVES:
                found.setdefault(op.stage, {OFFLOAD: set(), RELOAD: set()})[op.kind].add(op.microbatch)
    registered, needs = [], []
    for stage, of_kind in sorted(found.items()):
        away = tuple(sorted(of_kind[OFFLOAD]))
        if odd := sorted(of_kind[OFFLOAD] ^ of_kind[RELOAD]):
            raise ScheduleError(
                f"microbatch {odd[0]} of stage {stage} has one of {OFFLOAD} and {RELOAD}; give it both, or none",
                rule="coverage",
            )
        for kind, holds in ((OFFLOAD, -1.0), (RELOAD, 1.0)):
            registered.append(Registered(kind, stage, len(away), asynchronous=True, holds=holds, microbatches=away))
        out, back = (OFFLOAD, stage), (RELOAD, stage)
        needs += [Needs((FORWARD, stage), out), Needs(out, back), Needs(back, (BACKWARD, stage))]
    pairs: dict[tuple[tuple[str, int], tuple[str, int]], list[tuple[int, int]]] = {}
    for before, after in waits:
        if (before.stage, before.microbatch, before.kind) != (after.stage, after.microbatch, RELOAD):
            pairs.setdefault((before[:2], after[:2]), []).append((before.microbatch, after.microbatch))
    needs += [Needs(*ends, pairs=tuple(sorted(named))) for ends, named in sorted(pairs.items())]
    graph = schedule.graph
    graph = replace(graph, registered=(*graph.registered, *registered), needs=(*graph.needs, *needs), updates=None)
    return replace(schedule, stage_graph=graph)


def without_offload(schedule: Schedule) -> Schedule:
    """The schedule without OFFLOAD and RELOAD: all activations stay on their ranks. The inverse of `with_offload`."""
    given = schedule.stage_graph
    if given is None or not any(kind in MOVES for kind, _ in schedule.asynchronous):
        return schedule
    rows = tuple(tuple(op for op in row if op.kind not in MOVES) for row in schedule.order)
    registered = tuple(each for each in given.registered if each.kind not in MOVES)
    needs = tuple(each for each in given.needs if not MOVES & {each.before[0], each.after[0]})
    graph = replace(given, registered=registered, needs=needs)
    return replace(schedule, order=rows, stage_graph=None if graph.is_chain else graph)
