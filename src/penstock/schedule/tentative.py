"""Tentative updates: late forwards read weights that the known part of their window's gradient has moved.

A forward is *late* if it runs before the update of an earlier window. Most backwards of that window are done by then:
the *known* ones. PREDICT asks the optimizer for the step that it would make of their mean gradient, and commits
nothing. GIVE sends what another copy of the stage knows to the owner.

    owner's rank    B0 B2 B4 .  PREDICT0 F8 B6 U0       two pipelines, windows of 8: F8 is late. It reads what the
                          /        |                    step from B0 B2 B4 and B1 B3 makes of the weights.
    other's rank    B1 B3 GIVE0 B5 PREDICT0 F9 B7 U0

GIVE and PREDICT are numbered as U is. Without a PREDICT before it, a late forward reads what the momentum predicts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.schedule.dependencies import predecessors, run_rows
from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, GIVE, INPUT, PREDICT, UPDATE, WEIGHT, Op
from penstock.schedule.updates import OWNER, TENTATIVE, Windows, with_ops_at

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule


def known_to(schedule: Schedule) -> dict[tuple[int, int], tuple[int, ...]]:
    """By (stage, update) the microbatches whose gradients PREDICT steps by, in all copies, ascending.

    Args:
        schedule: any schedule.

    Examples:
        >>> import penstock as ps
        >>> s = ps.schedule.with_tentative_updates(ps.build("amdp", 4, 32, window=16))
        >>> ps.schedule.known_to(s)[0, 0]
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    """
    windows = schedule.windows
    found: dict[tuple[int, int], list[int]] = {}
    for row in () if windows is None else schedule.order:
        ended: dict[tuple[int, int], list[int]] = {}
        for op in row:
            copy = op.stage, schedule.pipeline_of(op)
            if op.kind == BACKWARD:
                ended.setdefault(copy, []).append(op.microbatch)
            elif op.kind == GIVE or (op.kind == PREDICT and copy[1] == OWNER):
                assert windows is not None
                update, _ = windows.update_of(op.microbatch)
                window = windows.microbatches(update)
                found.setdefault((op.stage, update), []).extend(m for m in ended.get(copy, ()) if m in window)
    return {key: tuple(sorted(known)) for key, known in found.items()}


def with_tentative_updates(
    schedule: Schedule, duration: Callable[[Op], float] | None = None, message: float = 0.0
) -> Schedule:
    """The schedule with the rule `tentative`, and GIVE and PREDICT where late forwards need them.

    GIVE and PREDICT stand where, by these durations, no late forward waits for them.

    Args:
        schedule: has updates as ops, and whole backwards.
        duration: of an op, in any unit. Default: F 1, B 2, all others 0.
        message: how long gradients of a stage take to its owner, and parameters back, in the same unit.

    Raises:
        ScheduleError: no updates, or backwards in halves (I and W), whose gradients come at different times.

    Examples:
        >>> import penstock as ps
        >>> s = ps.schedule.with_tentative_updates(ps.build("pipedream-2bw", 2, 4, window=2))
        >>> " ".join(op.short() for op in s.order[0])
        'F0 F1 B0 PREDICT0 F2 B1 U0 F3 B2 B3 U1'
    """
    windows = schedule.windows
    if schedule.updates is None or windows is None:
        raise ScheduleError(f"{schedule.name} has no updates as ops; build it with a window", rule="updates")
    require_whole_backwards(schedule)
    bare = tuple(tuple(op for op in row if op.kind not in (GIVE, PREDICT)) for row in schedule.order)
    schedule = replace(schedule, order=bare, updates=replace(schedule.updates, rule=TENTATIVE))
    take = duration or (lambda op: {FORWARD: 1.0, BACKWARD: 2.0}.get(op.kind, 0.0))
    placed: list[list[tuple[int, Op]]] = [[] for _ in bare]
    pipelines, times = schedule.placement.pipelines, _start_times(schedule, take)
    for stage in range(schedule.num_stages):
        copies = [_CopyRow(schedule, windows, r[stage], stage, k, times) for k, r in enumerate(pipelines)]
        for update in range(windows.num_updates - 1):
            for rank, slot, op in _placed(copies, windows, stage, update, take, message):
                placed[rank].append((slot, op))
    return replace(schedule, order=tuple(map(with_ops_at, bare, placed)))


def require_whole_backwards(schedule: Schedule) -> None:
    """Raises ScheduleError for backwards in halves: the gradients of a microbatch would be known in part."""
    if any(op.kind in (INPUT, WEIGHT) for row in schedule.order for op in row):
        raise ScheduleError(
            f"{schedule.name} has backwards in halves (I and W), whose gradients come at different times; the rule "
            f"{TENTATIVE!r} needs whole ones (B)",
            rule="updates",
        )


class _CopyRow:
    """The row of the rank that has a copy of a stage, and where the copy's own ops stand in it."""

    def __init__(
        self, schedule: Schedule, windows: Windows, rank: int, stage: int, pipeline: int, times: Mapping[Op, float]
    ) -> None:
        self.rank, self.row = rank, schedule.order[rank]
        self.starts = [times[op] for op in self.row]
        self.forwards: list[int] = []
        """The places of forwards, ascending; and of updates."""
        self.updates: list[int] = []
        self.backwards: dict[int, list[int]] = {}
        """By update, the places of the backwards of its window."""
        for place, op in enumerate(self.row):
            if op.stage != stage or schedule.pipeline_of(op) != pipeline:
                continue
            if op.kind == BACKWARD:
                self.backwards.setdefault(op.microbatch // windows.window, []).append(place)
            elif op.kind in (FORWARD, UPDATE):
                (self.forwards if op.kind == FORWARD else self.updates).append(place)

    def first_late(self, windows: Windows, update: int) -> int | None:
        """The place of the first forward of a later window between the update before this one and this one."""
        first = bisect_left(self.forwards, self.updates[update - 1] if update else 0)
        places = self.forwards[first : bisect_left(self.forwards, self.updates[update])]
        stop = windows.microbatches(update).stop
        return next((place for place in places if self.row[place].microbatch >= stop), None)


def _start_times(schedule: Schedule, take: Callable[[Op], float]) -> dict[Op, float]:
    """When each op starts in the order given, where messages take no time."""
    present = {op: step for row in schedule.order for step, op in enumerate(row)}
    free = [0.0] * schedule.num_ranks
    starts: dict[Op, float] = {}
    ends: dict[Op, float] = {}

    def ran(op: Op, rank: int, needed: list[Op]) -> None:
        starts[op] = max([free[rank], *(ends[each] for each in needed)])
        free[rank] = ends[op] = starts[op] + take(op)

    run = run_rows(schedule.order, lambda op: predecessors(op, schedule.graph, present), {}, (), ran)
    if run.blocked:
        raise ScheduleError(f"{schedule.name} does not run to its end; ps.check says why", rule="deadlock")
    return starts


def _placed(
    copies: Sequence[_CopyRow],
    windows: Windows,
    stage: int,
    update: int,
    take: Callable[[Op], float],
    message: float,
) -> Iterator[tuple[int, int, Op]]:
    """(rank, slot, op) of each GIVE and PREDICT of an update of a stage; nothing if no forward is late."""
    late = {k: place for k, copy in enumerate(copies) if (place := copy.first_late(windows, update)) is not None}
    if not late:
        return
    owner = copies[OWNER]
    predict = Op(PREDICT, stage, windows.number(update, OWNER))
    first = min(copies[k].starts[place] for k, place in late.items())
    slot = bisect_left(owner.starts, first - (message + take(predict) if len(copies) > 1 else 0.0))
    slot = max(slot, owner.updates[update - 1] + 1 if update else 0)
    slot = min(slot, late.get(OWNER, owner.updates[update]))
    until = owner.starts[slot] - message
    given = []
    for pipeline, copy in enumerate(copies[1:], start=1):
        mine = copy.backwards.get(update, ())
        known = [place for place in mine if copy.starts[place] + take(copy.row[place]) <= until]
        if known:
            given.append((copy.rank, known[-1] + 1, Op(GIVE, stage, windows.number(update, pipeline))))
    if not given and not any(place < slot for place in owner.backwards.get(update, ())):
        return
    yield from given
    yield owner.rank, slot, predict
    for pipeline, place in late.items():
        if pipeline != OWNER:
            yield copies[pipeline].rank, place, Op(PREDICT, stage, windows.number(update, pipeline))
