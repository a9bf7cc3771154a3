"""Whole documents as sequences to train on, dealt out to steps by the step number alone.

    documents   aaaaaaaaaa| bbb| cccccc|           context 4
    sequences   aaaa aaaa a  bb  cccc c            a sequence's targets are its tokens one on

A document longer than the context is cut into pieces of it, and nothing else is: no sequence runs from one document
into the next. Every epoch has each sequence once, in an order of its own. A step has the sequences that begin in its
share of that row of tokens, so that steps have as many tokens in the mean, and a resumed run remembers nothing.

Several sequences lie in one row of a microbatch, one after the other; `lengths` says where each ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.shuffle import permuted
from penstock.data.tokens import DataError, Tokens, require_in_vocabulary

__all__ = ["PackedRow", "Sequences", "document_lengths"]


class PackedRow(NamedTuple):
    """Sequences one after the other in one row.

    Attributes:
        inputs: int64[1, T].
        targets: int64[1, T].
        lengths: int64[S], the tokens of each sequence.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> sequences = ps.data.Sequences(np.arange(40) % 9, starts=np.array([0, 15, 22]), context=16, step_tokens=20)
        >>> row = sequences.row([0, 1])
        >>> row.inputs.shape, row.lengths.tolist()
        ((1, 20), [14, 6])
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    lengths: NDArray[np.int64]


class Sequences:
    """The sequences of a row of documents, numbered as they lie there.

    Args:
        tokens: documents in a row.
        starts: where each document begins, ascending.
        context: most tokens of a sequence.
        step_tokens: tokens per step, on average.
        seed: decides the order of the sequences.
        vocab_size: if given, a token outside it is a `DataError`.

    Attributes:
        lengths: tokens of each sequence, int64[N].
        num_tokens: tokens of all sequences.

    Raises:
        DataError: no document of two tokens, or steps shorter than a sequence may be.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> sequences = ps.data.Sequences(np.arange(40) % 9, starts=np.array([0, 15, 22]), context=16, step_tokens=20)
        >>> sequences.lengths.tolist(), sequences.num_tokens
        ([14, 6, 16, 1], 37)
    """

    def __init__(
        self,
        tokens: Tokens,
        starts: NDArray[np.int64],
        context: int,
        step_tokens: int,
        seed: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        if context < 1:
            raise DataError(f"a context of {context} tokens; it must have at least 1.")
        if step_tokens < context:
            raise DataError(f"{step_tokens} tokens a step; it must have at least a context's, {context}.")
        usable = np.maximum(document_lengths(tokens.size, starts) - 1, 0)  # a last token has no target
        pieces = -(-usable // context)
        if not pieces.sum():
            raise DataError("no document has two tokens; give text to train on.")
        document = np.repeat(np.arange(len(starts)), pieces)
        place = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.tokens, self.context, self.step_tokens, self.seed = tokens, context, step_tokens, seed
        self.vocab_size = vocab_size
        self.lengths: NDArray[np.int64] = np.minimum(usable[document] - place * context, context)
        self.num_tokens = int(self.lengths.sum())
        self._first = np.asarray(starts, np.int64)[document] + place * context
        self._epoch = lru_cache(maxsize=2)(self._epoch_order)

    def __len__(self) -> int:
        return len(self.lengths)

    def of_step(self, step: int) -> NDArray[np.int64]:
        """The numbers of a step's sequences, in the order in which they arrive."""
        if step < 0:
            raise IndexError(f"step {step}; steps count from 0")
        begin, end = step * self.step_tokens, (step + 1) * self.step_tokens
        found = []
        for epoch in range(begin // self.num_tokens, (end - 1) // self.num_tokens + 1):
            order, starts = self._epoch(epoch)
            offset = epoch * self.num_tokens
            low, high = np.searchsorted(starts, [begin - offset, end - offset])
            found.append(order[low:high])
        return np.concatenate(found)

    def _epoch_order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sequences of an epoch, and where in its row of tokens each begins."""
        order = permuted(np.arange(len(self)), len(self), self.seed, epoch)
        ends = np.cumsum(self.lengths[order])
        return order, ends - self.lengths[order]

    def row(self, numbers: Sequence[int] | NDArray[np.int64]) -> PackedRow:
        """Sequences in one row. Raises DataError for a token outside the vocabulary."""
        parts = []
        for number in numbers:
            start = int(self._first[number])
            parts.append(self.tokens[start : start + self.lengths[number] + 1].astype(np.int64))
            require_in_vocabulary(parts[-1], self.vocab_size, start)
        inputs = np.concatenate([part[:-1] for part in parts])
        targets = np.concatenate([part[1:] for part in parts])
        return PackedRow(inputs[None], targets[None], self.lengths[np.asarray(numbers)])


def document_lengths(num_tokens: int, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each document, int64[N].

    Args:
        num_tokens: tokens of all documents.
        starts: where each document begins, int64[N], ascending.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> ps.data.document_lengths(40, np.array([0, 15, 22])).tolist()
        [15, 7, 18]
    """
    return np.diff(np.append(np.asarray(starts, np.int64), num_tokens))
