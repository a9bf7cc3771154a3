"""A CLIP: the schedule of its towers, and its task on generated samples, in which each tower learns to say what the
others say of the same sample.

Ranks are divided among the towers by their work, at least one each. If there are fewer ranks than towers,
neighbouring towers share one. The contrast, which all towers feed, is a stage on a rank that has one already.

    5 ranks, mixed     audio   0  |  text   1  |  video   2 3 4, two stages on each, interleaved; the contrast on 1
    2 ranks            audio and text  0  |  video  1, and the contrast
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from penstock.cost import Costs
from penstock.data import Corpus, PairedSamples, TokenForm, VectorForm
from penstock.data.shuffle import permuted
from penstock.models import (
    CLIPConfig,
    ContrastiveLoss,
    TowerConfig,
    clip_presets,
    clip_program,
    tower_costs,
)
from penstock.models.block import TransformerBlock
from penstock.models.clip import CLIPStages
from penstock.program import Branch, Rules, breadth_first, depth_first, placements
from penstock.runtime import partition
from penstock.runtime.stage.branches import starts_of
from penstock.schedule import Schedule, ScheduleError
from penstock.train.checks import SettingsError, is_schedule_file, read_schedule
from penstock.train.kinds import CONTRAST, MIXED, STYLES
from penstock.train.settings import Settings
from penstock.train.tasks.layers import changed, kept_sizes, preset_of, recomputed, require_one_end, require_shards
from penstock.train.tasks.task import BYTES, VALIDATION_BATCHES, Example, Task, TaskData

SEEN = 152
"""How many of the 216 combinations of factors are trained on. The other 64 show whether it has
understood the factors.
"""


class CLIPTask(Task):
    """See `Task`.

    Raises:
        SettingsError: sizes that do not go together, or options of models on text.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._settings = settings
        self.config = config = clip_config(settings)
        self._cut = cut_of(config, schedule)
        self._counts = counts_of(self._cut, schedule)
        self.sizes = {
            **{name: kept_sizes(tower) for name, tower in config.towers.items()},
            "shared_width": config.shared_width,
        }
        self.num_tokens = sum(tower.context for tower in config.towers.values())
        self.loss = ContrastiveLoss()
        require_shards(settings, schedule, config)

    def stages(self) -> list[Callable[[], nn.Module]]:
        sources = self._cut.sources(self._settings.seed)
        if not self._settings.recompute:
            return sources
        return [lambda source=source: _recomputed(source()) for source in sources]  # type: ignore[misc]

    def message_bytes(self, schedule: Schedule) -> list[float]:
        sizes = [0.0] * schedule.num_stages
        here = self._settings.batch * self._settings.replicas_here / self._settings.dp
        for name, part in self._cut.stages.items():
            tower = self.config.tower(name)
            samples = math.ceil(here / self._counts[name])
            for stage in part:
                numbers = self.config.shared_width if stage == part[-1] else tower.context * tower.width
                sizes[stage] = float(BYTES * samples * numbers)
        return sizes

    def read(self, corpus: Corpus | None) -> TaskData:
        settings = self._settings
        samples = PairedSamples(forms_of(self.config), seed=settings.seed)
        batches = CLIPBatches(samples, self._cut, settings.batch, settings.seed)
        fresh = [batches.fresh(number * settings.batch, settings.batch) for number in range(VALIDATION_BATCHES)]
        names = ", ".join(self.config.towers)
        by_chance = math.log(settings.batch / (self._counts[CONTRAST] * (settings.dp // settings.replicas_here)))
        unit = f"nats to tell a sample's partner from those of its microbatch; {by_chance:.3f} by chance"
        return TaskData(f"generated samples of {names}", unit, f"paired-{settings.seed}", batches, fresh)


class CLIPBatches:
    """Batches of generated samples, by the stages that take them. Some combinations are never trained on."""

    def __init__(self, samples: PairedSamples, cut: CLIPStages, batch: int, seed: int) -> None:
        self._samples, self._cut, self._batch, self._seed = samples, cut, batch, seed

    @property
    def num_fresh(self) -> int:
        """Combinations that are never trained on."""
        return self._samples.num_combinations - SEEN

    def __getitem__(self, step: int) -> Example:
        numbers = []
        for sample in range(step * self._batch, (step + 1) * self._batch):
            round_, place = divmod(sample, SEEN)
            # In another order each round, so that a sample is told apart from others each time.
            within = int(permuted(np.array([place]), SEEN, self._seed, round_)[0])
            numbers.append(round_ * self._samples.num_combinations + within)
        return self._example(numbers)

    def fresh(self, first: int, count: int) -> Example:
        """Samples of combinations that are never trained on, in turn, so that successive ones all differ."""
        total = self._samples.num_combinations
        turns = (divmod(number, self.num_fresh) for number in range(first, first + count))
        return self._example([(FRESH + turn) * total + SEEN + place for turn, place in turns])

    def _example(self, numbers: list[int]) -> Example:
        made = {name: torch.from_numpy(value) for name, value in self._samples.samples(numbers).items()}
        return Example(self._cut.inputs(made), None)


FRESH = 1 << 20
"""The round of the generator from which new samples come, far beyond those of training."""


def clip_config(settings: Settings) -> CLIPConfig:
    """The preset with what the settings change in every tower. Raises SettingsError."""
    config: CLIPConfig = preset_of(settings, clip_presets)
    return replace(config, towers={name: changed(tower, settings) for name, tower in config.towers.items()})


def forms_of(config: CLIPConfig) -> dict[str, TokenForm | VectorForm]:
    """The form of the samples that each tower takes."""
    return {name: _form(tower) for name, tower in config.towers.items()}


def _form(tower: TowerConfig) -> TokenForm | VectorForm:
    if tower.vocab_size is not None:
        return TokenForm(tower.context, tower.vocab_size)
    return VectorForm(tower.context, tower.num_features or 1)


def _recomputed(stage: nn.Module) -> nn.Module:
    for module in list(stage.modules()):
        if isinstance(module, TransformerBlock):
            recomputed(module)
    return stage


INTERLEAVED = 2
"""Stages per rank of an interleaved tower, if it has enough layers."""


@dataclass(frozen=True)
class Tower:
    """A tower's place: its ranks, stages and microbatches, and the schedule of its own."""

    ranks: tuple[int, ...]
    stages: int
    microbatches: int
    style: str


def clip_schedule(config: CLIPConfig, settings: Settings) -> Schedule:
    """The schedule of all towers and the contrast, checked.

    Raises:
        SettingsError: ranks, stages or microbatches that the towers cannot have.
        ScheduleError: a schedule file that is not valid, or for another run.
    """
    if is_schedule_file(settings.schedule):
        found = read_schedule(settings.schedule, settings.ranks, settings.microbatches, None, None)
    else:
        count = settings.microbatches * settings.replicas_here
        try:
            found = schedule_of_towers(config, _placed(config, settings), count, f"clip-{settings.schedule}")
        except ScheduleError as error:
            raise ScheduleError(f"--schedule {settings.schedule} of the towers: {error}", rule=error.rule) from None
    check_batch(settings, counts_of(cut_of(config, found), found))
    return found


def cut_of(config: CLIPConfig, schedule: Schedule) -> CLIPStages:
    """How many stages each tower has in a schedule. Raises SettingsError for one that is not of the towers."""
    graph, name, towers = schedule.graph, schedule.name, list(config.towers)
    require_one_end(graph, name)
    starts = starts_of(graph)
    if len(starts) != len(towers):
        raise SettingsError(
            f"{name} begins with {'stage' if len(starts) == 1 else 'stages'} {', '.join(map(str, starts))}, and the "
            f"model has {len(towers)} towers, {', '.join(towers)}; give a schedule with a branch for each and the "
            "contrast behind them"
        )
    ends = [*starts[1:], graph.num_stages - 1]
    try:
        cut = CLIPStages(config, {t: end - start for t, start, end in zip(towers, starts, ends, strict=True)})
        wanted = cut.graph(counts_of(cut, schedule))
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None
    if set(graph.edges) != set(wanted.edges):
        raise SettingsError(f"{name}: its stages are not one chain a tower, all of which feed the last stage")
    return cut


def counts_of(cut: CLIPStages, schedule: Schedule) -> dict[str, int]:
    """Microbatches of each tower and of the contrast."""
    graph, most = schedule.graph, schedule.num_microbatches
    found = {name: graph.microbatches_of(part[0], most) for name, part in cut.stages.items()}
    return found | {CONTRAST: graph.microbatches_of(cut.contrast, most)}


def _placed(config: CLIPConfig, settings: Settings) -> dict[str, Tower]:
    if settings.schedule not in (MIXED, *STYLES):
        raise SettingsError(
            f"--schedule {settings.schedule} is for a chain of stages, and a CLIP has towers side by side; give "
            f"{', '.join((MIXED, *STYLES))}, or a file with a schedule of them"
        )
    ranks = ranks_of_towers(config, settings.ranks)
    most = max(map(len, ranks.values()))
    longest = next(name for name, own in ranks.items() if len(own) == most)
    count = settings.microbatches * settings.replicas_here
    found: dict[str, Tower] = {}
    for name, own in ranks.items():
        style, stages = settings.schedule, len(own)
        if style == MIXED:
            style = "interleaved-1f1b" if name == longest and most > 1 else "1f1b"
        if style == "interleaved-1f1b":
            stages = min(INTERLEAVED * len(own), config.tower(name).num_layers)
            if stages == len(own):  # a stage per rank: there is nothing to interleave
                style = "1f1b"
        found[name] = Tower(own, stages, count, style)
    return found


def ranks_of_towers(config: CLIPConfig, num_ranks: int) -> dict[str, tuple[int, ...]]:
    """The ranks of each tower, by its work, one tower after another. Neighbouring towers share a rank if there are
    fewer ranks than towers.

    Raises:
        SettingsError: more ranks than the towers have layers.
    """
    names = list(config.towers)
    work = {name: sum(tower_costs(config, name)) for name in names}
    if num_ranks < len(names):
        groups = partition([work[name] for name in names], num_ranks)
        return {names[place]: (rank,) for rank, group in enumerate(groups) for place in group}
    counts = dict.fromkeys(names, 1)
    while sum(counts.values()) < num_ranks:
        room = [name for name in names if counts[name] < config.tower(name).num_layers]
        if not room:
            raise SettingsError(
                f"the towers have {sum(counts.values())} layers in all, and the run has {num_ranks} ranks; give at "
                f"most --ranks {sum(counts.values())}"
            )
        counts[max(room, key=lambda name: work[name] / counts[name])] += 1
    found: dict[str, tuple[int, ...]] = {}
    first = 0
    for name in names:
        found[name] = tuple(range(first, first + counts[name]))
        first += counts[name]
    return found


def branches_of(towers: Mapping[str, Tower], count: int) -> tuple[dict[str, Branch], Branch]:
    """The branch of each tower, and that of the contrast, which works on `count` microbatches."""
    branches: dict[str, Branch] = {}
    for label, tower in towers.items():
        placement = placements.circular(len(tower.ranks), tower.stages)
        branches[label] = Branch(placement, tower.microbatches, _rules(tower, count), tower.ranks)
    host = _host(towers)
    rules = _rules(towers[host], count)
    if isinstance(rules.max_in_flight, Mapping):
        rules = replace(rules, max_in_flight={0: 1})
    elif isinstance(rules.warmup, Sequence):
        rules = replace(rules, warmup=rules.warmup[-1])
    return branches, Branch(placements.one_to_one(1), count, rules, towers[host].ranks[-1:])


def schedule_of_towers(config: CLIPConfig, towers: Mapping[str, Tower], count: int, name: str) -> Schedule:
    """The schedule of towers that lie where `towers` says, and of the contrast, which works on `count` microbatches.

    Raises:
        ValueError: numbers of microbatches that do not match.
        ScheduleError: rules that deadlock.
    """
    branches, contrast = branches_of(towers, count)
    program = clip_program(config, branches, contrast, costs=_costs(config, towers), name=name)
    return program.build()


def _rules(tower: Tower, count: int) -> Rules:
    """Rules with room for all forwards of one microbatch of the contrast, `each` of them, before any backward."""
    each, ranks = max(1, tower.microbatches // count), len(tower.ranks)
    if tower.style == "gpipe":
        return Rules("forward-first")
    if tower.style == "1f1b":
        return Rules(max_in_flight={stage: tower.stages - 1 - stage + each for stage in range(tower.stages)})
    looped = -(-tower.stages // ranks)
    warmup = [2 * (ranks - 1 - rank) + (looped - 1) * ranks + looped * each for rank in range(ranks)]
    most = tower.microbatches * (tower.stages // ranks)
    return Rules(
        "interleaved",
        forward=breadth_first(ranks),
        backward=depth_first(ranks),
        warmup=[min(number, most) for number in warmup],
    )


def _host(towers: Mapping[str, Tower]) -> str:
    """The tower on whose last rank the contrast runs: the last that is not interleaved, if there is one."""
    plain = [name for name, tower in towers.items() if tower.style != "interleaved-1f1b"]
    return (plain or list(towers))[-1]


def _costs(config: CLIPConfig, towers: Mapping[str, Tower]) -> Costs:
    """Costs by which the order is built: FLOPs of each stage's microbatch, scaled to a mean of 1 ms."""
    work: list[float] = []
    for name, tower in towers.items():
        layers = tower_costs(config, name)
        work += [sum(layers[i] for i in part) / tower.microbatches for part in partition(layers, tower.stages)]
    mean = sum(work) / len(work)
    times = [each / mean for each in work] + [SMALL]
    return Costs(f=times, i=times, w=times)


SMALL = 0.01
"""Milliseconds of the contrast. It multiplies only a few rows, which is little beside the towers."""


def check_batch(settings: Settings, counts: Mapping[str, int]) -> None:
    """Raises SettingsError for a batch that towers would cut between different samples."""
    elsewhere = settings.dp // settings.replicas_here
    unit = math.lcm(*counts.values()) * elsewhere
    uneven = len(set(counts.values())) > 1 and settings.batch % unit
    if uneven or settings.batch < unit:
        named = ", ".join(f"{name} {count}" for name, count in counts.items())
        replicas = "" if elsewhere == 1 else f" in each of {elsewhere} replicas"
        raise SettingsError(
            f"a batch of {settings.batch} samples can't be cut into the microbatches of {named}{replicas}; give a "
            f"multiple of {unit}, so that all cut it at the same samples"
        )
