"""Whole documents for a decoder: each microbatch has several in one row, and each document is hidden from the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.cost import CostsByLength
from penstock.data import Corpus, Sequences, Tokenizer, open_corpus
from penstock.planning.batches import PackingError, pack_in_turn
from penstock.train.checks import SettingsError
from penstock.train.settings import Settings
from penstock.train.tasks.task import VALIDATION_BATCHES, Example, TaskData
from penstock.train.tasks.text import next_token_unit

BatchForm = Callable[[Tensor, Tensor], Any]
"""Makes a model's input of tokens[1, T] and the lengths[n] of the sequences in them."""


def as_gpt_takes_it(tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens, "lengths": lengths}


class Documents:
    """The documents that each step packs into its microbatches. As batches, they are packed in order of arrival.

    Args:
        sequences: the documents, cut at the context.
        num_replicas, num_microbatches: into how many of each a step's documents are packed.
        costs: of the stages, by the lengths of the documents in a microbatch.
        form: makes the model's input of a row of documents.
    """

    def __init__(
        self, sequences: Sequences, num_replicas: int, num_microbatches: int, costs: CostsByLength, form: BatchForm
    ) -> None:
        self.sequences, self.num_replicas, self.num_microbatches = sequences, num_replicas, num_microbatches
        self.costs = costs
        self._form = form

    def of_step(self, step: int) -> list[int]:
        """The numbers of a step's documents, in order of arrival."""
        found: list[int] = self.sequences.of_step(step).tolist()
        return found

    def lengths(self, sequences: Sequence[int]) -> list[int]:
        """The tokens of each of these documents."""
        found: list[int] = self.sequences.lengths[list(sequences)].tolist()
        return found

    def num_tokens(self, sequences: Sequence[int]) -> int:
        """The tokens of these documents together."""
        return sum(self.lengths(sequences))

    def __getitem__(self, step: int) -> Example:
        own = self.of_step(step)
        bins = pack_in_turn(self.lengths(own), self.num_replicas * self.num_microbatches)
        return self.example([[own[k] for k in each] for each in bins])

    def example(self, microbatches: Sequence[Sequence[int]]) -> Example:
        """A batch with these documents in each microbatch."""
        return packed_example(self.sequences, microbatches, self._form)


def packed_example(sequences: Sequences, microbatches: Sequence[Sequence[int]], form: BatchForm) -> Example:
    """A batch with the sequences of each microbatch in one row."""
    rows = [sequences.row(each) for each in microbatches]
    inputs = [form(torch.from_numpy(row.inputs), torch.from_numpy(row.lengths)) for row in rows]
    return Example(inputs, [torch.from_numpy(row.targets) for row in rows])


def packed_documents(
    settings: Settings,
    tokenizer: Tokenizer,
    context: int,
    corpus: Corpus | None,
    costs: CostsByLength,
    form: BatchForm = as_gpt_takes_it,
) -> TaskData:
    """The documents of a text.

    Args:
        context: tokens beyond which a document is cut.
        corpus: the text, if it is open already.
        costs: of the stages, by the lengths of the documents in a microbatch.
        form: how rows are given to the model.

    Raises:
        DataError, PackingError: a text that is too short.
        SettingsError: microbatches with no room for a document.
    """
    most = settings.microbatch_tokens
    if most is not None and most < context:
        raise SettingsError(
            f"--set microbatch_tokens={most} leaves no room for a document of the context's length, {context}; give "
            "at least that"
        )
    corpus = corpus or open_corpus(settings.data, tokenizer)
    train = Sequences(
        corpus.train, corpus.train_starts, context, settings.batch * context, settings.seed, corpus.vocab_size
    )
    documents = Documents(train, settings.dp, settings.microbatches, costs, form)
    documents.example([documents.of_step(0)])
    return TaskData(
        corpus.description,
        next_token_unit(tokenizer),
        corpus.digest,
        documents,
        _validation(settings, corpus, context, form),
        corpus,
        documents,
    )


def _validation(settings: Settings, corpus: Corpus, context: int, form: BatchForm) -> list[Example]:
    """Up to four fixed batches, packed in order of arrival; with fewer microbatches if the text is too short."""
    whole = Sequences(corpus.validation, corpus.validation_starts, context, context, 0, corpus.vocab_size)
    size = min(settings.batch * context, whole.num_tokens)
    count = max(1, min(VALIDATION_BATCHES, whole.num_tokens // size))
    found = []
    for part in pack_in_turn(whole.lengths, count):
        own, tokens = [], 0
        for k in part:
            if tokens < size:
                own.append(k)
                tokens += int(whole.lengths[k])
        num = min(settings.microbatches, len(own) // settings.dp) * settings.dp
        if num < 1:
            raise PackingError(
                f"the validation text has {len(own)} sequences for {settings.dp} replicas; give more text, or a "
                "smaller --context"
            )
        bins = pack_in_turn(whole.lengths[own], num)
        found.append(packed_example(whole, [[own[k] for k in each] for each in bins], form))
    return found
