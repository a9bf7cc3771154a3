"""The common part of tasks on text: the tokenizer, the corpus; for decoders, the next token and what they write."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.data import (
    Batches,
    ByteTokenizer,
    Corpus,
    DataError,
    Tokenizer,
    load_tokenizer,
    open_corpus,
    to_tensors,
    validation_batches,
)
from penstock.models import sample
from penstock.runtime import Pipeline
from penstock.train.settings import Settings
from penstock.train.tasks.task import VALIDATION_BATCHES, Example, StepBatches, TaskData


def tokenizer_of(settings: Settings) -> Tokenizer:
    """The tokenizer by its file, or bytes. Raises DataError."""
    return load_tokenizer(settings.tokenizer) if settings.tokenizer else ByteTokenizer()


CHECKED = 1 << 26
"""Tokens of training and of validation text that are looked at before a run."""


def check_tokens(corpus: Corpus) -> None:
    """Raises DataError if the first tokens of the data have one outside the vocabulary."""
    for tokens in (corpus.train[:CHECKED], corpus.validation[:CHECKED]):
        if not tokens.size or np.iinfo(tokens.dtype).max < corpus.vocab_size:
            continue
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= corpus.vocab_size:
            raise DataError(
                f"token {low if low < 0 else high} in the data, outside the vocabulary of {corpus.vocab_size}. "
                "Give the tokenizer the data was prepared with."
            )


def next_tokens(settings: Settings, tokenizer: Tokenizer, context: int, corpus: Corpus | None) -> TaskData:
    """Text for a decoder of some context. The targets are the inputs shifted by one token. Raises DataError."""
    corpus = corpus or open_corpus(settings.data, tokenizer)
    batches = Batches(corpus.train, settings.batch, context, settings.seed, corpus.vocab_size)
    _ = batches[0]
    fixed = validation_batches(corpus.validation, settings.batch, context, VALIDATION_BATCHES, corpus.vocab_size)
    validation = [Example(*to_tensors(batch)) for batch in fixed]
    made = StepBatches(lambda step: Example(*to_tensors(batches[step])))
    return TaskData(corpus.description, next_token_unit(tokenizer), corpus.digest, made, validation, corpus)


def next_token_unit(tokenizer: Tokenizer) -> str:
    """The unit of the loss of a model that guesses the next token, and the loss of one that knows nothing."""
    return f"nats a token on the validation text; {math.log(tokenizer.vocab_size):.3f} by guessing"


def logits_of(part: Any) -> Tensor:
    """What a model said of a microbatch, which some return among other things."""
    found: Tensor = part["logits"] if isinstance(part, dict) else part
    return found


def write(settings: Settings, tokenizer: Tokenizer, context: int, pipe: Pipeline) -> str:
    """Text that the model writes. Every rank draws the same."""
    if settings.sample == 0:
        return ""
    end = tokenizer.end_of_document
    replicas = settings.dp // settings.replicas_here  # each needs a part of a batch, if only the same

    def logits(tokens: Tensor) -> Tensor:
        parts = pipe.predict(tokens.repeat(replicas, 1))
        said = torch.cat(list(map(logits_of, parts)))
        return said[: len(tokens), :, : tokenizer.vocab_size]  # a model may know more words than its tokenizer

    drawn = sample(
        logits,
        torch.tensor([[end or 0]]),
        settings.sample,
        context,
        temperature=0.8,
        top_k=40,
        seed=settings.seed,
    )
    written = drawn[0, 1:].tolist()
    if end in written:
        written = written[: written.index(end)]
    return tokenizer.decode(written)
