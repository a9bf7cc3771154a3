"""Which rank hosts which stage of which pipeline.

one-to-one, 4 ranks      0 1 2 3
circular, 8 stages       0 1 2 3 0 1 2 3
V, 8 stages              0 1 2 3 3 2 1 0
shared ends, 6 stages    * 0 1 2 3 *        (* all four ranks run it together)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING

from penstock.schedule.errors import ScheduleError
from penstock.schedule.short_repr import short_repr

if TYPE_CHECKING:
    from penstock.schedule.op import Op
    from penstock.schedule.schedule import Schedule


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


def ranks_together(schedule: Schedule) -> dict[Op, tuple[int, ...]]:
    """The ranks of every op that several ranks run together; such an op is in the row of each of them."""
    if not schedule.has_shared_ops:
        return {}
    rows: dict[Op, list[int]] = {}
    for rank, row in enumerate(schedule.order):
        for op in row:
            rows.setdefault(op, []).append(rank)
    return {op: tuple(ranks) for op, ranks in rows.items() if len(set(ranks)) > 1}
