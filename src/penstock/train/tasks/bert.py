"""A BERT on text: it guesses masked tokens, and whether the second part of a sample follows the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter

import torch
from torch import nn

from penstock.data import Corpus, MaskedText, open_corpus
from penstock.models import BERTConfig, BERTLoss, bert_costs, bert_presets, bert_stage, bert_tied_parameters
from penstock.runtime import Pipeline
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError
from penstock.train.quality import Quality
from penstock.train.settings import Settings
from penstock.train.tasks.layers import chain_bytes, recomputed, stage_layers
from penstock.train.tasks.masked import judge_masked
from penstock.train.tasks.sizes import changed, kept_sizes, preset_of, require_shards
from penstock.train.tasks.task import VALIDATION_BATCHES, Data, Example, StepBatches
from penstock.train.tasks.text import tokenizer_of

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
        self.sizes = kept_sizes(config)
        self.num_tokens = config.context
        self.loss = BERTLoss()
        self.tied = bert_tied_parameters(config)
        self.layer_costs = bert_costs(config)
        self._parts = stage_layers(self.layer_costs, schedule, settings.cut)
        require_shards(settings, schedule, config, vocab_size)

    def stages(self) -> list[Callable[[], nn.Module]]:
        wrap = recomputed if self._settings.recompute else None
        return [partial(bert_stage, self.config, list(part), self._settings.seed, wrap=wrap) for part in self._parts]

    def message_bytes(self, schedule: Schedule) -> list[float]:
        return chain_bytes(self._settings, schedule.num_stages, self.config.context * self.config.width)

    def read(self, corpus: Corpus | None) -> Data:
        settings, context = self._settings, self.config.context
        corpus = corpus or open_corpus(settings.data, self._tokenizer)
        batches = masked_batches(MaskedText(corpus.train, corpus.vocab_size, context, settings.seed), settings.batch)
        _ = batches[0]
        fresh = masked_batches(
            MaskedText(corpus.validation, corpus.vocab_size, context, settings.seed + 1), settings.batch
        )
        validation = [fresh[number] for number in range(VALIDATION_BATCHES)]
        return Data(corpus.description, corpus.digest, batches, validation, corpus)

    def judge(self, pipe: Pipeline, data: Data, loss: float) -> Quality:
        return judge_masked(
            pipe,
            data,
            loss,
            "nats a sample of the validation text: a masked token, and whether the parts follow each other",
            itemgetter("tokens"),
            math.log(2) if self.config.next_sentence else 0.0,
        )


def masked_batches(text: MaskedText, batch: int) -> StepBatches:
    """Batches of masked text, as tensors."""

    def made(step: int) -> Example:
        rows = text.samples(range(step * batch, (step + 1) * batch))
        tokens, segments, labels, follows = (torch.from_numpy(part) for part in rows)
        return Example({"tokens": tokens, "segments": segments}, {"tokens": labels, "next": follows})

    return StepBatches(made)
