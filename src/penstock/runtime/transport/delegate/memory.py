"""Shared memory that holds messages: one long, sparse mapping, of which rank and delegates use the same parts."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from mmap import MAP_SHARED, mmap

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure

_PORTABLE = 1  # known to all contexts, whichever thread registers it


class SharedMemory:
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
        self._pinned = False

    def part(self, offset: int, num_bytes: int) -> Tensor:
        """A part of it, as bytes."""
        return self._whole.narrow(0, offset, num_bytes)

    def lend(self, offset: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        """A part of it, as bytes, whose last user gives it back: `returned` is called then, from any thread."""
        view = memoryview(self._map)[offset : offset + num_bytes]
        weakref.finalize(view, returned).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of a part."""
        return self._map[offset : offset + num_bytes]

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def pin(self) -> None:
        """Registers it with CUDA, once, so that copies from and to a GPU are asynchronous. It takes all its pages.

        Raises:
            RuntimeFailure: CUDA refuses.
        """
        try:
            code = torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), self.span, _PORTABLE)
            torch.cuda.check_error(code)
        except RuntimeError as error:
            raise RuntimeFailure(
                f"{self.span} bytes of host memory for delegates can't be pinned ({error}); give host_memory= less"
            ) from None
        self._pinned = True

    def close(self) -> None:
        """Lets go of it; tensors that still look at a part keep that alive."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
            self._pinned = False
        os.close(self.descriptor)
        del self._whole
        with contextlib.suppress(BufferError):
            self._map.close()
