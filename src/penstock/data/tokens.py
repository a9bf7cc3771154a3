"""Tokens as arrays, the types that hold them, and `DataError`, the error for wrong data.

Tokens on disk take as few bytes as the vocabulary allows: a byte token takes one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataError", "Tokens", "require_in_vocabulary", "token_dtype"]

Tokens = NDArray[np.integer[Any]]
"""A one-dimensional array of token numbers, of any integer type, possibly memory-mapped."""


class DataError(ValueError):
    """Data that cannot be used: one or two lines that say what was given, the rule, and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.data.open_corpus("no-such-file.txt")
        ... except ps.data.DataError as error:
        ...     print("no-such-file.txt" in str(error))
        True
    """


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint8 up to 256 tokens, uint16 up to 65,536, int32 above: little-endian, as Megatron's files are."""
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; it must lie between 1 and 2**31")
    if vocab_size <= 2**8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")


def require_in_vocabulary(tokens: Tokens, vocab_size: int | None, start: int) -> None:
    """Raises DataError for a token outside the vocabulary, with its position in the data.

    Args:
        tokens: some tokens of the data, in a row.
        vocab_size: the size of the vocabulary; None if only negative tokens are wrong.
        start: the position of the first of these tokens.
    """
    limit = vocab_size if vocab_size is not None else np.iinfo(np.int64).max
    if int(tokens.min()) >= 0 and int(tokens.max()) < limit:
        return
    place = int(np.argmax((tokens < 0) | (tokens >= limit)))
    raise DataError(
        f"token {tokens[place]} at position {start + place} of the data, outside the vocabulary of {limit}. "
        "Give the tokenizer the data was prepared with."
    )
