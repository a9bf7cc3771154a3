"""A GPT on text: what `penstock train` trains by default."""

from __future__ import annotations

from penstock.data import Corpus
from penstock.models import (
    CrossEntropy,
    GPTConfig,
    gpt_costs,
    gpt_costs_by_length,
    gpt_stage,
    presets,
    tied_parameters,
)
from penstock.runtime import Pipeline
from penstock.schedule import Schedule
from penstock.train.settings import Settings
from penstock.train.tasks.documents import packed_documents
from penstock.train.tasks.layers import ChainTask, changed, preset_of
from penstock.train.tasks.task import TaskData
from penstock.train.tasks.text import next_tokens, tokenizer_of, write


class GPTTask(ChainTask):
    """See `Task`.

    Raises:
        SettingsError, PartitionError, DataError: sizes that do not go together, or with the schedule.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._tokenizer = tokenizer_of(settings)
        config = gpt_config(settings, self._tokenizer.vocab_size)
        tied = tied_parameters(config)
        super().__init__(settings, schedule, config, gpt_costs(config), CrossEntropy(), tied, gpt_stage)

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
