"""Pictures for a model that sees and writes: it writes what is on them.

A sample is a row of tokens: those that the picture replaces, then words.

    <image> <image> <image> <image> red blue green white <end>
                                    ^ the model learns from here on
"""

from __future__ import annotations

import math

import numpy as np
import torch

from penstock.data import TilePictures, Tokenizer
from penstock.data.masked import IGNORED
from penstock.models.huggingface.pictures import IMAGES, PictureForm
from penstock.runtime import Pipeline
from penstock.train.checks import SettingsError
from penstock.train.tasks.task import VALIDATION_BATCHES, Example, ModelQuality, StepBatches, TaskData
from penstock.train.tasks.text import logits_of


class GeneratedPictures:
    """Generated pictures and their words, as batches for a model.

    Args:
        form: of the pictures. vocab_size: of the model. most: tokens that it takes, None where any number.
        batch: samples of a step.

    Attributes:
        num_tokens: of each sample.

    Raises:
        SettingsError: words that do not fit into the model, or look like a picture to it.
    """

    def __init__(
        self, form: PictureForm, tokenizer: Tokenizer, model: str, most: int | None, batch: int, seed: int
    ) -> None:
        self._form, self._batch, self._seed = form, batch, seed
        self._tiles = TilePictures(form.num_channels, form.size, seed)
        end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
        texts = [
            np.array([*tokenizer.encode(self._tiles.words(number)), *end], np.int64)
            for number in range(self._tiles.num_combinations)
        ]
        if any(form.token in words for words in texts):
            raise SettingsError(
                f"{model} has number {form.token} for a picture's tokens, and the tokenizer {tokenizer.name} gives "
                "it to a word; give the --tokenizer that the model was made for"
            )
        self._words = texts
        longest = max(map(len, texts))
        self.num_tokens = form.num_tokens + longest - 1  # the last word is not read
        if most is not None and self.num_tokens > most:
            raise SettingsError(
                f"{model} takes {most} tokens at most, and a picture and its words are {self.num_tokens}; give a "
                "--tokenizer with words for colours, or --data for text alone"
            )

    @property
    def data(self) -> TaskData:
        """Of all steps."""
        fresh = [self.samples(number * self._batch, True) for number in range(VALIDATION_BATCHES)]
        batches = StepBatches(lambda step: self.samples(step * self._batch))
        return TaskData("generated pictures of coloured tiles", f"tiles-{self._seed}", batches, fresh)

    def samples(self, first: int, fresh: bool = False) -> Example:
        """A batch from sample `first` on."""
        numbers = range(first, first + self._batch)
        before = self._form.num_tokens
        tokens = np.zeros((self._batch, self.num_tokens), np.int64)
        targets = np.full((self._batch, self.num_tokens), IGNORED, np.int64)
        tokens[:, :before] = self._form.token
        for row, number in enumerate(numbers):
            words = self._words[self._tiles.combination(number, fresh)]
            tokens[row, before : before + len(words) - 1] = words[:-1]
            targets[row, before - 1 : before - 1 + len(words)] = words
        pictures = torch.from_numpy(self._tiles.pictures(numbers, fresh))
        return Example({"input_ids": torch.from_numpy(tokens), IMAGES: pictures}, torch.from_numpy(targets))

    def judge(self, pipe: Pipeline, data: TaskData, loss: float) -> ModelQuality:
        """How often it names everything on a picture. Every rank must call it."""
        wanted = torch.cat([example.targets for example in data.validation])
        blind = self._tiles.nats * len(wanted) / int((wanted != IGNORED).sum())
        first = next(iter(data.validation))
        said = torch.cat([logits_of(part).argmax(-1) for part in pipe.predict(first.inputs)])
        right = (said == first.targets) | (first.targets == IGNORED)
        accuracy, chance = float(right.all(1).float().mean()), 1 / self._tiles.num_combinations
        bar = "below" if math.isfinite(loss) and loss < blind else "not below"
        return ModelQuality(
            unit="nats a token of what is on pictures never trained on",
            beside=(
                f"{bar} {blind:.3f}, the least without looking at them",
                f"{accuracy:.1%} of the pictures told without a mistake, each token after the right ones before it; "
                f"{chance:.1%} without looking",
            ),
            accuracy=accuracy,
            chance=chance,
        )
