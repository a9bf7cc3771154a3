"""Steps of a captioner: batches of images and words, their costs, and how they are planned.

A captioner is an image tower before a decoder, in one chain of layers. The images of a microbatch lie in one row, and
so do its samples: a sample is its images, then its words. Nothing is padded, so an image costs what its own patches
cost.

    layer 0             patch embedding
    1 .. 7              blocks of the image tower: a patch sees its own image
    8                   images are projected, and joined with the words of their sample
    9 .. 29             blocks of the decoder: a vector sees those before it in its sample
    30                  head

Only sizes are needed here: no image is drawn, and no layer is built. Seed and number alone say what a sample's sizes
are. The number of an image's patches is log-normal, as is that of a sample's words: most images are small, and a few
are as large as they may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import cos, exp, log, pi, sqrt
from typing import NamedTuple

import numpy as np

import penstock as ps
from experiments.uneven import protocol
from penstock.cost import Costs, CostsByLength, LengthLine
from penstock.data.shuffle import mix
from penstock.planning import plan_batch
from penstock.planning.batches import BatchPlan, pack_in_turn
from penstock.runtime import partition

IMAGES, WORDS = "images", "words"
"""The towers: what lengths are given by."""

NUM_FEATURES, SIDE = 48, 32
"""Numbers of a patch; most rows, and most columns, of an image's patches."""
IMAGE_DEPTH, IMAGE_WIDTH = 7, 96
DEPTH, WIDTH = 21, 128
VOCAB_SIZE, CONTEXT = 96, 256
NUM_IMAGE_LAYERS, NUM_LAYERS = IMAGE_DEPTH + 1, IMAGE_DEPTH + DEPTH + 3

NUM_IMAGES = (0, 1, 1, 1, 1, 1, 2, 3)
"""Images of a sample, each number as likely as the others."""
SPREAD = 1.0
"""Deviation of the logarithm of an image's patches, and of a sample's words."""
NUM_FACTORS = 3
"""Words on each image."""
LEAST_SIDE = 2
LOOKED_AT = 256
"""Samples over which the costs of layers are averaged, for the cut into stages."""


class SampleSizes(NamedTuple):
    """How large a sample is.

    Attributes:
        patches: of each image. num_words: that the decoder reads.
    """

    patches: tuple[int, ...]
    num_words: int

    @property
    def length(self) -> int:
        """Vectors in the decoder: the patches of all images, and the words."""
        return sum(self.patches) + self.num_words


@cache
def sizes_of(number: int) -> SampleSizes:
    """The sizes of a sample by its number, from 0 on."""
    count = NUM_IMAGES[mix(0, 1, number) % len(NUM_IMAGES)]
    patches = []
    for k in range(count):
        wanted = SIDE * SIDE / 8 * exp(SPREAD * _normal(2, number, k))
        tall = sqrt(exp(0.4 * _normal(3, number, k)))  # its height over that of a square
        patches.append(_along(sqrt(wanted) * tall) * _along(sqrt(wanted) / tall))
    story = max(1, round(CONTEXT / 8 * exp(SPREAD * _normal(4, number, 0))))
    return SampleSizes(tuple(patches), min(NUM_FACTORS * count + story, CONTEXT))


def _along(patches: float) -> int:
    return min(SIDE, max(LEAST_SIDE, round(patches)))


def _normal(what: int, number: int, k: int) -> float:
    first, second = (mix(0, what, number, k, turn) / 2**64 for turn in (0, 1))
    return sqrt(-2 * log(1 - first)) * cos(2 * pi * second)


class LayerFlops(NamedTuple):
    """FLOPs of a layer's forward for each vector and for each squared length of its tower."""

    tower: str
    linear: float
    square: float


LAYERS = (
    LayerFlops(IMAGES, 2.0 * NUM_FEATURES * IMAGE_WIDTH, 0.0),
    *[LayerFlops(IMAGES, 24.0 * IMAGE_WIDTH**2, 4.0 * IMAGE_WIDTH)] * IMAGE_DEPTH,
    LayerFlops(WORDS, 2.0 * IMAGE_WIDTH * WIDTH, 0.0),
    *[LayerFlops(WORDS, 24.0 * WIDTH**2, 2.0 * WIDTH)] * DEPTH,  # causal
    LayerFlops(WORDS, 2.0 * WIDTH * VOCAB_SIZE, 0.0),
)


def layer_costs(sample: SampleSizes) -> list[float]:
    """Forward FLOPs of each layer for one sample, at least 1."""
    squares = sum(length * length for length in sample.patches)
    vectors = {IMAGES: sum(sample.patches), WORDS: sample.length}
    squared = {IMAGES: squares, WORDS: sample.length**2}
    return [max(1.0, vectors[each.tower] * each.linear + squared[each.tower] * each.square) for each in LAYERS]


def costs_of(schedule: ps.Schedule) -> CostsByLength:
    """Costs of the stages by the lengths of images and samples: ms at 10**9 FLOPs per ms, as `gpt_costs_by_length`
    of `penstock.models` has them.
    """
    mean: list[float] = np.mean([layer_costs(sizes_of(number)) for number in range(LOOKED_AT)], axis=0).tolist()
    linear, square, kept, sent, towers = [], [], [], [], []
    for part in stages_of(mean, schedule.num_stages):
        tower = LAYERS[part[0]].tower
        width = IMAGE_WIDTH if tower == IMAGES else WIDTH
        blocks = sum(index not in (0, NUM_IMAGE_LAYERS, NUM_LAYERS - 1) for index in part)
        ends = (0 in part) + (NUM_IMAGE_LAYERS in part)
        is_last = NUM_LAYERS - 1 in part
        linear.append(sum(LAYERS[index].linear for index in part) * 1e-9)
        square.append(sum(LAYERS[index].square for index in part) * 1e-9)
        kept.append(4.0 * (blocks * 17 * width + ends * width + is_last * 2 * VOCAB_SIZE))
        sent.append(0.0 if is_last else 4.0 * width)
        towers.append(tower)
    rows = list(zip(linear, square, strict=True))
    return CostsByLength(
        f=[LengthLine(0.0, token, pair) for token, pair in rows],
        i=[LengthLine(0.0, token, 2.5 * pair) for token, pair in rows],
        w=[LengthLine(0.0, token) for token in linear],
        activation=[LengthLine(per_token=each) for each in kept],
        message_bytes=[LengthLine(per_token=each) for each in sent],
        towers=towers,
    )


def stages_of(costs: Sequence[float], num_stages: int) -> list[range]:
    """The layers of each stage. Each stage has layers of one tower, and the costliest stage costs least."""
    image, words = costs[:NUM_IMAGE_LAYERS], costs[NUM_IMAGE_LAYERS:]
    found: list[tuple[float, list[range]]] = []
    for first in range(max(1, num_stages - len(words)), min(len(image), num_stages - 1) + 1):
        parts = list(partition(image, first))
        for part in partition(words, num_stages - first):
            parts.append(range(part.start + NUM_IMAGE_LAYERS, part.stop + NUM_IMAGE_LAYERS))
        found.append((max(sum(costs[k] for k in part) for part in parts), parts))
    return min(found, key=lambda each: each[0])[1]


class CaptionedStep:
    """The batch of a step.

    Attributes:
        schedule: what runs it. plan: as it is planned.
    """

    def __init__(self, name: str, num_ranks: int, num_microbatches: int, step: int) -> None:
        self.schedule = ps.build(name, num_ranks, num_microbatches)
        self._costs = costs_of(self.schedule)
        size = num_microbatches * protocol.CAPTIONED_SAMPLES
        self._sizes = [sizes_of(number) for number in range(step * size, (step + 1) * size)]
        lengths = {IMAGES: [each.patches for each in self._sizes], WORDS: [each.length for each in self._sizes]}
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
        return self._costs.of({IMAGES: images, WORDS: [[self._sizes[k].length for k in each] for each in bins]})
