"""Text for a model that sees all tokens at once: some tokens are masked, and the model guesses them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.data import ByteTokenizer, Tokenizer
from penstock.data.masked import IGNORED
from penstock.data.tokenizer import FileTokenizer
from penstock.runtime import Pipeline
from penstock.train.checks import SettingsError
from penstock.train.tasks.task import Draws, Example, ModelQuality, TaskData, redrawn

SHARE = 0.15
"""Of ten tokens that are to be guessed, eight are masked, one is replaced by another, and one stays."""
MASKS = ("[MASK]", "<mask>")
COUNTED = 1 << 26
"""Tokens of the text whose frequencies are counted."""


def mask_of(tokenizer: FileTokenizer) -> int | None:
    """The number of a tokenizer's own mask; None if it has none."""
    return next((number for word in MASKS if (number := tokenizer.number_of(word)) is not None), None)


def mask_token(tokenizer: Tokenizer, vocab_size: int, model: str) -> int:
    """The number of the token that replaces a masked one: the tokenizer's or, for bytes, the one behind them.

    Raises SettingsError if there is none.
    """
    if isinstance(tokenizer, FileTokenizer):
        found = mask_of(tokenizer)
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
    """Text with some tokens masked, which are the targets."""
    return redrawn(data, lambda example, draws: _masked(example, mask, vocab_size, draws), seed)


def _masked(example: Example, mask: int, vocab_size: int, draws: Draws) -> Example:
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


def judge_masked(
    pipe: Pipeline,
    data: TaskData,
    loss: float,
    unit: str = "nats a masked token of the validation text",
    of_tokens: Callable[[Any], torch.Tensor] = lambda value: value,
    coin: float = 0.0,
) -> ModelQuality:
    """Compares the model with guessing each masked token by its frequency in the text. Every rank must call it.

    Args:
        unit: of the loss, in words. of_tokens: selects from targets, and from outputs, what is about tokens.
        coin: nats of the model's other guess, with two equally likely answers; 0 if it makes no other guess.
    """
    assert data.corpus is not None
    counts = np.bincount(data.corpus.train[:COUNTED], minlength=data.corpus.vocab_size)
    return judge_guesses(pipe, data, loss, counts, unit, "of the masked tokens guessed", of_tokens, coin)


def judge_guesses(
    pipe: Pipeline,
    data: TaskData,
    loss: float,
    counts: Any,
    unit: str,
    right: str,
    of_tokens: Callable[[Any], torch.Tensor] = lambda value: value,
    coin: float = 0.0,
) -> ModelQuality:
    """Compares the model with guessing each token by how often it was counted. Every rank must call it.

    Args:
        counts: of each token, in the training data. right: in words, which tokens the model guesses.
        unit, of_tokens, coin: as in `judge_masked`.
    """
    shares = (counts + 1.0) / (counts + 1.0).sum()
    wanted = torch.cat([of_tokens(example.targets).flatten() for example in data.validation])
    labels = wanted[wanted != IGNORED].numpy()
    unigram, chance = float(-np.log(shares[labels]).mean()), float((labels == shares.argmax()).mean())
    first = next(iter(data.validation))
    said = torch.cat([of_tokens(part).argmax(-1) for part in pipe.predict(first.inputs)])  # B, T
    targets = of_tokens(first.targets)
    asked = targets != IGNORED
    accuracy = float((said[asked] == targets[asked]).float().mean())
    bar = unigram + coin
    return ModelQuality(
        unit=unit,
        beside=(
            f"{'below' if math.isfinite(loss) and loss < bar else 'not below'} {bar:.3f}, what frequencies of tokens "
            f"{'and a coin ' if coin else ''}give",
            f"{accuracy:.1%} {right}; {chance:.1%} by always saying the commonest",
        ),
        unigram=unigram,
        accuracy=accuracy,
        chance=chance,
    )
