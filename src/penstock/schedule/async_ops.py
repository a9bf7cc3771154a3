"""Asynchronous ops: a rank starts them and goes on, as a device does with its communication stream.

    order      rank 1 | F0 F1 G0* B0 F2                     (* is asynchronous; B0 needs it)
    runs as    rank 1 | F0 F1 ~~~~~~ B0 F2
               stream |       G0====

A rank comes to such an op when all before it in its row have ended. From then on it waits on the rank's stream, and
begins when what it needs is there and the asynchronous ops before it have ended; one of several ranks, when it may
begin on all of them. So everything that runs an order runs rows: those of the ranks, and where there are asynchronous
ops as many streams, whose ops also wait until the rank has come to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.schedule.dependencies import predecessors
from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import Op
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_graph import StageGraph

__all__ = ["joined", "launches", "require_no_streams", "rows_of", "with_launches"]


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


def with_launches(schedule: Schedule, rows: Sequence[tuple[Op, ...]]) -> tuple[tuple[Op, ...], ...]:
    """Rows of the ranks' own ops, in whatever order, with the schedule's asynchronous ones put in: each once what it
    comes after in the schedule has run, and what it needs of its rank.
    """
    if not schedule.asynchronous:
        return tuple(rows)
    after = {(op, rank): before for before, op, rank in launches(schedule)}
    return joined(schedule.graph, rows, rows_of(schedule)[schedule.num_ranks :], after)


def joined(
    graph: StageGraph,
    rows: Sequence[Sequence[Op]],
    streams: Sequence[Sequence[Op]],
    after: Mapping[tuple[Op, int], Op] | None = None,
) -> tuple[tuple[Op, ...], ...]:
    """The rows of ranks and of their streams as one row a rank, each asynchronous op as early as it may be.

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
        for op in stream:
            needed = predecessors(op, graph, present)
            if (op, rank) in after:
                needed.append(after[op, rank])
            latest = max([latest, *(place[each] for each in needed if each in place)])
            put[latest + 1].append(op)
        found.append((*put[0], *(each for op, more in zip(row, put[1:], strict=True) for each in (op, *more))))
    return tuple(found)


def require_no_streams(schedule: Schedule, what: str) -> None:
    """Raises ScheduleError where ops are asynchronous; `what` says who takes none."""
    if schedule.asynchronous:
        kinds = ", ".join(sorted({kind for kind, _ in schedule.asynchronous}))
        raise ScheduleError(
            f"{schedule.name} has asynchronous ops ({kinds}), and {what}; give it without them (rule: kind)",
            rule="kind",
        )
