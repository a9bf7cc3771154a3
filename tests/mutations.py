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
    "interleaved-1f1b": ((2, 4, {}), (3, 3, {"num_stages": 9, "backward": "split"})),
    "zb-h1": ((4, 5, {}), (3, 6, {})),
    "zb-h2": ((3, 6, {}), (2, 4, {})),
    "zb-v": ((2, 5, {}), (3, 4, {})),
    "zb": ((4, 6, {"warmup": [6, 3, 2, 1]}), (3, 4, {})),
    "looped-bfs": ((2, 3, {}), (2, 4, {"num_stages": 6})),
    "v-half": ((2, 4, {}), (3, 4, {})),
    "v-min": ((2, 4, {}), (3, 3, {})),
    "chimera": ((2, 4, {}), (4, 4, {"backward": "split"})),
    "hanayo": ((2, 3, {}), (2, 4, {"waves": 1, "backward": "split"})),
    "bitpipe": ((2, 4, {}), (2, 3, {"backward": "split"})),
    "vchimera": ((2, 4, {}), (2, 3, {"backward": "split"})),
    "dualpipe": ((2, 4, {}), (2, 6, {"overlap": True})),
    "dualpipe-v": ((1, 3, {}), (2, 5, {"overlap": True})),
    "distmm": ((2, 4, {"gather_every": 2}), (4, 4, {"gather_every": 2, "overlap": True})),
    "mllm": ((2, 3, {}), (3, 2, {})),
    "pipedream": ((3, 4, {"window": 1}), (2, 5, {"window": 2})),
    "pipedream-2bw": ((3, 6, {"window": 3}), (2, 4, {})),
    "spectrain": ((3, 4, {"window": 1}), (2, 4, {})),
    "xpipe": ((2, 4, {}), (3, 4, {"window": 2})),
    "vnag": ((3, 4, {"window": 1}), (2, 4, {})),
    "amdp": ((2, 4, {"window": 2}), (4, 8, {"window": 4})),
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
    rows[rank][step] = rows[rank][step]._replace(kind=rng.choice("FBIWUX"))


def fuse_backward(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    """I becomes B and its W goes: valid more often than not, on stages that mix B with I and W."""
    rank, step = _pick(rows, rng)
    op = rows[rank][step]
    if op.kind == "I":
        rows[rank][step] = op._replace(kind="B")
        rows[rank] = [other for other in rows[rank] if other != op._replace(kind="W")]


def exchange(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    """Two microbatches change their places everywhere: all that it takes to run, but in another order."""
    pair = rng.sample(range(schedule.num_microbatches), 2)
    other = {pair[0]: pair[1], pair[1]: pair[0]}
    for row in rows:
        row[:] = [op._replace(microbatch=other.get(op.microbatch, op.microbatch)) if op.kind in "FBIW" else op
                  for op in row]  # fmt: skip


def exchange_in_queue(rows: Rows, rng: random.Random, schedule: ps.Schedule) -> None:
    """Two ops of one kind and stage on a rank change their places."""
    rank, step = _pick(rows, rng)
    row = rows[rank]
    other = rng.choice([s for s, op in enumerate(row) if op[:2] == row[step][:2]])
    row[step], row[other] = row[other], row[step]


EDITS: tuple[Callable[[Rows, random.Random, ps.Schedule], None], ...] = (
    drop, duplicate, swap, shift, move_to_rank, change_stage, change_microbatch, change_kind, fuse_backward,
    exchange, exchange_in_queue,
)  # fmt: skip


def mutants(schedule: ps.Schedule, rng: random.Random, count: int) -> Iterator[tuple[str, ps.Schedule]]:
    """`count` random edits of `schedule`, one in four of them made of two; yields (edits, the edited schedule)."""
    for _ in range(count):
        rows = [list(row) for row in schedule.order]
        edits = rng.choices(EDITS, k=2 if rng.random() < 0.25 else 1)
        for edit in edits:
            edit(rows, rng, schedule)
        yield "+".join(e.__name__ for e in edits), replace(schedule, order=tuple(map(tuple, rows)))
