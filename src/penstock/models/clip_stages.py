"""A CLIP as the stages of one pipeline: tower by tower, and last the contrast, which all of them feed.

    audio   0 -> 1 -----------.
    text    2 -> 3 -> 4 -> 5 --> 7   the contrast
    video   6 ----------------'

Each tower has a placement, rules and microbatches of its own, and so has the contrast. Where that works on fewer and
larger microbatches it tells more samples apart: a gather over microbatches, in place of the synchronization op of the
FlexPipe paper's Figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from penstock.models.clip import CLIPConfig, Contrast, tower_costs, tower_stage
from penstock.program import Branch, Program
from penstock.runtime import Stage, partition
from penstock.schedule import StageGraph

__all__ = ["CONTRAST", "CLIPStages", "clip_program"]

CONTRAST = "contrast"
"""The branch of the stage that compares what the towers say."""


@dataclass(frozen=True)
class CLIPStages:
    """The cut of a CLIP into stages, the towers' blocks spread by their FLOPs.

        cut = CLIPStages(config, {"audio": 2, "text": 4, "video": 1})
        pipe = ps.Pipeline(cut.sources(), program.build(), loss_fn=ContrastiveLoss(), optimizer=torch.optim.AdamW)
        pipe.step(cut.inputs({"audio": ..., "text": ..., "video": ...}))

    Parameters have the names that they have in `CLIP`, and the same values for the same seed.

    Attributes:
        config: the sizes of the model.
        num_stages: number of stages of each tower, by name.

    Raises:
        ValueError: towers other than the config's, or a number that no cut of a tower's layers has.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.clip_presets["nano"]
        >>> cut = ps.models.CLIPStages(config, {name: 1 for name in config.towers})
        >>> len(cut.sources())
        4
    """

    config: CLIPConfig
    num_stages: Mapping[str, int]

    def __post_init__(self) -> None:
        _require_towers(self.config, self.num_stages, "a number of stages")
        for name in self.config.towers:
            num, most = self.num_stages[name], self.config.tower(name).num_layers
            if not 1 <= num <= most:
                raise ValueError(f"tower {name!r} in {num} stages; it has {most} layers, so give 1 to {most}")
        ordered = {name: self.num_stages[name] for name in self.config.towers}
        object.__setattr__(self, "num_stages", MappingProxyType(ordered))

    @classmethod
    def of(cls, config: CLIPConfig, program: Program) -> CLIPStages:
        """The cut that a program of `clip_program` runs."""
        return cls(config, {name: num for name, (_, num) in program.branches.items() if name != CONTRAST})

    @property
    def stages(self) -> dict[str, range]:
        """The numbers of each tower's stages."""
        found: dict[str, range] = {}
        first = 0
        for name, num in self.num_stages.items():
            found[name] = range(first, first + num)
            first += num
        return found

    @property
    def contrast(self) -> int:
        """The number of the stage that all towers feed, the last."""
        return sum(self.num_stages.values())

    def graph(self, num_microbatches: Mapping[str, int] | None = None) -> StageGraph:
        """The stages as a graph. `num_microbatches` are those of each tower and of "contrast" where they differ."""
        edges = [(stage, stage + 1) for part in self.stages.values() for stage in part[:-1]]
        edges += [(part[-1], self.contrast) for part in self.stages.values()]
        if num_microbatches is None:
            return StageGraph(self.contrast + 1, tuple(edges))
        _require_towers(self.config, num_microbatches, "a number of microbatches", CONTRAST)
        _require_matching(num_microbatches)
        counts = [num_microbatches[name] for name, part in self.stages.items() for _ in part]
        return StageGraph(self.contrast + 1, tuple(edges), (*counts, num_microbatches[CONTRAST]))

    def sources(self, seed: int = 0) -> list[Callable[[], nn.Module]]:
        """For each stage the function that makes it, which a rank calls for its own stages alone."""
        made: list[Callable[[], nn.Module]] = []
        for name, num in self.num_stages.items():
            parts = partition(tower_costs(self.config, name), num)
            made += [partial(tower_stage, self.config, name, part, seed) for part in parts]
        return [*made, partial(contrast_stage, self.config)]

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[int, Any]:
        """A batch by tower, as `ps.Pipeline.step` takes it: by the stage that it goes into."""
        _require_towers(self.config, batch, "input")
        return {part[0]: batch[name] for name, part in self.stages.items()}


def contrast_stage(config: CLIPConfig) -> Stage:
    """The stage that compares what the towers said, given as a tuple in the order of the config's towers."""

    def call(layer: nn.Module, said: tuple[Tensor, ...]) -> Any:
        return layer(dict(zip(config.towers, said, strict=True)))

    number = sum(tower.num_layers for tower in config.towers.values())
    return Stage({CONTRAST: Contrast(config)}, [number], call)


def clip_program(config: CLIPConfig, towers: Mapping[str, Branch], contrast: Branch, **options: Any) -> Program:
    """One program of all the towers' branches and the contrast's, which has one stage.

    A tower holds all the forwards of one microbatch of the contrast before any backward: a cap must leave room for
        them at each of its stages.

    Args:
        config: names the towers.
        towers: each tower's branch; what it feeds is filled in.
        contrast: the branch of the stage that compares the towers.
        options: for `ps.Program.of_branches`.

    Raises:
        ValueError: branches of other towers than the config's, more stages than a tower has layers, a contrast of
            several stages, or of microbatches that do not match a tower's.
        ScheduleError: branches that contradict each other.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.clip_presets["nano"]
        >>> towers = {name: ps.Branch(ps.placements.one_to_one(1), 4) for name in config.towers}
        >>> program = ps.models.clip_program(config, towers, ps.Branch(ps.placements.one_to_one(1), 4))
        >>> program.build().num_ranks
        4
    """
    _require_towers(config, towers, "a branch")
    CLIPStages(config, {name: branch.placement.num_stages for name, branch in towers.items()})
    if contrast.placement.num_stages != 1:
        raise ValueError(f"a contrast of {contrast.placement.num_stages} stages; it is one stage, so place one")
    _require_matching({name: branch.num_microbatches for name, branch in {**towers, CONTRAST: contrast}.items()})
    feeding = {name: replace(towers[name], feeds=(CONTRAST,)) for name in config.towers}
    return Program.of_branches({**feeding, CONTRAST: contrast}, **{"name": "clip", **options})


def _require_towers(config: CLIPConfig, given: Iterable[str], what: str, *more: str) -> None:
    """Raises ValueError where something is not given for just the towers of a config."""
    wanted, got = [*config.towers, *more], list(given)
    if CONTRAST in config.towers:
        raise ValueError(
            f"a tower called {CONTRAST!r}, which is what the stage is called that all towers feed; rename it"
        )
    if set(got) != set(wanted):
        raise ValueError(f"{what} given for {', '.join(got) or 'nothing'}; give one for each of {', '.join(wanted)}")


def _require_matching(counts: Mapping[str, int]) -> None:
    """Raises ValueError where the contrast's microbatches and a tower's do not hold whole ones of each other."""
    for name, count in counts.items():
        if max(count, counts[CONTRAST]) % min(count, counts[CONTRAST]):
            raise ValueError(
                f"tower {name!r} works on {count} microbatches and the contrast on {counts[CONTRAST]}; one must be a "
                "multiple of the other, so that whole microbatches are compared"
            )
