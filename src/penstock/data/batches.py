"""Batches chosen by the step number alone, so that a resumed run needs to remember nothing else.

The tokens are cut into windows; every epoch takes each window once, in an order of its own. A batch may span
the end of an epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.shuffle import mix, permuted
from penstock.data.tokens import DataError, Tokens, require_in_vocabulary

if TYPE_CHECKING:  # preparing data starts without torch
    import torch

__all__ = ["Batch", "Batches", "to_tensors", "validation_batches"]


class Batch(NamedTuple):
    """A batch of windows of a text. The targets are the inputs one token on.

    Attributes:
        inputs: int64[B, T].
        targets: int64[B, T].

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> batch = ps.data.Batches(np.arange(100) % 7, batch_size=2, context=8)[0]
        >>> batch.inputs.shape, bool((batch.inputs[:, 1:] == batch.targets[:, :-1]).all())
        ((2, 8), True)
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


class Batches:
    """`batches[step]` for any step from 0 on, the same on every machine for the same tokens and seed.

    Args:
        tokens: the text.
        batch_size: windows per batch.
        context: tokens per window.
        seed: decides the order of the windows.
        vocab_size: if given, a token outside the vocabulary is a `DataError` that names its position, rather than an
            index error deep in the model.

    Raises:
        DataError: a batch without samples, or tokens that do not fill one window of `context + 1`.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> batches = ps.data.Batches(np.arange(100) % 7, batch_size=2, context=8, seed=1)
        >>> bool((batches[5].inputs == batches[5].inputs).all()), batches[0].targets.shape
        (True, (2, 8))
    """

    def __init__(
        self, tokens: Tokens, batch_size: int, context: int, seed: int = 0, vocab_size: int | None = None
    ) -> None:
        if batch_size < 1:
            raise DataError(f"a batch of {batch_size} samples; it must have at least 1.")
        self.tokens = tokens
        self.batch_size = batch_size
        self.context = context
        self.seed = seed
        self.vocab_size = vocab_size
        self.num_windows = _num_windows(tokens, context)
        # Tokens left over by whole windows: each epoch begins somewhere else among them.
        self._spare = int(tokens.size) - 1 - self.num_windows * context

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step {step}; steps count from 0")
        samples = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
        starts = np.empty_like(samples)
        for epoch in range(int(samples[0]) // self.num_windows, int(samples[-1]) // self.num_windows + 1):
            here = samples // self.num_windows == epoch
            window = permuted(samples[here] % self.num_windows, self.num_windows, self.seed, epoch)
            starts[here] = window * self.context + mix(self.seed, epoch, -1) % (self._spare + 1)
        return _gather(self.tokens, starts, self.context, self.vocab_size)


def validation_batches(
    tokens: Tokens, batch_size: int, context: int, num_batches: int, vocab_size: int | None = None
) -> list[Batch]:
    """Up to `num_batches` fixed batches of windows spread evenly over `tokens`, each of the full size.

    There are fewer if the tokens do not fill that many, but at least one; its windows then overlap if they must.

    Args:
        tokens: the text.
        batch_size: windows per batch.
        context: tokens per window.
        num_batches: the most batches.
        vocab_size: if given, a token outside it is a `DataError`.

    Raises:
        DataError: the tokens do not fill one window.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> batches = ps.data.validation_batches(np.arange(100) % 7, batch_size=2, context=8, num_batches=3)
        >>> len(batches), batches[0].inputs.shape
        (3, (2, 8))
    """
    if batch_size < 1 or num_batches < 1:
        raise DataError(f"{num_batches} validation batches of {batch_size} samples; both must be at least 1.")
    num_windows = _num_windows(tokens, context)
    num_batches = max(1, min(num_batches, num_windows // batch_size))
    last = int(tokens.size) - 1 - context
    starts = np.linspace(0, last, num_batches * batch_size).astype(np.int64)
    return [_gather(tokens, rows, context, vocab_size) for rows in starts.reshape(num_batches, batch_size)]


def to_tensors(batch: Batch, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as int64[B, T] tensors, inputs and targets; on the CPU they share the batch's memory.

    Args:
        batch: the batch.
        device: where the tensors lie.

    Examples:
        >>> import penstock as ps
        >>> import numpy as np
        >>> inputs, targets = ps.data.to_tensors(ps.data.Batches(np.arange(100) % 7, batch_size=2, context=8)[0])
        >>> inputs.shape, inputs.dtype
        (torch.Size([2, 8]), torch.int64)
    """
    import torch

    return torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.targets).to(device)


def _num_windows(tokens: Tokens, context: int) -> int:
    if context < 1:
        raise DataError(f"a context of {context} tokens; it must have at least 1.")
    num_windows = (int(tokens.size) - 1) // context
    if num_windows < 1:
        raise DataError(
            f"{tokens.size} tokens of data; a window of context {context} needs {context + 1}. "
            "Use more data or a smaller context."
        )
    return num_windows


def _gather(tokens: Tokens, starts: NDArray[np.int64], context: int, vocab_size: int | None) -> Batch:
    rows = np.empty((len(starts), context + 1), dtype=np.int64)
    for row, start in zip(rows, starts):
        row[:] = tokens[start : start + context + 1]
        require_in_vocabulary(row, vocab_size, int(start))
    return Batch(inputs=np.ascontiguousarray(rows[:, :-1]), targets=np.ascontiguousarray(rows[:, 1:]))
