"""The common part of tasks on text: the tokenizer, the corpus; for decoders, the next token and what they write."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.data import (
    Batches,
    ByteTokenizer,
    Corpus,
    Tokenizer,
    entropies,
    load_tokenizer,
    open_corpus,
    to_tensors,
    validation_batches,
)
from penstock.models import sample
from penstock.runtime import Pipeline
from penstock.train.settings import Settings
from penstock.train.tasks.task import VALIDATION_BATCHES, Example, ModelQuality, StepBatches, TaskData

ENTROPY_TOKENS = 1 << 26
"""Tokens of training and of validation text from which the report's entropies are counted."""


def tokenizer_of(settings: Settings) -> Tokenizer:
    """The tokenizer by its file, or bytes. Raises DataError."""
    return load_tokenizer(settings.tokenizer) if settings.tokenizer else ByteTokenizer()


def check_tokens(corpus: Corpus) -> None:
    """Raises DataError if the data has a token outside the vocabulary, in the part from which entropies are
    counted.
    """
    for tokens in (corpus.train, corpus.validation):
        if np.iinfo(tokens.dtype).max >= corpus.vocab_size:
            entropies(tokens[:ENTROPY_TOKENS], tokens[:2], corpus.vocab_size)


def next_tokens(settings: Settings, tokenizer: Tokenizer, context: int, corpus: Corpus | None) -> TaskData:
    """Text for a decoder of some context. The targets are the inputs shifted by one token. Raises DataError."""
    corpus = corpus or open_corpus(settings.data, tokenizer)
    batches = Batches(corpus.train, settings.batch, context, settings.seed, corpus.vocab_size)
    _ = batches[0]
    fixed = validation_batches(corpus.validation, settings.batch, context, VALIDATION_BATCHES, corpus.vocab_size)
    validation = [Example(*to_tensors(batch)) for batch in fixed]
    made = StepBatches(lambda step: Example(*to_tensors(batches[step])))
    return TaskData(corpus.description, corpus.digest, made, validation, corpus)


def judge_decoder(
    settings: Settings, tokenizer: Tokenizer, context: int, pipe: Pipeline, data: TaskData, loss: float
) -> ModelQuality:
    """Compares a decoder with counting tokens and pairs of tokens, and lets it write. Every rank must call it."""
    text = write(settings, tokenizer, context, pipe)
    assert data.corpus is not None
    corpus = data.corpus
    bars = entropies(corpus.train, corpus.validation, corpus.vocab_size, max_tokens=ENTROPY_TOKENS)
    beats = bars.beaten_by(loss)
    bar = "below" if beats else "not below"
    return ModelQuality(
        unit="nats a token on the validation text",
        beside=(f"{bar} {bars.bigram:.3f}, what counting pairs of tokens gives (single ones {bars.unigram:.3f})",),
        unigram=bars.unigram,
        bigram=bars.bigram,
        beats_bigram=beats,
        text=text,
        writes=True,
    )


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
