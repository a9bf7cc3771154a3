"""Activations in host memory: OFFLOAD takes one away after its forward, RELOAD brings it back before its backward.

    rank 0 | F0 OFFLOAD0 F1 F2 .  B1 RELOAD0 B2 B0
    stream |    OFFLOAD0==      (F2 needs the room)

Both are asynchronous registered ops, of those microbatches alone that go away, so a rank starts them and goes on.
They run one after the other: the way to host memory is one link of the rank. See `async_ops` for what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, Op
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_graph import Needs, Registered

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
