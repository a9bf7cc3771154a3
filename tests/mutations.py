"""Random edits of schedules: what a slip of the pen or a bug in a builder could do to one.

    for edit, broken in mutants(schedule, random.Random(0), 100): ...

Every tier that runs schedules can use it: each mutant is either refused by `check` or must run to its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import penstock as ps
from penstock.schedule import Op

Rows = list[list[Op]]

BASES: dict[str, tuple[tuple[int, int, dict], ...]] = {
    "gpipe": ((3, 4, {}), (1, 3, {})),
    "1f1b": ((4, 6, {}), (2, 5, {})),
    "interleaved-1f1b": ((2, 4, {}), (3, 3, {"num_stages": 9})),
    "zb-h1": ((4, 5, {}), (3, 6, {})),
    "zb-h2": ((3, 6, {}), (2, 4, {})),
    "zb-v": ((2, 5, {}), (3, 4, {})),
    "zb": ((4, 6, {"warmup": [6, 3, 2, 1]}), (3, 4, {})),
}
"""Small valid schedules of every library kind: (ranks, microbatches, options)."""


def bases(name: str) -> list[ps.Schedule]:
    return [ps.build(name, ranks, microbatches, **options) for ranks, microbatches, options in BASES[name]]


def _pick(rows: Rows, rng: random.Random) -> tuple[int, int]:
    rank = rng.choice([r for r, row in enumerate(rows) if row])
    return rank, rng.randrange(len(rows[rank]))


def drop(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    del rows[rank][step]


def duplicate(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    rows[rank].insert(rng.randint(0, len(rows[rank])), rows[rank][step])


def swap(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    other = min(step + 1, len(rows[rank]) - 1) if rng.random() < 0.5 else rng.randrange(len(rows[rank]))
    rows[rank][step], rows[rank][other] = rows[rank][other], rows[rank][step]


def shift(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    op = rows[rank].pop(step)
    rows[rank].insert(rng.randint(0, len(rows[rank])), op)


def move_to_rank(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    op = rows[rank].pop(step)
    target = rows[rng.randrange(len(rows))]
    target.insert(rng.randint(0, len(target)), op)


def change_stage(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    rows[rank][step] = rows[rank][step]._replace(stage=rng.randint(-1, schedule.num_stages))


def change_microbatch(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    rows[rank][step] = rows[rank][step]._replace(microbatch=rng.randint(-1, schedule.num_microbatches))


def change_kind(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    rank, step = _pick(rows, rng)
    rows[rank][step] = rows[rank][step]._replace(kind=rng.choice("FBIWX"))


def fuse_backward(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    """I becomes B and its W goes: valid more often than not, on stages that mix B with I and W."""
    rank, step = _pick(rows, rng)
    op = rows[rank][step]
    if op.kind == "I":
        rows[rank][step] = op._replace(kind="B")
        rows[rank] = [other for other in rows[rank] if other != op._replace(kind="W")]


EDITS: tuple[Callable[[Rows, random.Random, ps.Schedule], None], ...] = (
    drop, duplicate, swap, shift, move_to_rank, change_stage, change_microbatch, change_kind, fuse_backward,
)  # fmt: skip


def mutants(schedule: ps.Schedule, rng: random.Random, count: int) -> Iterator[tuple[str, ps.Schedule]]:
    """`count` random edits of `schedule`, one in four of them made of two; yields (edits, the edited schedule)."""
    for _ in range(count):
        rows = [list(row) for row in schedule.order]
        edits = rng.choices(EDITS, k=2 if rng.random() < 0.25 else 1)
        for edit in edits:
            edit(rows, rng, schedule)
        yield "+".join(e.__name__ for e in edits), replace(schedule, order=tuple(map(tuple, rows)))
