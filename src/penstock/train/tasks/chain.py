"""Models of ours that are a chain of layers over text: a GPT, which is trained by default, and a BERT, which guesses
masked tokens, and whether the second part of a sample follows the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from penstock.data import Corpus, MaskedText, open_corpus
from penstock.data.masked import NUM_SPECIAL
from penstock.models import (
    BERTConfig,
    BERTLoss,
    CrossEntropy,
    GPTConfig,
    bert_costs,
    bert_presets,
    gpt_costs,
    gpt_costs_by_length,
    presets,
)
from penstock.models.listed import ListedConfig, tied_ends
from penstock.runtime import Pipeline
from penstock.schedule import Schedule
from penstock.train.settings import Settings
from penstock.train.tasks.documents import packed_documents
from penstock.train.tasks.layers import (
    chain_bytes,
    changed,
    kept_sizes,
    preset_of,
    recomputed,
    require_shards,
    stage_layers,
)
from penstock.train.tasks.task import VALIDATION_BATCHES, Example, StepBatches, Task, TaskData
from penstock.train.tasks.text import next_tokens, tokenizer_of, write


class ChainTask(Task):
    """The common part of tasks whose model is one of ours, a chain of layers over samples of `context` tokens.

    Args:
        config: of the model. costs: of its layers. loss: see `Task`.
    """

    def __init__(
        self,
        settings: Settings,
        schedule: Schedule,
        config: ListedConfig,
        costs: Sequence[float],
        loss: Callable[..., Tensor],
    ) -> None:
        self.config, self.sizes, self.num_tokens = config, kept_sizes(config), config.context
        self.loss, self.tied, self.layer_costs = loss, tied_ends(config), costs
        self._settings, self._layers = settings, config.listed
        self._parts = stage_layers(costs, schedule, settings.cut)
        require_shards(settings, schedule, config, config.vocab_size)

    def stages(self) -> list[Callable[[], nn.Module]]:
        settings, wrap = self._settings, recomputed if self._settings.recompute else None
        return [partial(self._layers.stage, list(part), settings.seed, wrap) for part in self._parts]

    def message_bytes(self, schedule: Schedule) -> list[float]:
        return chain_bytes(self._settings, schedule.num_stages, self.config.context * self.config.width)


class GPTTask(ChainTask):
    """See `Task`.

    Raises:
        SettingsError, PartitionError, DataError: sizes that do not go together, or with the schedule.
    """

    writes = True

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._tokenizer = tokenizer_of(settings)
        config = gpt_config(settings, self._tokenizer.vocab_size)
        super().__init__(settings, schedule, config, gpt_costs(config), CrossEntropy())

    def read(self, corpus: Corpus | None) -> TaskData:
        if self._settings.is_packed:
            costs = gpt_costs_by_length(self.config, self._parts)
            return packed_documents(self._settings, self._tokenizer, self.config.context, corpus, costs)
        return next_tokens(self._settings, self._tokenizer, self.config.context, corpus)

    def write(self, pipe: Pipeline) -> str:
        return write(self._settings, self._tokenizer, self.config.context, pipe)


def gpt_config(settings: Settings, vocab_size: int) -> GPTConfig:
    """The preset with what the settings change in it. Raises SettingsError."""
    config: GPTConfig = changed(preset_of(settings, presets), settings, vocab_size=vocab_size)
    return config


class BERTTask(ChainTask):
    """See `Task`.

    Raises:
        SettingsError, PartitionError, DataError: sizes that do not go together, or with the schedule.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._tokenizer = tokenizer_of(settings)
        vocab_size = self._tokenizer.vocab_size + NUM_SPECIAL
        config: BERTConfig = changed(preset_of(settings, bert_presets), settings, vocab_size=vocab_size)
        super().__init__(settings, schedule, config, bert_costs(config), BERTLoss())

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
