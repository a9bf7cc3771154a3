"""Which rank hosts which stage of which pipeline: placements, by name and combined.

`named("v-shape", 4)` takes a name, as `ps.plan(placement=...)` and --placement on the command line do. These are the
ranks of the stages, in order:

    one_to_one(4)                   0 1 2 3
    circular(4, 8)                  0 1 2 3 0 1 2 3
    v_shape(4)                      0 1 2 3 3 2 1 0
    wave(4, 2)                      0 1 2 3 3 2 1 0 0 1 2 3 3 2 1 0
    bidirectional(one_to_one(4))    0 1 2 3         and  3 2 1 0
    bidirectional(v_shape(4))       0 1 2 3 3 2 1 0 and  3 2 1 0 0 1 2 3
    multi_directional(4)            0 1 2 3         and  3 2 1 0 (as AMDP lays them)
    shared_ends(one_to_one(4))      * 0 1 2 3 *     (embedding and head on all four ranks, which run them together)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING

from penstock.schedule.errors import ScheduleError
from penstock.schedule.short_repr import short_repr

if TYPE_CHECKING:
    from penstock.schedule.op import Op
    from penstock.schedule.schedule import Schedule


BOTH_WAYS = "+bidirectional"
"""The suffix of names that add a second pipeline, from the last rank to the first."""

STAGES_PER_RANK = {"one-to-one": 1, "circular": 2, "v-shape": 2, "wave": 4}
"""The placements of one pipeline by name, with the default number of stages per rank."""

NAMES = (*STAGES_PER_RANK, *(name + BOTH_WAYS for name in STAGES_PER_RANK))
"""What `named` takes."""


@dataclass(frozen=True)
class Placement:
    """Which rank hosts which stage.

    Attributes:
        pipelines: `pipelines[k][stage]` is the rank that hosts that stage of pipeline k.
        shared: (stage, ranks) of each stage that several ranks run together, in every pipeline. The first of these
            ranks is the one in `pipelines`.

    Raises:
        ScheduleError: no pipeline, pipelines of different lengths, a negative rank, or an invalid shared stage: one
            that does not exist, is given twice, names a rank twice, or whose first rank differs from `pipelines`.

    Examples:
        >>> import penstock as ps
        >>> v_shape = ps.Placement(((0, 1, 1, 0),))
        >>> v_shape.num_pipelines, v_shape.num_stages
        (1, 4)
        >>> v_shape == ps.placements.v_shape(2)
        True
    """

    pipelines: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not self.pipelines or not self.pipelines[0]:
            raise ScheduleError("a placement needs at least one pipeline with one stage", rule="placement")
        if len({len(ranks) for ranks in self.pipelines}) != 1:
            lengths = [len(ranks) for ranks in self.pipelines]
            raise ScheduleError(
                f"all pipelines hold the same stages, but their lengths are {lengths}", rule="placement"
            )
        if min(min(ranks) for ranks in self.pipelines) < 0:
            raise ScheduleError(f"a placement names a negative rank: {self.pipelines}", rule="placement")
        if len({stage for stage, _ in self.shared}) != len(self.shared):
            raise ScheduleError(f"a stage is given as shared twice: {self.shared}", rule="placement")
        for stage, ranks in self.shared:
            if not 0 <= stage < self.num_stages:
                raise ScheduleError(
                    f"shared stage {stage} is not there: stages go from 0 to {self.num_stages - 1}", rule="placement"
                )
            if len(ranks) < 2 or len(set(ranks)) != len(ranks) or min(ranks) < 0:
                raise ScheduleError(
                    f"stage {stage} is shared by ranks {ranks}: name at least two, each once", rule="placement"
                )
            if wrong := [row[stage] for row in self.pipelines if row[stage] != ranks[0]]:
                raise ScheduleError(
                    f"stage {stage} is shared by ranks {ranks}, so a pipeline must have it on {ranks[0]}, "
                    f"not on {wrong[0]}",
                    rule="placement",
                )

    @property
    def num_stages(self) -> int:
        return len(self.pipelines[0])

    @property
    def num_pipelines(self) -> int:
        return len(self.pipelines)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` hosts in any pipeline, ascending."""
        found = {s for ranks in self.pipelines for s, host in enumerate(ranks) if host == rank}
        found |= {stage for stage, ranks in self.shared if rank in ranks}
        return tuple(sorted(found))

    def hosts(self, pipeline: int, stage: int) -> tuple[int, ...]:
        """The ranks that run `stage` of a pipeline: one rank, or all ranks that share it."""
        return self._shared_ranks.get(stage) or (self.pipelines[pipeline][stage],)

    @cached_property
    def _shared_ranks(self) -> dict[int, tuple[int, ...]]:
        return dict(self.shared)


def one_to_one(num_ranks: int) -> Placement:
    """Places stage i on rank i.

    Args:
        num_ranks: devices of the pipeline, and number of stages.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.one_to_one(3).pipelines
        ((0, 1, 2),)
    """
    return Placement((tuple(range(at_least_one(num_ranks))),))


def circular(num_ranks: int, num_stages: int) -> Placement:
    """Places stage s on rank s mod num_ranks. Raises ScheduleError if some rank would host no stage.

    Args:
        num_ranks: devices of the pipeline.
        num_stages: stages of the whole model.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.circular(2, 4).pipelines
        ((0, 1, 0, 1),)
    """
    if num_stages < at_least_one(num_ranks):
        raise ScheduleError(
            f"{num_stages} stages laid over {num_ranks} ranks leave rank {num_stages} without one; "
            f"give at least {num_ranks} stages",
            rule="placement",
        )
    return Placement((tuple(s % num_ranks for s in range(num_stages)),))


def v_shape(num_ranks: int) -> Placement:
    """Places two stages on each rank, down the ranks and back up. The last rank hosts the two middle stages.

    Args:
        num_ranks: devices of the pipeline.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.v_shape(3).pipelines
        ((0, 1, 2, 2, 1, 0),)
    """
    down = tuple(range(at_least_one(num_ranks)))
    return Placement((down + down[::-1],))


def at_least_one(num_ranks: int) -> int:
    """The number of ranks. Raises ScheduleError unless it is a whole number from 1."""
    if not isinstance(num_ranks, Integral) or num_ranks < 1:
        raise ScheduleError(f"a placement over {num_ranks!r} ranks: give at least 1", rule="placement")
    return num_ranks


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


def ranks_together(schedule: Schedule) -> dict[Op, tuple[int, ...]]:
    """The ranks of every op that several ranks run together; such an op is in the row of each of them."""
    if not schedule.has_shared_ops:
        return {}
    rows: dict[Op, list[int]] = {}
    for rank, row in enumerate(schedule.order):
        for op in row:
            rows.setdefault(op, []).append(rank)
    return {op: tuple(ranks) for op, ranks in rows.items() if len(set(ranks)) > 1}
