"""Repeats a synchronous schedule: window after window, with an update of each stage between them and no barrier.

A synchronous step ends with all gradients summed and every stage updated. That asks no rank to wait for all others:
a stage may go on with the next window as soon as its own update is done. So what counts over many steps is not the
makespan of one, but how closely they follow one another, which is what zero-bubble schedules are good at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.schedule import (
    MicrobatchOrder,
    Needs,
    Op,
    Pair,
    Schedule,
    ScheduleError,
    Updates,
    Windows,
    check,
    require_no_updates,
)
from penstock.schedule.messages import has_communication
from penstock.schedule.op import FORWARD, UPDATE
from penstock.schedule.updates import OWNER

Row = list[Op]


def repeat_windows(schedule: Schedule, num_windows: int) -> Schedule:
    """A synchronous schedule `num_windows` times over, its microbatches being one window of an update each.

        before   rank 0 | F0 F1 .  B0 .  B1            2 windows   rank 0 | F0 F1 .  B0 .  B1 U0 F2 F3 .  B2 .  B3 U1
                 rank 1 | .  F0 B0 F1 B1                           rank 1 | .  F0 B0 F1 B1 U0 .  .  F2 B2 F3 B3 U1

    Ranks run each window in the order they were given. When a rank has run a whole window, the owners among its
    stages update, beginning with the one whose forward comes first. Not before: with several pipelines their sums
    need other ranks' copies, and those may need what this rank has still to run. Another copy takes an update over
    just before its next forward.

    No update falls between a forward and its backward on any copy (`max_mismatch` is 0, and proved), so the numbers
    are those of as many synchronous steps. Peaks stay as they were.

    Args:
        schedule: a synchronous schedule: one window.
        num_windows: how many times it runs.

    Raises:
        ScheduleError: a schedule that is not valid, has updates already or messages as ops, stages that work on
            other numbers of microbatches, or a number of windows below 1.

    Examples:
        >>> import penstock as ps
        >>> s = ps.passes.repeat_windows(ps.build("1f1b", 2, 2), num_windows=2)
        >>> s.num_microbatches, s.updates.window, max(ps.schedule.count_mismatch(s).values())
        (4, 2, 0)
    """
    require_no_updates(schedule, "repeat_windows puts them in")
    if not isinstance(num_windows, int) or isinstance(num_windows, bool) or num_windows < 1:
        raise ScheduleError(f"num_windows is {num_windows!r}; give a whole number from 1", rule="options")
    if has_communication(schedule):
        raise ScheduleError(
            f"{schedule.name} has messages as ops, which are not repeated; take them out with "
            "penstock.passes.remove_communication first",
            rule="message",
        )
    check(schedule)
    window = schedule.num_microbatches
    windows = Windows(window, num_windows * window, schedule.placement.num_pipelines)
    graph = schedule.stage_graph
    if graph is not None:
        again = range(0, num_windows * window, window)
        registered = tuple(
            replace(
                r, num_ops=r.num_ops * num_windows, microbatches=tuple(at + m for at in again for m in r.microbatches)
            )
            for r in graph.registered
        )
        needs = tuple(
            replace(need, pairs=tuple(_paired(schedule, need, num_windows))) if need.pairs else need
            for need in graph.needs
        )
        graph = replace(graph, registered=registered, needs=needs)
    repeated = replace(
        schedule,
        order=tuple(tuple(_repeated(schedule, rank, windows)) for rank in range(schedule.num_ranks)),
        microbatch_pipeline=schedule.microbatch_pipeline * num_windows,
        stage_graph=graph,
        updates=Updates(window, max_mismatch=0),
        microbatch_orders=tuple(
            replace(order, microbatches=tuple(_again(schedule, order, num_windows)))
            for order in schedule.microbatch_orders
        ),
        pairs=tuple(
            Pair(*(_numbered(schedule, op, update) for op in pair))
            for update in range(num_windows)
            for pair in schedule.pairs
        ),
    )
    check(repeated)
    return repeated


def _repeated(schedule: Schedule, rank: int, windows: Windows) -> Row:
    """A rank's row of all windows, where what other copies take over is put off until they need it."""
    row, placement = schedule.order[rank], schedule.placement
    hosted = [
        (stage, k)
        for k in range(windows.num_pipelines)
        for stage in range(schedule.num_stages)
        if rank in placement.hosts(k, stage)
    ]
    owned = sorted((s for s, k in hosted if k == OWNER), key=lambda s: _first_forward(schedule, rank, s))
    late: dict[tuple[int, int], Op] = {}
    found: Row = []
    for update in range(windows.num_updates):
        for op in row:
            if op.kind == FORWARD and (due := late.pop((op.stage, schedule.pipeline_of(op)), None)) is not None:
                found.append(due)
            found.append(_numbered(schedule, op, update))
        found += late.values()  # of copies that no microbatch of this window went to
        found += [Op(UPDATE, stage, windows.number(update, OWNER)) for stage in owned]
        late = {(stage, k): Op(UPDATE, stage, windows.number(update, k)) for stage, k in hosted if k != OWNER}
    return [*found, *late.values()]


def _again(schedule: Schedule, order: MicrobatchOrder, num_windows: int) -> Iterator[int]:
    """The order of a queue that runs window after window, each in the order given."""
    for update in range(num_windows):
        for m in order.microbatches:
            yield _numbered(schedule, Op(order.kind, order.stage, m), update).microbatch


def _numbered(schedule: Schedule, op: Op, update: int) -> Op:
    """An op of the given schedule as it is called in a later window."""
    registered = schedule.graph.registered_of.get((op.kind, op.stage))
    each = registered.num_ops if registered and not registered.microbatches else schedule.num_microbatches
    return op._replace(microbatch=op.microbatch + update * each)


def _paired(schedule: Schedule, need: Needs, num_windows: int) -> Iterator[tuple[int, int]]:
    """The pairs of a need in all windows."""
    for update in range(num_windows):
        for a, b in need.pairs:
            before, after = (
                _numbered(schedule, Op(*end, m), update) for end, m in ((need.before, a), (need.after, b))
            )
            yield before.microbatch, after.microbatch


def _first_forward(schedule: Schedule, rank: int, stage: int) -> int:
    """The step of the first forward of the owner's copy of a stage, by which it needs its update."""
    row = schedule.order[rank]
    steps = (n for n, op in enumerate(row) if op[:2] == (FORWARD, stage) and schedule.pipeline_of(op) == OWNER)
    return next(steps, len(row))
