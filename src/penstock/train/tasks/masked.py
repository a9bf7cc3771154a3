"""Text for a model that sees all tokens at once: some tokens are masked, and the model guesses them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from penstock.data import ByteTokenizer, Tokenizer
from penstock.data.masked import IGNORED
from penstock.data.tokenizer import FileTokenizer
from penstock.train.checks import SettingsError
from penstock.train.tasks.task import Example, StepBatches, TaskData

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
