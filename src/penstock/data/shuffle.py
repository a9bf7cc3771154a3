"""A permutation of any length in which one place can be asked for without making the rest.

Training resumes at any step, on data of any size, so the order of windows is not a list but a function: a
Feistel network, a keyed one-to-one map of the numbers below 4**h, applied again to whatever lands outside the
length wanted. It is ours down to the last bit, and so stays the same from one numpy to the next, which numpy
does not promise of its own shuffles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix", "permuted", "uniform"]

ROUNDS = 6
WORD = (1 << 64) - 1


def mix(*words: int) -> int:
    """One well-mixed 64-bit number from several whole numbers of any size or sign."""
    state = 0
    for word in words:
        # The same steps as `_scramble`, in Python's whole numbers: for one number, numpy is the slower.
        state = (state + word + 0x9E3779B97F4A7C15) & WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
        state ^= state >> 31
    return state


def permuted(places: NDArray[np.int64], length: int, *key: int) -> NDArray[np.int64]:
    """The numbers at `places` of a permutation of `range(length)`, which `key` chooses."""
    if length < 1:
        raise ValueError(f"a permutation of {length} numbers; at least 1")
    half = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(*key, turn)) for turn in range(ROUNDS)]
    numbers = np.asarray(places).astype(np.uint64)
    if numbers.size and int(numbers.max()) >= length:
        raise ValueError(f"place {int(numbers.max())} of a permutation of {length} numbers")
    outside = np.ones(numbers.shape, dtype=bool)
    while outside.any():
        numbers[outside] = _feistel(numbers[outside], half, mask, keys)
        outside = numbers >= length
    return numbers.astype(np.int64)


def uniform(count: int, *key: int) -> NDArray[np.float32]:
    """`count` numbers from 0 up to 1, which `key` chooses."""
    words = _scramble(np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mix(*key)))
    # The 24 bits that a float32 holds exactly, so that 1 is never reached by rounding.
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _feistel(
    numbers: NDArray[np.uint64], half: np.uint64, mask: np.uint64, keys: list[np.uint64]
) -> NDArray[np.uint64]:
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right + key) & mask)
    return (left << half) | right


def _scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function; sums and products wrap at 64 bits, as numpy's arrays do."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
