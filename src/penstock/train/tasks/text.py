"""The common part of tasks on text: the tokenizer and the corpus; for decoders, the next token and what they write;
for models that see all tokens at once, masked tokens that they guess.
"""

from __future__ import annotations

import math
from dataclasses import replace

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
from penstock.data.masked import IGNORED
from penstock.data.tokenizer import FileTokenizer
from penstock.models import sample
from penstock.runtime import Pipeline
from penstock.train.checks import SettingsError
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


def write(settings: Settings, tokenizer: Tokenizer, context: int, pipe: Pipeline) -> str:
    """Text that the model writes. Every rank draws the same."""
    if settings.sample == 0:
        return ""
    end = tokenizer.end_of_document
    replicas = settings.dp // settings.replicas_here  # each needs a part of a batch, if only the same

    def logits(tokens: Tensor) -> Tensor:
        parts = pipe.predict(tokens.repeat(replicas, 1))  # some models return logits among other things
        said = torch.cat([part["logits"] if isinstance(part, dict) else part for part in parts])
        return said[: len(tokens), :, : tokenizer.vocab_size]  # a model may know more words than its tokenizer

    drawn = sample(
        logits, torch.tensor([[end or 0]]), settings.sample, context, temperature=0.8, top_k=40, seed=settings.seed
    )
    written = drawn[0, 1:].tolist()
    if end in written:
        written = written[: written.index(end)]
    return tokenizer.decode(written)


SHARE = 0.15
"""Of ten tokens that are to be guessed, eight are masked, one is replaced by another, and one stays."""
MASKS = ("[MASK]", "<mask>")


def mask_token(tokenizer: Tokenizer, vocab_size: int, model: str) -> int:
    """The number of the token that replaces a masked one: the tokenizer's or, for bytes, the one behind them.

    Raises SettingsError if there is none.
    """
    if isinstance(tokenizer, FileTokenizer):
        found = next((number for word in MASKS if (number := tokenizer.number_of(word)) is not None), None)
        if found is None:
            raise SettingsError(
                f"{model} guesses masked tokens, and the tokenizer {tokenizer.name} has no {' or '.join(MASKS)}; "
                "give the --tokenizer that the model was made for"
            )
        return found
    if vocab_size <= ByteTokenizer.vocab_size:
        raise SettingsError(
            f"{model} guesses masked tokens, and its vocabulary of {vocab_size} has no number behind those of the "
            "256 bytes; give the --tokenizer that it was made for"
        )
    return ByteTokenizer.vocab_size


def masked(data: TaskData, mask: int, vocab_size: int, seed: int) -> TaskData:
    """Text with some tokens masked, which are the targets. What is masked depends only on the seed and the batch's
    number.
    """
    batches = StepBatches(lambda step: _masked(data.batches[step], mask, vocab_size, (seed, 0, step)))
    fixed = [_masked(each, mask, vocab_size, (seed, 1, number)) for number, each in enumerate(data.validation)]
    return replace(data, unit="nats a masked token of the validation text", batches=batches, validation=fixed)


def _masked(example: Example, mask: int, vocab_size: int, draws: tuple[int, ...]) -> Example:
    """One batch, masked by the random numbers that `draws` seeds."""
    draw = np.random.default_rng(draws)
    plain = example.inputs
    shape = tuple(plain.shape)
    guessed = torch.from_numpy(draw.random(shape) < SHARE)
    guessed[:, 0] |= ~guessed.any(1)  # at least one in each sample
    kind = torch.from_numpy(draw.random(shape))
    tokens = torch.where(guessed & (kind < 0.8), mask, plain)
    others = torch.from_numpy(draw.integers(0, vocab_size, shape)).to(plain.dtype)
    tokens = torch.where(guessed & (kind >= 0.9), others, tokens)
    return Example(tokens, plain.long().masked_fill(~guessed, IGNORED))
