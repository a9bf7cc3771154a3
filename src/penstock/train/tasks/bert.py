"""A BERT on text: it guesses masked tokens, and whether the second part of a sample follows the first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from penstock.data import Corpus, MaskedText, open_corpus
from penstock.models import BERTConfig, BERTLoss, bert_costs, bert_presets, bert_stage, bert_tied_parameters
from penstock.runtime import Pipeline
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError
from penstock.train.quality import Quality
from penstock.train.settings import Settings
from penstock.train.tasks.chain import chain_bytes
from penstock.train.tasks.layers import recomputed, stage_layers
from penstock.train.tasks.sizes import changed, preset_of, require_shards
from penstock.train.tasks.task import Data, Example
from penstock.train.tasks.text import VALIDATION_BATCHES, tokenizer_of

NUM_SPECIAL = 3
"""Tokens that `MaskedText` puts behind the vocabulary."""
LEAST = 5
"""Tokens of its shortest sample."""


class BERTTask:
    """See `Task`.

    Raises:
        SettingsError, PartitionError, DataError: sizes that do not go together, or with the schedule.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._settings, self._tokenizer = settings, tokenizer_of(settings)
        vocab_size = self._tokenizer.vocab_size + NUM_SPECIAL
        config: BERTConfig = changed(preset_of(settings, bert_presets), settings, vocab_size=vocab_size)
        if config.context < LEAST:
            raise SettingsError(
                f"context {config.context}: a sample of two parts and three special tokens needs at least {LEAST}"
            )
        self.config = config
        self.sizes = {name: value for name, value in dataclasses.asdict(config).items() if name != "dropout"}
        self.num_tokens = config.context
        self.loss = BERTLoss()
        self.tied = bert_tied_parameters(config)
        self.layer_costs = bert_costs(config)
        self._parts = stage_layers(self.layer_costs, schedule, settings.cut)
        require_shards(settings, schedule, config, vocab_size)

    def stages(self) -> list[Callable[[], nn.Module]]:
        return [self._builder(part) for part in self._parts]

    def _builder(self, part: Sequence[int]) -> Callable[[], nn.Module]:
        wrap = recomputed if self._settings.recompute else None
        return lambda: bert_stage(self.config, list(part), self._settings.seed, wrap=wrap)

    def message_bytes(self, schedule: Schedule) -> list[float]:
        return chain_bytes(self._settings, schedule.num_stages, self.config.context * self.config.width)

    def read(self, corpus: Corpus | None) -> Data:
        settings, context = self._settings, self.config.context
        corpus = corpus or open_corpus(settings.data, self._tokenizer)
        batches = Masked(MaskedText(corpus.train, corpus.vocab_size, context, settings.seed), settings.batch)
        _ = batches[0]
        fresh = Masked(MaskedText(corpus.validation, corpus.vocab_size, context, settings.seed + 1), settings.batch)
        validation = [fresh[number] for number in range(VALIDATION_BATCHES)]
        return Data(corpus.description, corpus.digest, batches, validation, corpus)

    def judge(self, pipe: Pipeline, data: Data, loss: float) -> Quality:
        """Beside a guess of each masked token by its frequency in the text, and of the second part by a coin."""
        assert data.corpus is not None
        wanted = torch.cat([example.targets["tokens"].flatten() for example in data.validation])
        counts = np.bincount(data.corpus.train[:COUNTED], minlength=data.corpus.vocab_size) + 1.0
        shares = counts / counts.sum()
        labels = wanted[wanted != IGNORED].numpy()
        unigram = float(-np.log(shares[labels]).mean())
        chance = float((labels == shares.argmax()).mean())
        accuracy = self._accuracy(pipe, next(iter(data.validation)))
        bar = unigram + (math.log(2) if self.config.next_sentence else 0.0)
        return Quality(
            unit="nats a sample of the validation text: a masked token, and whether the parts follow each other",
            beside=(
                f"{'below' if loss < bar else 'not below'} {bar:.3f}, what frequencies of tokens and a coin give",
                f"{accuracy:.1%} of the masked tokens guessed; {chance:.1%} by always saying the commonest",
            ),
            unigram=unigram,
            accuracy=accuracy,
            chance=chance,
        )

    def _accuracy(self, pipe: Pipeline, example: Example) -> float:
        """The share of masked tokens of a batch that come first among the model's guesses."""
        said = torch.cat([part["tokens"].argmax(-1) for part in pipe.predict(example.inputs)])  # B, T
        labels = example.targets["tokens"]
        masked = labels != IGNORED
        return float((said[masked] == labels[masked]).float().mean())


IGNORED = -100
COUNTED = 1 << 26
"""Tokens of the text whose frequencies are counted."""


class Masked:
    """Batches of masked text, as tensors."""

    def __init__(self, text: MaskedText, batch: int) -> None:
        self._text, self._batch = text, batch

    def __getitem__(self, step: int) -> Example:
        made = self._text.samples(range(step * self._batch, (step + 1) * self._batch))
        tokens, segments, labels, follows = (torch.from_numpy(part) for part in made)
        return Example({"tokens": tokens, "segments": segments}, {"tokens": labels, "next": follows})
