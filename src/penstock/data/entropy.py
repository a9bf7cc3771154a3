"""What counting single tokens and pairs predicts of the validation text: a trained model must do better.

A count model fitted on the training tokens is scored on the validation tokens, the same ones the network is
scored on. The entropy of the counts themselves would be the wrong bar: with a large vocabulary most pairs occur
once, the count model merely remembers them, and what it claims holds for no other text. The pair model is
Witten-Bell's, which has nothing to tune:

    p(b | a) = (count(a, b) + followers(a) * p(b)) / (count(a) + followers(a))

where followers(a) is how many different tokens came after `a`, and p(b) is the single-token model with one
count added to every token. With byte tokens, whose pairs are all counted often, the two bars agree closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.data.dtype import Tokens
from penstock.data.errors import DataError

__all__ = ["Entropies", "entropies"]

DENSE_VOCAB = 1024
CHUNK = 1 << 19
"""Tokens that are counted at once. Every rank counts beside its weights, and each of these takes some 30 bytes."""


@dataclass(frozen=True, slots=True)
class Entropies:
    """How well counts alone predict a text, in nats per token.

    Attributes:
        unigram: cross-entropy of the validation tokens under the counts of single tokens.
        bigram: cross-entropy of the validation tokens under the counts of pairs.
        train_unigram: entropy of the training text's single tokens.
        train_bigram: entropy of the training text's tokens, given the one before.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> found = ps.data.entropies(np.arange(100) % 4, np.arange(20) % 4, vocab_size=4)
        >>> found.bigram < found.unigram
        True
    """

    unigram: float
    bigram: float
    train_unigram: float
    train_bigram: float

    def beaten_by(self, loss: float) -> bool:
        """Whether a validation loss in nats a token is better than the pair model's."""
        return loss < self.bigram


def entropies(train: Tokens, validation: Tokens, vocab_size: int, max_tokens: int = 1 << 26) -> Entropies:
    """Unigram and bigram cross-entropy of a text under the counts of another.

    Args:
        train: the tokens that are counted.
        validation: the tokens that are predicted.
        vocab_size: how many different tokens there are.
        max_tokens: the first so many of `train` are counted.

    Raises:
        DataError: fewer than two tokens on either side, or a token outside the vocabulary.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> found = ps.data.entropies(np.arange(100) % 4, np.arange(20) % 4, vocab_size=4)
        >>> round(found.unigram, 2)
        1.39
    """
    train, validation = train[:max_tokens], validation[:max_tokens]
    for name, tokens in (("training", train), ("validation", validation)):
        if tokens.size < 2:
            raise DataError(f"{tokens.size} {name} tokens; the entropy of pairs needs at least 2. Use more data.")
    singles = _counts(train, vocab_size)
    single = (singles + 1) / (singles.sum() + vocab_size)
    codes, counts = _pair_counts(train, vocab_size)
    after = np.zeros(vocab_size, dtype=np.int64)
    np.add.at(after, codes // vocab_size, counts)
    followers = np.bincount(codes // vocab_size, minlength=vocab_size)

    seen = _counts(validation, vocab_size)
    pairs, weights = _pair_counts(validation, vocab_size)
    first, second = pairs // vocab_size, pairs % vocab_size
    place = np.minimum(np.searchsorted(codes, pairs), len(codes) - 1)
    joint = np.where(codes[place] == pairs, counts[place], 0)
    above, below = joint + followers[first] * single[second], after[first] + followers[first]
    pair = np.where(below > 0, above / np.maximum(below, 1), single[second])

    return Entropies(
        unigram=_nats(seen, single),
        bigram=_nats(weights, pair),
        train_unigram=_nats(singles, singles / singles.sum()),
        train_bigram=_nats(counts, counts / after[codes // vocab_size]),
    )


def _nats(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    some = counts > 0
    return float(-(counts[some] * np.log(probabilities[some])).sum() / counts.sum())


def _counts(tokens: Tokens, vocab_size: int) -> NDArray[np.int64]:
    total = np.zeros(vocab_size, dtype=np.int64)
    for begin in range(0, tokens.size, CHUNK):
        part = tokens[begin : begin + CHUNK]
        if part.min() < 0 or part.max() >= vocab_size:
            wrong = part.min() if part.min() < 0 else part.max()
            raise DataError(
                f"token {wrong} in the data, outside the vocabulary of {vocab_size}. "
                "Give the tokenizer the data was prepared with."
            )
        total += np.bincount(part, minlength=vocab_size)
    return total


def _pair_counts(tokens: Tokens, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted codes `first * vocab_size + second` of the pairs that occur, and how often each does."""
    if vocab_size <= DENSE_VOCAB:
        total = np.zeros(vocab_size * vocab_size, dtype=np.int64)
        for begin in range(0, tokens.size - 1, CHUNK):
            total += np.bincount(_codes(tokens, begin, vocab_size), minlength=total.size)
        codes = np.flatnonzero(total)
        return codes, total[codes]
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for begin in range(0, tokens.size - 1, CHUNK):
        parts.append(np.unique(_codes(tokens, begin, vocab_size), return_counts=True))
        while len(parts) > 1 and 2 * len(parts[-1][0]) > len(parts[-2][0]):  # few are kept, each merged seldom
            parts[-2:] = [_merged(parts[-2:])]
    return _merged(parts)


def _merged(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    codes, where = np.unique(np.concatenate([codes for codes, _ in parts]), return_inverse=True)
    counts = np.zeros(codes.size, dtype=np.int64)
    np.add.at(counts, where, np.concatenate([counts for _, counts in parts]))
    return codes, counts


def _codes(tokens: Tokens, begin: int, vocab_size: int) -> NDArray[np.int64]:
    part = tokens[begin : begin + CHUNK + 1].astype(np.int64)
    return part[:-1] * vocab_size + part[1:]
