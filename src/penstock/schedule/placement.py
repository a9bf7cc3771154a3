"""Which rank hosts which stage of which pipeline.

one-to-one, 4 ranks      0 1 2 3
circular, 8 stages       0 1 2 3 0 1 2 3
V, 8 stages              0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """`pipelines[k][stage]` is the rank that hosts that stage of pipeline k.

    Raises:
        ScheduleError: no pipeline, pipelines of different lengths, or a negative rank.
    """

    pipelines: tuple[tuple[int, ...], ...]

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

    @property
    def num_stages(self) -> int:
        return len(self.pipelines[0])

    @property
    def num_pipelines(self) -> int:
        return len(self.pipelines)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages `rank` hosts in any pipeline, ascending."""
        found = {s for ranks in self.pipelines for s, host in enumerate(ranks) if host == rank}
        return tuple(sorted(found))


def one_to_one(num_ranks: int) -> Placement:
    """Stage i on rank i."""
    return Placement((tuple(range(num_ranks)),))


def circular(num_ranks: int, num_stages: int) -> Placement:
    """Stage s on rank s mod num_ranks."""
    return Placement((tuple(s % num_ranks for s in range(num_stages)),))


def v_shape(num_ranks: int) -> Placement:
    """Two stages a rank, down the ranks and back up: the last rank hosts the two middle stages."""
    down = tuple(range(num_ranks))
    return Placement((down + down[::-1],))
