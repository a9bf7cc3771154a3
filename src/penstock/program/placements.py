"""Placements by name, and how to combine them. Each call returns a `Placement`.

named("v-shape", 4)             by name, as in `ps.plan(placement=...)` and in --placement on the command line

one_to_one(4)                   0 1 2 3
circular(4, 8)                  0 1 2 3 0 1 2 3
v_shape(4)                      0 1 2 3 3 2 1 0
wave(4, 2)                      0 1 2 3 3 2 1 0 0 1 2 3 3 2 1 0
bidirectional(one_to_one(4))    0 1 2 3         and  3 2 1 0
bidirectional(v_shape(4))       0 1 2 3 3 2 1 0 and  3 2 1 0 0 1 2 3
multi_directional(4)            0 1 2 3         and  3 2 1 0 (as AMDP lays them)
shared_ends(one_to_one(4))      * 0 1 2 3 *     (embedding and head on all ranks)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.schedule import Placement, ScheduleError
from penstock.schedule.placement import at_least_one, circular, one_to_one, v_shape

BOTH_WAYS = "+bidirectional"
"""The suffix of names that add a second pipeline, from the last rank to the first."""

STAGES_PER_RANK = {"one-to-one": 1, "circular": 2, "v-shape": 2, "wave": 4}
"""The placements of one pipeline by name, with the default number of stages per rank."""

NAMES = (*STAGES_PER_RANK, *(name + BOTH_WAYS for name in STAGES_PER_RANK))
"""What `named` takes."""


def named(name: str, num_ranks: int, num_stages: int | None = None) -> Placement:
    """The placement with a name of `NAMES`.

    Args:
        num_stages: stages of the whole model. Circular and wave placements may have more of them. Default: two per
            rank for circular, four per rank for wave.

    Raises:
        ScheduleError: an unknown name, a number of stages that the placement can't have, or two directions on one
            rank.
    """
    base = name.removesuffix(BOTH_WAYS) if isinstance(name, str) else ""
    if base not in STAGES_PER_RANK:
        raise ScheduleError(
            f"no placement is named {name!r}: choose among {', '.join(STAGES_PER_RANK)}, or one of these with "
            f"{BOTH_WAYS} behind it",
            rule="options",
        )
    if name != base and at_least_one(num_ranks) == 1:
        raise ScheduleError(
            f"{name} on 1 rank: the two directions differ from 2 ranks on; give {base}", rule="options"
        )
    usual = STAGES_PER_RANK[base] * at_least_one(num_ranks)
    stages = usual if num_stages is None else num_stages
    if base == "circular":
        plain = circular(num_ranks, stages)
    elif base == "wave" and stages > 0 and stages % (2 * num_ranks) == 0:
        plain = wave(num_ranks, stages // (2 * num_ranks))
    elif stages != usual:
        each = f"a multiple of {2 * num_ranks}" if base == "wave" else str(usual)
        raise ScheduleError(
            f"{name} over {num_ranks} ranks has {each} stages, and {stages} are given; give {each}, or circular, "
            "which takes any number",
            rule="options",
        )
    else:
        plain = v_shape(num_ranks) if base == "v-shape" else one_to_one(num_ranks)
    return plain if name == base else bidirectional(plain)


def wave(num_ranks: int, num_waves: int) -> Placement:
    """Repeats the V: 2 * num_waves stages per rank (Hanayo)."""
    down = tuple(range(at_least_one(num_ranks)))
    if num_waves < 1:
        raise ScheduleError(f"a wave placement has {num_waves} waves: give at least 1", rule="placement")
    return Placement(((down + down[::-1]) * num_waves,))


def bidirectional(placement: Placement) -> Placement:
    """Adds the mirror image of every pipeline: rank r takes the place of rank `num_ranks - 1 - r`."""
    last = num_ranks_of(placement) - 1
    mirrored = tuple(tuple(last - rank for rank in ranks) for ranks in placement.pipelines)
    if placement.shared:
        stages = {stage for stage, _ in placement.shared}
        mirrored = tuple(
            tuple(plain[s] if s in stages else flipped[s] for s in range(placement.num_stages))
            for plain, flipped in zip(placement.pipelines, mirrored, strict=True)
        )
    return Placement(placement.pipelines + mirrored, placement.shared)


def multi_directional(num_ranks: int) -> Placement:
    """Places `num_ranks / 2` pipelines in both directions (AMDP, section 3).

    With d ranks, an even pipeline j has stage i on rank `(2j + i) mod d`, an odd one on `(2j - i + d + 1) mod d`.
    Raises ScheduleError for an odd number of ranks.
    """
    d = at_least_one(num_ranks)
    if d % 2:
        raise ScheduleError(
            f"multi-directional pipelines need an even number of ranks, got {d}: there are d / 2 of them",
            rule="placement",
        )
    return Placement(
        tuple(
            tuple((2 * j + i) % d if j % 2 == 0 else (2 * j - i + d + 1) % d for i in range(d)) for j in range(d // 2)
        )
    )


def table(rows: Iterable[Sequence[int | None]]) -> Placement:
    """Any placement, from one row per pipeline with the rank of every stage.

    Raises ScheduleError for a row that is not a list, a stage without a rank (None) or a rank without a stage.
    """
    pipelines = []
    for k, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise ScheduleError(
                f"row {k} of the table is {row!r}: give each pipeline a list of ranks, [[0, 1, 0, 1]] "
                "for one pipeline",
                rule="placement",
            )
        for stage, rank in enumerate(row):
            if rank is None or not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise ScheduleError(
                    f"stage {stage} of pipeline {k} is on no rank ({rank!r}); give each stage a rank from 0",
                    rule="placement",
                )
        pipelines.append(tuple(rank for rank in row if rank is not None))
    placement = Placement(tuple(pipelines))
    check_all_used(placement)
    return placement


def shared_ends(placement: Placement, first: bool = True, last: bool = True) -> Placement:
    """Adds a first and a last stage, each run by all ranks together (FlexPipe's MLLM placement)."""
    ranks = tuple(range(num_ranks_of(placement)))
    rows = tuple(((0,) if first else ()) + row + ((0,) if last else ()) for row in placement.pipelines)
    shift = 1 if first else 0
    shared = [(stage + shift, hosts) for stage, hosts in placement.shared]
    if len(ranks) > 1:
        shared += [(0, ranks)] if first else []
        shared += [(len(rows[0]) - 1, ranks)] if last else []
    return Placement(rows, tuple(sorted(shared)))


def num_ranks_of(placement: Placement) -> int:
    """How many ranks a placement needs: the highest rank that it names, plus one."""
    highest = max(max(row) for row in placement.pipelines)
    return max([highest, *(rank for _, ranks in placement.shared for rank in ranks)]) + 1


def check_all_used(placement: Placement) -> None:
    """Raises ScheduleError if some rank hosts no stage."""
    for rank in range(num_ranks_of(placement)):
        if not placement.stages_of(rank):
            raise ScheduleError(f"rank {rank} hosts no stage; number the ranks without gaps from 0", rule="placement")
