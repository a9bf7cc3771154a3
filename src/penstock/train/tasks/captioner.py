"""A captioner on generated images of widely different sizes: it learns to say what each image shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.cost import CostsByLength
from penstock.data import CaptionedImages, Corpus
from penstock.models import (
    CaptionerConfig,
    CrossEntropy,
    captioner_costs,
    captioner_costs_by_length,
    captioner_presets,
    captioner_stage,
)
from penstock.models.costs import IMAGES, WORDS
from penstock.planning.batches import Lengths, pack_in_turn
from penstock.runtime import PartitionError, Pipeline, partition
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError, refuse_options
from penstock.train.settings import Settings
from penstock.train.tasks.documents import costs_by_length
from penstock.train.tasks.layers import ChainTask, changed, preset_of, refuse_shared, require_chain, stage_layers
from penstock.train.tasks.task import BYTES, VALIDATION_BATCHES, Example, ModelQuality, TaskData

FRESH = 1 << 40
"""Samples from this number on are never trained on."""
LOOKED_AT = 256
"""Samples over which sizes are averaged, for the cut into stages."""


class CaptionerTask(ChainTask):
    """See `Task`.

    Raises:
        SettingsError, PartitionError, DataError: sizes that do not go together, or with the schedule.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        refuse_options(settings, ("data", "tokenizer"), "a captioner learns from samples that are generated for it")
        refuse_options(settings, ("tied",), "a captioner's words have one embedding and a head of its own")
        config: CaptionerConfig = changed(preset_of(settings, captioner_presets), settings)
        self._samples = CaptionedImages(
            config.num_features, config.side, config.vocab_size, config.context, settings.seed
        )
        self._looked_at = [self._samples.sizes(number) for number in range(LOOKED_AT)]
        rows = [captioner_costs(config, each.patches, each.length) for each in self._looked_at]
        costs: list[float] = np.mean(rows, axis=0).tolist()  # of each layer, for the mean sample
        parts = tower_parts(costs, config.num_image_layers, schedule, settings.cut)
        super().__init__(settings, schedule, config, costs, CrossEntropy(), (), captioner_stage, parts)
        self.num_tokens = None  # a sample has as many as its images have
        self._costs = captioner_costs_by_length(config, parts)

    def message_bytes(self, schedule: Schedule) -> list[float]:
        """Of a microbatch of mean samples."""
        each = self._settings.batch / (self._settings.dp * self._settings.microbatches)
        images = float(np.mean([sum(one.patches) for one in self._looked_at])) * self.config.image_width
        vectors = float(np.mean([one.length for one in self._looked_at])) * self.config.width
        numbers = [images if tower == IMAGES else vectors for tower in self._costs.towers]
        return [*(BYTES * each * own for own in numbers[:-1]), 0.0]

    def read(self, corpus: Corpus | None) -> TaskData:
        settings, longest = self._settings, self._samples.longest
        most = settings.microbatch_tokens
        if most is not None and most < longest:
            raise SettingsError(
                f"--microbatch-tokens {most} leaves no room for a sample as long as they may be, {longest} patches "
                "and words; give at least that"
            )
        costs = costs_by_length(settings, self._costs)
        images = CaptionedSamples(self._samples, settings.batch, settings.dp, settings.microbatches, costs)
        fresh = FRESH // settings.batch
        validation = [images[fresh + number] for number in range(VALIDATION_BATCHES)]
        digest = f"captioned-{settings.seed}"
        return TaskData("generated images and texts on them", digest, images, validation, documents=images)

    def judge(self, pipe: Pipeline, data: TaskData, loss: float) -> ModelQuality:
        """How many words on images that it has never seen are right, given the words before them."""
        example = next(iter(data.validation))
        right = total = 0
        for logits, targets in zip(pipe.predict(example.inputs), example.targets, strict=True):
            asked = (targets >= CaptionedImages.words_on_images.start) & (
                targets < CaptionedImages.words_on_images.stop
            )
            right += int((logits.argmax(-1)[asked] == targets[asked]).sum())
            total += int(asked.sum())
        accuracy, chance = right / max(total, 1), 1 / CaptionedImages.num_values
        return ModelQuality(
            unit="nats a word of texts on new images",
            beside=(
                f"{accuracy:.1%} of {total} words that say what an image shows are right; {chance:.1%} by chance",
            ),
            accuracy=accuracy,
            chance=chance,
        )


class CaptionedSamples:
    """See `PackedDocuments`. As batches, they are packed in the order in which they arrive."""

    def __init__(
        self, samples: CaptionedImages, batch: int, num_replicas: int, num_microbatches: int, costs: CostsByLength
    ) -> None:
        self.samples, self.costs = samples, costs
        self.num_replicas, self.num_microbatches = num_replicas, num_microbatches
        self._batch = batch

    def of_step(self, step: int) -> list[int]:
        return list(range(step * self._batch, (step + 1) * self._batch))

    def num_tokens(self, sequences: Sequence[int]) -> int:
        return sum(self.samples.sizes(number).length for number in sequences)

    def lengths(self, sequences: Sequence[int]) -> Lengths:
        sizes = [self.samples.sizes(number) for number in sequences]
        return {IMAGES: [each.patches for each in sizes], WORDS: [each.length for each in sizes]}

    def stage_lengths(self, stage: int, sequences: Sequence[int]) -> list[int]:
        sizes = [self.samples.sizes(number) for number in sequences]
        if self.costs.towers[stage] == IMAGES:
            return [length for each in sizes for length in each.patches]
        return [each.length for each in sizes]

    def __getitem__(self, step: int) -> Example:
        own = self.of_step(step)
        lengths = [self.samples.sizes(number).length for number in own]
        bins = pack_in_turn(lengths, self.num_replicas * self.num_microbatches)
        return self.example([[own[k] for k in each] for each in bins])

    def example(self, microbatches: Sequence[Sequence[int]]) -> Example:
        inputs, targets = [], []
        for each in microbatches:
            sample = {name: torch.from_numpy(value) for name, value in self.samples.batch(each)._asdict().items()}
            targets.append(sample.pop("targets"))
            inputs.append(sample)
        return Example(inputs, targets)


def tower_parts(
    costs: Sequence[float], num_image_layers: int, schedule: Schedule, cut: Sequence[int] | None
) -> list[range]:
    """The layers of each stage. Each stage has layers of one tower. The stages are divided between the towers so that
    the costliest stage costs least.

        costs 2 2 2 2 | 4 4 4, 3 stages     [0 1 2 3] [4] [5 6]

    Raises:
        PartitionError: more stages than layers. SettingsError: one stage, a cut that does not fit or has a stage with
            layers of both towers, or a schedule whose stages are no chain or are shared by ranks.
    """
    require_chain(schedule)
    num = schedule.num_stages
    refuse_shared(schedule, "a captioner begins with images")
    if num < 2:
        raise SettingsError(
            "a captioner has two towers, each with stages of its own, and the schedule has 1; give --ranks 2 or more"
        )
    if cut is not None:
        parts = stage_layers(costs, schedule, cut)
        if mixed := [part for part in parts if part.start < num_image_layers < part.stop]:
            raise SettingsError(
                f"cut {','.join(map(str, cut))}: a stage has layers {mixed[0].start} to {mixed[0].stop - 1}, of both "
                f"towers; the first {num_image_layers} layers are the image tower's, end a stage with them"
            )
        return parts
    if num > len(costs):
        raise PartitionError(f"{num} stages asked of a model of {len(costs)} layers; use a deeper model")
    image, words = costs[:num_image_layers], costs[num_image_layers:]
    found: list[tuple[float, list[range]]] = []
    for first in range(max(1, num - len(words)), min(len(image), num - 1) + 1):
        parts = list(partition(image, first))
        parts += [
            range(part.start + num_image_layers, part.stop + num_image_layers)
            for part in partition(words, num - first)
        ]
        found.append((max(sum(costs[k] for k in part) for part in parts), parts))
    return min(found, key=lambda each: each[0])[1]
