"""The search over layouts of a model's towers: how many ranks, stages and microbatches each tower has.

    4 ranks     audio 1 rank, 4 microbatches    text 1 rank, 2    video 2 ranks, two stages on each, 8    4.1 ms
                audio 1 rank, 4 microbatches    text 2 ranks, 4   video 1 rank, 8                         5.3 ms

The planner's search over branches finds them (`planning/branch_search.py`; FlexPipe, section 7.2), over the measured
costs of each tower's layers. The best are then built as `penstock train` builds them, and predicted with everything
around their ops. The number of the contrast's microbatches determines how many samples it tells apart, and so what is
learned. So it is not searched.

If there are fewer ranks than towers, neighbouring towers share one, as in `penstock train`, and all have as
many microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.cost import Costs
from penstock.formats.profile import ROWS, MessageCosts, Profile
from penstock.models import CLIPConfig, tower_costs
from penstock.planning import BranchLayout, rank_branches
from penstock.runtime import partition
from penstock.schedule import ScheduleError
from penstock.simulation.memory_footprint import in_bytes
from penstock.train.checks import SettingsError
from penstock.train.kinds import CLIP, CONTRAST, STYLES, USUAL
from penstock.train.settings import Settings
from penstock.train.tasks.clip import (
    INTERLEAVED,
    Tower,
    branches_of,
    check_batch,
    clip_config,
    counts_of,
    cut_of,
    ranks_of_towers,
    schedule_of_towers,
)
from penstock.tune.errors import TuneError
from penstock.tune.memory import POSTED
from penstock.tune.predict import uniform_links
from penstock.tune.search import SearchFound, TuneCandidate
from penstock.tune.space import Shape, TunePlan, TuneSpace, counts

PLAIN, INTERLEAVING = "1f1b", "interleaved-1f1b"
MOST_TRIED = 1000
"""Most layouts of one number of ranks and replicas that are simulated."""
SPARE = 2
"""How many times as many layouts are built and predicted as are asked for, as the search knows less than
the prediction.
"""

PartProfileOf = Callable[[str, int, int, bool], Profile | None]
"""The profile of a tower or the contrast, for a microbatch size and a number of processes, with or without recompute;
None where there is none."""


@dataclass(frozen=True)
class TowerLayout(BranchLayout):
    """One way in which a tower may lie. `tower` says it as `penstock train` does, its ranks counted from 0."""

    tower: Tower | None = None


@dataclass(frozen=True)
class TowerSpace:
    """What is tried for towers.

    Attributes:
        config: of the model. space: ranks, replicas, microbatch sizes and recomputation to try, and the batch.
        num_groups: into how many microbatches the contrast's samples are cut, over all replicas.
        styles: schedules that a tower may have.
    """

    config: CLIPConfig
    space: TuneSpace
    num_groups: int
    styles: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings, space: TuneSpace, schedules: Any) -> TowerSpace:
        """Raises TuneError, SettingsError for invalid settings."""
        if unknown := [name for name in schedules or () if name not in STYLES]:
            raise TuneError(f"--schedule {unknown[0]} is for a chain of stages; a tower's is {', '.join(STYLES)}")
        return cls(clip_config(settings), space, int(USUAL[CLIP]["microbatches"]), tuple(schedules or STYLES))

    def shapes(self) -> list[Shape]:
        """Ranks of a pipeline and replicas, the most processes first. The microbatches are those of the contrast.

        Raises:
            TuneError: there is none.
        """
        space = self.space
        most = sum(tower.num_layers for tower in self.config.towers.values())
        pps = space.pp or range(1, min(space.num_devices, most) + 1)
        dps = space.dp or counts(space.num_devices)
        found = [
            Shape(pp, dp, space.batch // self.num_groups, self.num_groups // dp)
            for pp in pps
            for dp in dps
            if pp * dp <= space.num_devices and self.num_groups % dp == 0 and space.batch % self.num_groups == 0
        ]
        if not found:
            raise TuneError(
                f"no way to spread the batch is left: pp times dp may be at most the {space.num_devices} ranks, and "
                f"the {self.num_groups} microbatches of the contrast must divide the batch of {space.batch} and be "
                "a multiple of dp; give another --batch, --pp or --dp"
            )
        return sorted(found, key=lambda shape: (-shape.pp * shape.dp, shape.dp))

    def sizes(self, shape: Shape) -> list[int]:
        """Samples of a tower's microbatches to try."""
        here = shape.microbatch_size * shape.num_microbatches
        return [
            size
            for size in self.space.microbatch_sizes or counts(here)
            if here % size == 0 and _match(here // size, shape.num_microbatches)
        ]

    def styles_of(self, name: str, num_ranks: int) -> Iterator[tuple[str, int]]:
        """Schedules that a tower may have over so many ranks, each with its number of stages."""
        most = self.config.tower(name).num_layers
        # With one rank, a tower has one stage, and there is nothing to interleave.
        styles = self.styles if num_ranks > 1 else dict.fromkeys(map(_uninterleaved, self.styles))
        for style in styles:
            stages = num_ranks * (INTERLEAVED if style == INTERLEAVING else 1)
            if stages <= most:
                yield style, stages


def search_towers(
    towers: TowerSpace,
    settings: Settings,
    profile_of: PartProfileOf,
    transfer_of: Callable[[Shape], MessageCosts | None],
    found: SearchFound,
) -> SearchFound:
    """Searches the layouts of the towers.

    Args:
        settings: of the run that is tuned, for everything that candidates do not determine.
        profile_of: the profile of one part, that is, of a tower or the contrast.
        found: is filled and returned; it says what to keep.

    Raises:
        TuneError: nothing fits the space or the memory limit.
    """
    with found.until_interrupted():
        for shape in towers.shapes():
            for recompute in towers.space.recompute:
                transfer = transfer_of(shape)
                if transfer is None:
                    continue
                search = _OneShape(towers, shape, recompute, profile_of, transfer)
                for layout in search.layouts(found):
                    search.consider(layout, settings, found)
    if not found.best:
        raise _nothing(found, towers)
    return found


class _OneShape:
    """The layouts over so many ranks and replicas."""

    def __init__(
        self, towers: TowerSpace, shape: Shape, recompute: bool, profile_of: PartProfileOf, transfer: MessageCosts
    ) -> None:
        self.towers, self.shape, self.recompute, self._transfer = towers, shape, recompute, transfer
        self._here = shape.microbatch_size * shape.num_microbatches
        self._profile_of = profile_of
        self.names = list(towers.config.towers)

    def profile(self, part: str, num_microbatches: int) -> Profile | None:
        """Of a tower or the contrast that works on so many microbatches."""
        size, processes = self._here // num_microbatches, self.shape.pp * self.shape.dp
        return self._profile_of(part, size, processes, self.recompute)

    def layouts(self, found: SearchFound) -> list[dict[str, Tower]]:
        """The best layouts, by tower; those that can't be among the best that were found are left out."""
        if self.shape.pp < len(self.names):
            return list(self._shared())
        contrast = self.profile(CONTRAST, self.shape.num_microbatches)
        if contrast is None:
            return []
        costs, limit = _costs([range(1)], contrast, self._transfer, 1), found.memory_limit
        layouts = rank_branches(
            {name: [way for way in self._ways(name) if limit is None or way.state <= limit] for name in self.names},
            self.shape.pp,
            SPARE * found.num_best,
            also=lambda chosen: {CONTRAST: self._contrast(chosen, costs)},
            memory_limit=limit,
            below=found.slowest,
            most_tried=MOST_TRIED,
        )
        if layouts:
            found.num_tried += max(0, layouts[0].num_tried - len(layouts))
        return [_placed(layout.ways) for layout in layouts]

    def _shared(self) -> Iterator[dict[str, Tower]]:
        """Where towers share ranks: one stage each, all with as many microbatches."""
        ranks = ranks_of_towers(self.towers.config, self.shape.pp)
        for style in dict.fromkeys(map(_uninterleaved, self.towers.styles)):
            for size in self.towers.sizes(self.shape):
                yield {name: Tower(ranks[name], 1, self._here // size, style) for name in self.names}

    def _ways(self, name: str) -> Iterator[TowerLayout]:
        most = self.shape.pp - len(self.names) + 1
        for num_ranks in range(1, most + 1):
            for style, stages in self.towers.styles_of(name, num_ranks):
                cut = partition(tower_costs(self.towers.config, name), stages)
                for size in self.towers.sizes(self.shape):
                    count = self._here // size
                    profile = self.profile(name, count)
                    if profile is not None:
                        yield self._way(Tower(tuple(range(num_ranks)), stages, count, style), cut, profile)

    def _way(self, tower: Tower, cut: list[range], profile: Profile) -> TowerLayout:
        num_ranks, dp, transfer = len(tower.ranks), self.shape.dp, self._transfer
        (branch,) = branches_of({"tower": tower}, self.shape.num_microbatches)[0].values()
        updates, states = [0.0] * num_ranks, [0.0] * num_ranks
        for stage, layers in enumerate(cut):
            weight, sent = profile.total("weight", layers), profile.output[layers[-1]]
            updates[stage % num_ranks] += profile.total("update", layers)
            if dp > 1:
                updates[stage % num_ranks] += transfer.over_replicas(weight, profile.total("tensors", layers), dp)
            states[stage % num_ranks] += 2 * weight + profile.total("state", layers) + 2 * POSTED * sent
            if stage < len(cut) - 1:
                states[(stage + 1) % num_ranks] += 2 * POSTED * sent
        return TowerLayout(
            replace(branch, ranks=None, feeds=(CONTRAST,)),
            _costs(cut, profile, transfer, num_ranks),
            num_ranks,
            uniform_links(profile, transfer),
            tail=max(updates),
            state=max(states) + profile.transient,
            tower=tower,
        )

    def _contrast(self, chosen: Mapping[str, BranchLayout], costs: Costs) -> BranchLayout:
        towers = _placed(chosen)
        _, branch = branches_of(towers, self.shape.num_microbatches)
        profiles = [self.profile(CONTRAST, self.shape.num_microbatches)]
        profiles += [self.profile(name, tower.microbatches) for name, tower in towers.items()]
        said = sum(profile.output[-1] for profile in profiles if profile is not None)
        return BranchLayout(branch, costs, 0, state=2 * POSTED * said)

    def consider(self, layout: Mapping[str, Tower], settings: Settings, found: SearchFound) -> None:
        """Adds a layout to what was found, if it is among the best."""
        try:
            candidate = self.candidate(layout, settings)
        except (SettingsError, ScheduleError) as error:
            found.refuse(str(error))
            return
        profile = None if found.has(candidate) else self.joined(candidate)
        if profile is not None:
            found.add(candidate, profile, self._transfer)

    def candidate(self, layout: Mapping[str, Tower], settings: Settings) -> TuneCandidate:
        """A layout with its schedule.

        Raises:
            SettingsError, ScheduleError: `penstock train` would refuse it.
        """
        config, shape = self.towers.config, self.shape
        styles = [tower.style for tower in layout.values()]
        name = PLAIN if PLAIN in styles else styles[0]
        schedule = schedule_of_towers(config, layout, shape.num_microbatches, f"clip-{name}")
        stages = cut_of(config, schedule)
        run = replace(settings, ranks=shape.pp, dp=shape.dp, microbatches=shape.num_microbatches)
        check_batch(run, counts_of(stages, schedule))
        cut: list[range] = []
        for tower, num in stages.num_stages.items():
            first = cut[-1].stop if cut else 0
            layers = partition(tower_costs(config, tower), num)
            cut += [range(first + part.start, first + part.stop) for part in layers]
        cut.append(range(cut[-1].stop, cut[-1].stop + 1))
        plan = TunePlan(name, schedule, towers=tuple(layout.items()))
        return TuneCandidate(shape, plan, tuple(cut), self.recompute)

    def joined(self, candidate: TuneCandidate) -> Profile | None:
        """What the layers of all towers and the contrast take, each at its own microbatch size."""
        schedule = candidate.plan.schedule
        each = counts_of(cut_of(self.towers.config, schedule), schedule)
        parts = [self.profile(name, each[name]) for name in (*self.names, CONTRAST)]
        known = [part for part in parts if part is not None]
        return joined_profile(f"clip {'+'.join(self.names)}", known) if len(known) == len(parts) else None


def joined_profile(model: str, parts: Sequence[Profile]) -> Profile:
    """One profile of the layers of several parts of a model, part by part.

    Each part may have been measured with microbatches of its own size. What an op costs besides its layers is the
    mean of the parts.
    """
    rows = {name: tuple(value for part in parts for value in getattr(part, name)) for name in ("layers", *ROWS)}
    overheads = [part.op_overhead for part in parts]
    kinds = sorted({kind for each in overheads for kind in each})
    return msgspec.structs.replace(
        parts[0],
        model=model,
        microbatch_size=max(part.microbatch_size for part in parts),
        op_overhead={kind: sum(each.get(kind, 0.0) for each in overheads) / len(parts) for kind in kinds},
        transient=max(part.transient for part in parts),
        step=sum(part.step for part in parts),
        tied=0.0,
        **rows,
    )


def _placed(chosen: Mapping[str, BranchLayout]) -> dict[str, Tower]:
    """Towers on ranks of the whole, one tower after another."""
    found: dict[str, Tower] = {}
    first = 0
    for name, way in chosen.items():
        assert isinstance(way, TowerLayout), "a tower's"
        assert way.tower is not None
        found[name] = replace(way.tower, ranks=tuple(range(first, first + way.num_ranks)))
        first += way.num_ranks
    return found


def _costs(cut: list[range], profile: Profile, transfer: MessageCosts, num_ranks: int) -> Costs:
    """Costs of a tower's stages by themselves: with the messages between its ranks, without those to the contrast."""
    f, b, i, w = ([profile.time(kind, layers) + transfer.gap for layers in cut] for kind in ("f", "b", "i", "w"))
    for stage, layers in enumerate(cut[:-1]) if num_ranks > 1 else ():
        size = profile.output[layers[-1]]
        sent, received = transfer.at("send", size), transfer.at("receive", size)
        f[stage] += sent
        f[stage + 1] += received
        for row in (b, i):
            row[stage + 1] += sent
            row[stage] += received
    return Costs(f, i, w, b, [profile.total("activation", layers) for layers in cut])


def _uninterleaved(style: str) -> str:
    """The schedule of a tower with one stage per rank."""
    return PLAIN if style == INTERLEAVING else style


def _match(some: int, others: int) -> bool:
    """Whether one of two numbers of microbatches is a multiple of the other."""
    return max(some, others) % min(some, others) == 0


def _nothing(found: SearchFound, towers: TowerSpace) -> TuneError:
    if found.refused:
        (reason, count), *_ = found.refused.most_common(1)
        return TuneError(f"penstock train refuses all layouts of the towers, {count} of them because {reason}")
    if found.memory_limit is not None:
        least = "" if found.smallest is None else f"; the least is {in_bytes(found.smallest[0])}"
        return TuneError(
            f"no layout of the towers fits in {in_bytes(found.memory_limit)} per rank{least}; raise --memory-limit, "
            "or allow more ranks, smaller microbatches or recompute"
        )
    return TuneError(
        f"no layout of the towers {', '.join(towers.config.towers)} fits the ranks, schedules and microbatch sizes "
        f"asked for, with at most {towers.space.num_devices} ranks; ask for less"
    )
