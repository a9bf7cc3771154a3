"""Samples for a BERT: two parts of a text with some of their tokens masked, chosen by seed and sample number alone.

    [start] a a a a [between] b b b [between]      the second part follows the first, or comes from elsewhere
       0    0 0 0 0     0     1 1 1     1          segments

Of the tokens that are not special a share is to be guessed: of these eight in ten are masked, one is another token,
one stays (Devlin et al. 2019, arXiv 1810.04805).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.shuffle import mix, permuted
from penstock.data.tokens import DataError, Tokens

__all__ = ["MaskedSamples", "MaskedText"]

NUM_SPECIAL = 3
IGNORED = -100


class MaskedSamples(NamedTuple):
    """Samples of two parts with masked tokens.

    Attributes:
        tokens: int64[B, T], special tokens and masks included.
        segments: int64[B, T], 0 in the first part and 1 in the second.
        labels: int64[B, T], the tokens to be guessed, -100 elsewhere.
        follows: int64[B], 1 where the second part follows the first in the text.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> text = ps.data.MaskedText(np.arange(400) % 50, vocab_size=50, length=16)
        >>> made = text.samples([0, 1])
        >>> made.tokens.shape, made.follows.shape, bool((made.labels[made.labels >= 0] < 50).all())
        ((2, 16), (2,), True)
    """

    tokens: NDArray[np.int64]
    segments: NDArray[np.int64]
    labels: NDArray[np.int64]
    follows: NDArray[np.int64]


class MaskedText:
    """`samples(numbers)` for any sample numbers from 0 on, the same on every machine for the same tokens and seed.

    Args:
        tokens: a text.
        vocab_size: of the text; the special tokens (start, between, mask) are the three numbers after it.
        length: tokens per sample, special ones included.
        seed: decides what is drawn.
        share: share of the tokens that are to be guessed.

    Raises:
        DataError: samples too short for two parts, a text too short for them, a share that is not between 0 and 1.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> text = ps.data.MaskedText(np.arange(400) % 50, vocab_size=50, length=16, seed=1)
        >>> bool((text.samples([3]).tokens == text.samples([3]).tokens).all())
        True
    """

    def __init__(self, tokens: Tokens, vocab_size: int, length: int, seed: int = 0, share: float = 0.15) -> None:
        if length < NUM_SPECIAL + 2:
            raise DataError(f"context {length}: two parts and three special tokens need at least 5 tokens.")
        if not 0.0 < share < 1.0:
            raise DataError(f"a share of {share} of the tokens to be guessed; it must lie between 0 and 1.")
        self._second = (length - NUM_SPECIAL) // 2
        self._first = length - NUM_SPECIAL - self._second
        if tokens.size < self._first + 2 * self._second:
            raise DataError(
                f"a text of {tokens.size} tokens; samples of {length} need at least {self._first + 2 * self._second}."
            )
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.length = length
        self.seed = seed
        self.num_guessed = max(1, round(share * (length - NUM_SPECIAL)))

    @property
    def num_tokens(self) -> int:
        """The vocabulary with the special tokens: what a model for these samples needs."""
        return self.vocab_size + NUM_SPECIAL

    def samples(self, numbers: Iterable[int]) -> MaskedSamples:
        """The samples of these numbers. Raises DataError for a token outside the vocabulary."""
        made = [self._sample(number) for number in numbers]
        tokens, labels, follows = (np.stack(part) for part in zip(*made, strict=True))
        segments = np.zeros(self.length, np.int64)
        segments[self._first + 2 :] = 1
        return MaskedSamples(tokens, np.tile(segments, (len(made), 1)), labels, follows)

    def _sample(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], np.int64]:
        if number < 0:
            raise IndexError(f"sample {number}; samples count from 0")
        first, second = self._first, self._second
        size = int(self.tokens.size)
        start = mix(self.seed, number, 0) % (size - first - second + 1)
        follows = mix(self.seed, number, 1) % 2
        after = start + first
        if not follows:
            # Any place but the one that follows.
            other = mix(self.seed, number, 2) % (size - second)
            after = other + (other >= after)
        whole = np.empty(self.length, np.int64)
        whole[0], whole[first + 1], whole[-1] = self.vocab_size, self.vocab_size + 1, self.vocab_size + 1
        whole[1 : first + 1] = self.tokens[start : start + first]
        whole[first + 2 : -1] = self.tokens[after : after + second]
        plain = np.concatenate([np.arange(1, first + 1), np.arange(first + 2, self.length - 1)])
        if int(whole[plain].max()) >= self.vocab_size:
            raise DataError(
                f"token {int(whole[plain].max())} of the text is outside the vocabulary of "
                f"{self.vocab_size}. Give the tokenizer's own."
            )
        guessed = plain[permuted(np.arange(self.num_guessed), plain.size, self.seed, number, 3)]
        labels = np.full(self.length, IGNORED, np.int64)
        labels[guessed] = whole[guessed]
        for place in guessed.tolist():
            drawn = mix(self.seed, number, 4, place)
            if drawn % 10 < 8:
                whole[place] = self.vocab_size + 2
            elif drawn % 10 == 8:
                whole[place] = drawn // 10 % self.vocab_size
        return whole, labels, np.int64(follows)
