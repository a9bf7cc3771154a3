"""Shared memory that holds messages: one long, sparse mapping, of which rank and delegates use the same parts."""

from __future__ import annotations

import contextlib
import os
from mmap import MAP_SHARED, mmap

import torch
from torch import Tensor


class Memory:
    """Anonymous memory behind a descriptor. What was never written takes no pages.

    Args:
        span: bytes mapped.
    """

    def __init__(self, span: int) -> None:
        self.span = span
        self.descriptor = os.memfd_create("penstock-messages")
        try:
            os.ftruncate(self.descriptor, span)
            self._map = mmap(self.descriptor, span, flags=MAP_SHARED)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = 0

    def part(self, offset: int, num_bytes: int) -> Tensor:
        """A part of it, as bytes."""
        return self._whole.narrow(0, offset, num_bytes)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of a part."""
        return self._map[offset : offset + num_bytes]

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def pin(self, num_bytes: int) -> None:
        """Registers the first bytes with CUDA, once, so that copies from and to a GPU are asynchronous.

        Raises:
            RuntimeError: CUDA refuses.
        """
        size = min(num_bytes, self.span)
        code = torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), size, 0)
        torch.cuda.check_error(code)
        self._pinned = size

    def close(self) -> None:
        """Lets go of it; tensors that still look at a part keep that alive."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
            self._pinned = 0
        os.close(self.descriptor)
        del self._whole
        with contextlib.suppress(BufferError):
            self._map.close()
