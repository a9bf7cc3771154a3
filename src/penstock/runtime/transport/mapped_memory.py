"""Memory that several processes map, each by a descriptor of it. What was never written takes no pages."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_SHARED, mmap
from typing import Self

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure

_PORTABLE = 1  # known to all contexts, whichever thread registers it


class MappedMemory:
    """Maps what another process made; `make` makes some.

    Args:
        descriptor: may be closed afterwards.
        span: bytes mapped.

    Attributes:
        descriptor: for others to map it by, where it was made here.
    """

    def __init__(self, descriptor: int, span: int) -> None:
        self.descriptor, self.span = -1, span
        self.map = mmap(descriptor, span, flags=MAP_SHARED)
        self._whole = torch.frombuffer(self.map, dtype=torch.uint8)
        self._pinned = False

    @classmethod
    def make(cls, name: str, span: int) -> Self:
        """New memory, all zeros. Raises OSError where the system has none."""
        descriptor = os.memfd_create(name)
        try:
            os.ftruncate(descriptor, span)
            made = cls(descriptor, span)
        except BaseException:
            os.close(descriptor)
            raise
        made.descriptor = descriptor
        return made

    def part(self, offset: int, num_bytes: int) -> Tensor:
        """A part of it, as bytes."""
        return self._whole.narrow(0, offset, num_bytes)

    def lend(self, offset: int, num_bytes: int, returned: Callable[[], None]) -> Tensor:
        """A part of it, as bytes, whose last user gives it back: `returned` is called then, from any thread."""
        view = memoryview(self.map)[offset : offset + num_bytes]
        weakref.finalize(view, returned).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

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
        """Lets go of it; what tensors still look at stays mapped for them."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
            self._pinned = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
        del self._whole
        with suppress(BufferError):
            self.map.close()
