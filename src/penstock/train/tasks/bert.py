"""A BERT on text: it guesses masked tokens, and whether the second part of a sample follows the first."""

from __future__ import annotations

import torch

from penstock.data import Corpus, MaskedText, open_corpus
from penstock.models import BERTConfig, BERTLoss, bert_costs, bert_presets, bert_stage, bert_tied_parameters
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError
from penstock.train.settings import Settings
from penstock.train.tasks.layers import ChainTask, changed, preset_of
from penstock.train.tasks.task import VALIDATION_BATCHES, Example, StepBatches, TaskData
from penstock.train.tasks.text import tokenizer_of

NUM_SPECIAL = 3
"""Tokens that `MaskedText` adds behind the vocabulary."""
LEAST = 5
"""Tokens of its shortest sample."""


class BERTTask(ChainTask):
    """See `Task`.

    Raises:
        SettingsError, PartitionError, DataError: sizes that do not go together, or with the schedule.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._tokenizer = tokenizer_of(settings)
        vocab_size = self._tokenizer.vocab_size + NUM_SPECIAL
        config: BERTConfig = changed(preset_of(settings, bert_presets), settings, vocab_size=vocab_size)
        if config.context < LEAST:
            raise SettingsError(
                f"context {config.context}: a sample of two parts and three special tokens needs at least {LEAST}"
            )
        tied = bert_tied_parameters(config)
        super().__init__(settings, schedule, config, bert_costs(config), BERTLoss(), tied, bert_stage)

    def read(self, corpus: Corpus | None) -> TaskData:
        settings, context = self._settings, self.config.context
        corpus = corpus or open_corpus(settings.data, self._tokenizer)
        batches = masked_batches(MaskedText(corpus.train, corpus.vocab_size, context, settings.seed), settings.batch)
        _ = batches[0]
        fresh = masked_batches(
            MaskedText(corpus.validation, corpus.vocab_size, context, settings.seed + 1), settings.batch
        )
        validation = [fresh[number] for number in range(VALIDATION_BATCHES)]
        unit = "nats a sample of the validation text: a masked token, and whether the parts follow each other"
        return TaskData(corpus.description, unit, corpus.digest, batches, validation, corpus)


def masked_batches(text: MaskedText, batch: int) -> StepBatches:
    """Batches of masked text, as tensors."""

    def made(step: int) -> Example:
        rows = text.samples(range(step * batch, (step + 1) * batch))
        tokens, segments, labels, follows = (torch.from_numpy(part) for part in rows)
        return Example({"tokens": tokens, "segments": segments}, {"tokens": labels, "next": follows})

    return StepBatches(made)
