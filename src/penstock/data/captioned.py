"""Generated images of widely different sizes, each with a text on it. Seed and number alone say what a sample is.

A sample has no image, one or several, and a text: a word for each factor of each image, in turn, and then a run of
words that follow one another.

    images    6 x 9 patches, 2 x 3 patches            words    begin | 2 6 9 | 0 4 8 | 31 32 33 34

A patch shows one factor of its image by a pattern, and noise, so that whoever wants to tell all factors has to look
at several patches. Each word of a run follows from the one before it, and those on an image from the image alone.

The number of an image's patches is log-normal, as is that of a run's words: most images are small, and a few are as
large as they may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import cos, exp, log, pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.errors import DataError
from penstock.data.shuffle import mix, uniform

__all__ = ["CaptionedBatch", "CaptionedImages", "SampleSizes"]

NUM_FACTORS, NUM_VALUES = 3, 6
WORDS = range(1, 1 + NUM_FACTORS * NUM_VALUES)
"""Those that tell a factor's value; 0 begins a text, and those behind follow one another."""
NUM_IMAGES = (0, 1, 1, 1, 1, 1, 2, 3)
"""Of a sample, each as likely."""
SPREAD = 1.0
"""Deviation of the logarithm of an image's patches, and of a run's words."""
NOISE = 0.5
LEAST_SIDE = 2
IGNORED = -100


class SampleSizes(NamedTuple):
    """How large a sample is, before anything of it is made.

    Attributes:
        images: rows and columns of patches of each.
        num_words: that the model reads, the last one's successor not counted.

    Examples:
        >>> import penstock as ps
        >>> images = ps.data.CaptionedImages(num_features=4, side=4, vocab_size=64, context=32)
        >>> size = images.sizes(0)
        >>> len(size.images) >= 0, 0 < size.num_words <= 32
        (True, True)
    """

    images: tuple[tuple[int, int], ...]
    num_words: int

    @property
    def patches(self) -> list[int]:
        """Of each image."""
        return [rows * columns for rows, columns in self.images]

    @property
    def length(self) -> int:
        """What a decoder reads: the patches of all images, and the words."""
        return sum(self.patches) + self.num_words


class CaptionedBatch(NamedTuple):
    """Samples whose images, words and targets lie in one row each.

    Attributes:
        patches: float32[1, P, features].
        sizes: rows and columns of each image, int64[I, 2].
        images_of: images of each sample, int64[S].
        tokens: int64[1, T].
        num_words: of each sample, int64[S].
        targets: int64[1, P + T], the next word for each word, and for each patch `IGNORED`.

    Examples:
        >>> import penstock as ps
        >>> images = ps.data.CaptionedImages(num_features=4, side=4, vocab_size=64, context=32)
        >>> batch = images.batch([0, 1, 2])
        >>> num_patches, num_tokens = batch.patches.shape[1], batch.tokens.shape[1]
        >>> len(batch.num_words), batch.targets.shape[1] == num_patches + num_tokens
        (3, True)
    """

    patches: NDArray[np.float32]
    sizes: NDArray[np.int64]
    images_of: NDArray[np.int64]
    tokens: NDArray[np.int64]
    num_words: NDArray[np.int64]
    targets: NDArray[np.int64]


class CaptionedImages:
    """`sizes(number)` and `batch(numbers)` for any sample numbers from 0 on.

    Attributes:
        words_on_images: those that tell a factor's value. num_values: among how many words such a one is.

    Args:
        num_features: numbers of a patch.
        side: most rows, and columns, of an image's patches.
        vocab_size: words in all.
        context: most words of a sample.
        seed: of all that is drawn.
        patches: of an image, in the median.
        story: words of the run behind those on the images, in the median.

    Raises:
        DataError: sizes too small to tell the factors.

    Examples:
        >>> import penstock as ps
        >>> images = ps.data.CaptionedImages(num_features=4, side=4, vocab_size=64, context=32)
        >>> size = images.sizes(0)
        >>> size.num_words <= 32, all(rows <= 4 and columns <= 4 for rows, columns in size.images)
        (True, True)
    """

    words_on_images = WORDS
    num_values = NUM_VALUES

    def __init__(
        self,
        num_features: int,
        side: int,
        vocab_size: int,
        context: int,
        seed: int = 0,
        patches: float | None = None,
        story: float | None = None,
    ) -> None:
        least_words, least_context = len(WORDS) + 3, 2 + NUM_FACTORS * max(NUM_IMAGES)
        if num_features < 1 or side < LEAST_SIDE or vocab_size < least_words or context < least_context:
            raise DataError(
                f"images of {num_features} features and at most {side} patches a side, with texts of {context} out "
                f"of {vocab_size} words; there must be at least 1, {LEAST_SIDE}, {least_context} and {least_words}."
            )
        self.num_features, self.side, self.vocab_size, self.context = num_features, side, vocab_size, context
        self.seed = seed
        self._patches = side * side / 8 if patches is None else patches
        self._story = context / 8 if story is None else story
        shape = (NUM_FACTORS, NUM_VALUES, num_features)
        self._patterns = uniform(int(np.prod(shape)), seed, -1).reshape(shape) * 2 - 1
        self.sizes = lru_cache(maxsize=1 << 16)(self._sizes)

    @property
    def longest(self) -> int:
        """What no sample is longer than, in patches and words."""
        return max(NUM_IMAGES) * self.side**2 + self.context

    def _sizes(self, number: int) -> SampleSizes:
        if number < 0:
            raise IndexError(f"sample {number}; samples count from 0")
        count = NUM_IMAGES[mix(self.seed, 1, number) % len(NUM_IMAGES)]
        images = []
        for k in range(count):
            patches = self._patches * exp(SPREAD * self._normal(2, number, k))
            tall = sqrt(exp(0.4 * self._normal(3, number, k)))  # its height over that of a square
            images.append((self._along(sqrt(patches) * tall), self._along(sqrt(patches) / tall)))
        story = max(1, round(self._story * exp(SPREAD * self._normal(4, number, 0))))
        return SampleSizes(tuple(images), min(NUM_FACTORS * count + story, self.context))

    def _along(self, patches: float) -> int:
        return min(self.side, max(LEAST_SIDE, round(patches)))

    def _normal(self, what: int, number: int, k: int) -> float:
        first, second = (mix(self.seed, what, number, k, turn) / 2**64 for turn in (0, 1))
        return sqrt(-2 * log(1 - first)) * cos(2 * pi * second)

    def factors(self, number: int, image: int) -> list[int]:
        """The values of an image's factors."""
        return [mix(self.seed, 5, number, image, factor) % NUM_VALUES for factor in range(NUM_FACTORS)]

    def words(self, number: int) -> list[int]:
        """The text of a sample: as many words as the model reads, and one more."""
        sizes = self.sizes(number)
        words = [
            1 + factor * NUM_VALUES + value
            for image in range(len(sizes.images))
            for factor, value in enumerate(self.factors(number, image))
        ]
        others = self.vocab_size - WORDS.stop
        start = mix(self.seed, 6, number) % others
        length = sizes.num_words - len(words)
        return [0, *words, *(WORDS.stop + (start + place) % others for place in range(length))]

    def image(self, number: int, image: int) -> NDArray[np.float32]:
        """The patches of an image, row by row, float32[rows * columns, features]."""
        rows, columns = self.sizes(number).images[image]
        shown = (np.arange(rows)[:, None] + np.arange(columns)).ravel() % NUM_FACTORS
        values = np.array(self.factors(number, image))
        clean = self._patterns[shown, values[shown]]
        noise = uniform(clean.size, self.seed, 7, number, image).reshape(clean.shape) * 2 - 1
        return (clean + NOISE * noise).astype(np.float32)

    def batch(self, numbers: Sequence[int]) -> CaptionedBatch:
        """Samples in one row each of patches, words and targets."""
        sizes = [self.sizes(number) for number in numbers]
        patches = [np.zeros((0, self.num_features), np.float32)]
        tokens: list[int] = []
        targets: list[int] = []
        for number, own in zip(numbers, sizes, strict=True):
            patches += [self.image(number, k) for k in range(len(own.images))]
            words = self.words(number)
            tokens += words[:-1]
            targets += [IGNORED] * sum(own.patches) + words[1:]
        return CaptionedBatch(
            np.concatenate(patches)[None],
            np.array([shape for own in sizes for shape in own.images], np.int64).reshape(-1, 2),
            np.array([len(own.images) for own in sizes], np.int64),
            np.array([tokens], np.int64),
            np.array([own.num_words for own in sizes], np.int64),
            np.array([targets], np.int64),
        )
