"""A CLIP on generated samples: each tower learns to say what the others say of the same sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.data import Corpus, PairedSamples, TokenForm, VectorForm
from penstock.data.shuffle import permuted
from penstock.models import CLIPConfig, ContrastiveLoss, TowerConfig, clip_presets, retrieval_accuracy
from penstock.models.block import TransformerBlock
from penstock.models.clip_stages import CLIPStages
from penstock.runtime import Pipeline
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError, refuse_options
from penstock.train.settings import Settings
from penstock.train.tasks.clip_schedule import counts_of, cut_of
from penstock.train.tasks.layers import recomputed
from penstock.train.tasks.sizes import kept_sizes, preset_of, require_shards
from penstock.train.tasks.task import BYTES, VALIDATION_BATCHES, Example, ModelQuality, TaskData
from penstock.train.towers import CONTRAST

SEEN = 152
"""How many of the 216 combinations of factors are trained on. The other 64 show whether it has
understood the factors.
"""


class CLIPTask:
    """See `Task`.

    Raises:
        SettingsError: sizes that do not go together, or options of models on text.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._settings = settings
        self.config = config = clip_config(settings)
        self._cut = cut_of(config, schedule)
        self._counts = counts_of(self._cut, schedule)
        self.sizes: Mapping[str, Any] = {
            **{name: kept_sizes(tower) for name, tower in config.towers.items()},
            "shared_width": config.shared_width,
        }
        self.num_tokens = sum(tower.context for tower in config.towers.values())
        self.loss = ContrastiveLoss()
        self.tied: list[list[str]] = []
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
        told = CLIPBatches(samples, self._cut, settings.batch, settings.seed)
        fresh = [told.fresh(number * settings.batch, settings.batch) for number in range(VALIDATION_BATCHES)]
        names = ", ".join(self.config.towers)
        return TaskData(f"generated samples of {names}", f"paired-{settings.seed}", told, fresh)

    def judge(self, pipe: Pipeline, data: TaskData, loss: float) -> ModelQuality:
        """How many samples of combinations that it has never seen find their partner among so many."""
        assert isinstance(data.batches, CLIPBatches)
        num = self._counts[CONTRAST]
        each = math.lcm(*(max(1, count // num) for count in self._counts.values()))  # of a tower's for one of it
        size = max(each, data.batches.num_fresh // each * each)
        num *= self._settings.dp // self._settings.replicas_here
        parts = pipe.predict(data.batches.fresh(0, size * num).inputs)
        accuracy = float(torch.stack([retrieval_accuracy(logits) for logits in parts]).mean())
        by_chance = math.log(self._settings.batch / num)
        return ModelQuality(
            unit=f"nats to tell a sample's partner from those of its microbatch; {by_chance:.3f} by chance",
            beside=(
                f"{accuracy:.1%} of new samples find their partner among {size}, {accuracy * size:.1f} times as many "
                "as by chance",
            ),
            accuracy=accuracy,
            chance=1 / size,
        )


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
    refuse_options(
        settings, ("context", "tied", "data", "tokenizer"), "a CLIP learns from samples that are generated for it"
    )
    refuse_options(settings, ("stages", "warmup", "cut"), "each tower has its own; --tower NAME=stages:N says so")
    if settings.schedule_options:
        raise SettingsError(
            f"--option {min(settings.schedule_options)} is for one chain of stages, and each tower has its own; "
            "leave it out, or give a schedule file"
        )
    config: CLIPConfig = preset_of(settings, clip_presets)
    changes: dict[str, Any] = {
        name: value
        for name, value in (
            ("depth", settings.depth),
            ("width", settings.width),
            ("num_heads", settings.heads),
            ("dropout", settings.dropout),
        )
        if value is not None
    }
    try:
        towers = {name: dataclasses.replace(tower, **changes) for name, tower in config.towers.items()}
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return dataclasses.replace(config, towers=towers)


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
