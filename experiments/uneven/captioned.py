"""Steps of a captioner: batches of images and words, their costs, and how they are planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import penstock as ps
from experiments.uneven import protocol
from penstock.cost import Costs, CostsByLength
from penstock.data import CaptionedImages, SampleSizes
from penstock.models import captioner_costs, captioner_costs_by_length, captioner_presets
from penstock.planning import plan_batch
from penstock.planning.batches import BatchPlan, pack_in_turn
from penstock.train.tasks.captioner import LOOKED_AT, tower_parts

CONFIG = replace(captioner_presets["tiny"], image_depth=7, depth=21)
SAMPLES = CaptionedImages(CONFIG.num_features, CONFIG.side, CONFIG.vocab_size, CONFIG.context)


class CaptionedStep:
    """The batch of a step.

    Attributes:
        schedule: what runs it. plan: as it is planned.
    """

    def __init__(self, name: str, num_ranks: int, num_microbatches: int, step: int) -> None:
        self.schedule = ps.build(name, num_ranks, num_microbatches)
        self._costs = costs_of(self.schedule)
        size = num_microbatches * protocol.CAPTIONED_SAMPLES
        self._sizes = [SAMPLES.sizes(number) for number in range(step * size, (step + 1) * size)]
        lengths = {"images": [each.patches for each in self._sizes], "words": [each.length for each in self._sizes]}
        self.plan: BatchPlan = plan_batch(lengths, self.schedule, self._costs)

    def arrival_costs(self) -> Costs:
        """Of the microbatches as they arrive."""
        return self._of(pack_in_turn([each.length for each in self._sizes], self.schedule.num_microbatches))

    def planned_costs(self) -> Costs:
        """Of the microbatches in the order planned."""
        (own,) = self.plan.microbatches
        return self._of([list(each) for each in own])

    def _of(self, bins: list[list[int]]) -> Costs:
        images = [[length for k in each for length in self._sizes[k].patches] for each in bins]
        return self._costs.of({"images": images, "words": [[self._sizes[k].length for k in each] for each in bins]})


def costs_of(schedule: ps.Schedule) -> CostsByLength:
    """By length, of the stages as training cuts them."""
    sizes: list[SampleSizes] = [SAMPLES.sizes(number) for number in range(LOOKED_AT)]
    layers = np.mean([captioner_costs(CONFIG, each.patches, each.length) for each in sizes], axis=0).tolist()
    return captioner_costs_by_length(CONFIG, tower_parts(layers, CONFIG.num_image_layers, schedule, None))
