"""The smallest integer type that holds a vocabulary: tokens on disk cost bytes, and byte tokens cost one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tokens", "token_dtype"]

Tokens = NDArray[np.integer[Any]]
"""A one-dimensional array of token numbers, of any integer type, possibly memory-mapped."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint8 up to 256 tokens, uint16 up to 65,536, int32 above: little-endian, as Megatron's files are."""
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; it must lie between 1 and 2**31")
    if vocab_size <= 2**8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")
