"""Weights of a model of the user's own in a file, so that a rank need not hold the whole model in memory.

A user's constructor may do anything: draw, copy, initialise again at its end, read what it has drawn. So it runs
unchanged, and draws what it would draw. Only the place of its parameters and buffers changes: when a module gets one
that is large enough, it moves into a file that is mapped into memory. The system keeps the file's pages. While the
model is made, tried and cut, the process releases them whenever a few tens of megabytes were used. Then a rank takes
the weights of its own stages back into memory.

    the constructor, unchanged      the model on a batch, unchanged       a rank's own stages
    p0 p1 p2 p3 ... drawn      ->   p0 p1 p2 p3 ... read             ->   p2 p3 in memory
    resident: 32 MiB of them        resident: 32 MiB, and a layer         and the rest in the file

The file has no name, and is gone with the process. It is in TMPDIR, or in /var/tmp, which is not in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

SMALLEST = 1 << 16
"""Bytes of the smallest tensor that moves into the file."""
MOST_RESIDENT = 1 << 25
"""Bytes that are used before the process releases the file's pages again."""
ARENA = 1 << 26
"""Bytes of the file that are mapped at once; more for a larger tensor."""
ALIGNED = 64
"""Tensors begin at multiples of this number of bytes, as torch's own do."""
IS_POSSIBLE = sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")
"""On other systems, a process that releases mapped pages might lose their content."""


class PagedWeights:
    """A file that holds the weights of a model which is being made, tried and cut.

    Args:
        most_resident: bytes of them that are used before their pages are released.
    """

    def __init__(self, most_resident: int = MOST_RESIDENT) -> None:
        self._most = most_resident
        self._file: int | None = None
        self._size = 0
        self._arenas: list[tuple[mmap.mmap, int]] = []
        self._begins: list[tuple[int, int]] = []
        self._used = 0
        self._is_full = not IS_POSSIBLE

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self._size

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Inside, what modules get moves into the file."""
        with contextlib.ExitStack() as stack:
            for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
                stack.callback(register(self._registered).remove)
            stack.enter_context(_FileUseWatcher(self))
            yield
        self.let_go()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, pages are released while the model runs."""
        handle = register_module_forward_hook(self._called)
        try:
            yield
        finally:
            handle.remove()
            self.let_go()

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Brings these into memory, to be trained there."""
        for tensor in tensors:
            if self.holds(tensor):
                tensor.data = tensor.data.clone()
                self.count(tensor.nbytes)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the file."""
        if not self._begins or type(tensor) not in (Tensor, nn.Parameter) or is_lazy(tensor):
            return False
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return False
        where = tensor.untyped_storage().data_ptr()
        place = bisect_right(self._begins, (where, sys.maxsize)) - 1
        return place >= 0 and where < self._begins[place][0] + self._begins[place][1]

    def move(self, tensor: Tensor) -> None:
        """Moves a tensor into the file if it is large enough and nothing else uses its memory."""
        if self._is_full or type(tensor) not in (Tensor, nn.Parameter) or is_lazy(tensor) or tensor.is_meta:
            return
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.nbytes < SMALLEST:
            return
        storage = tensor.untyped_storage()
        if self.holds(tensor) or storage.nbytes() != tensor.nbytes or not tensor.is_contiguous():
            return
        if torch._C._storage_Use_Count(storage._cdata) > 2:  # another tensor over it would be left behind
            return
        room = self._room(tensor)
        if room is not None:
            room.copy_(tensor.detach())
            tensor.data = room

    def count(self, num_bytes: int) -> None:
        """Counts that so many bytes of the file were used."""
        self._used += num_bytes
        if self._used > self._most:
            self.let_go()

    def let_go(self) -> None:
        """Releases the pages of this process. Their content stays in the file."""
        self._used = 0
        for arena, _ in self._arenas:
            arena.madvise(mmap.MADV_DONTNEED)
        if self._arenas:
            _trim()

    def _registered(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            with torch._C.DisableTorchFunction():
                self.move(tensor)
                self.count(tensor.nbytes if self.holds(tensor) else 0)

    def _called(self, module: nn.Module, *_: Any) -> None:
        own = (*module._parameters.values(), *module._buffers.values())
        self.count(sum(tensor.nbytes for tensor in own if tensor is not None and self.holds(tensor)))

    def _room(self, like: Tensor) -> Tensor | None:
        """An empty tensor in the file; None if the disk is full."""
        size = like.nbytes
        arena, taken = self._arenas[-1] if self._arenas else (None, 0)
        if arena is None or taken + size > len(arena):
            try:
                arena, taken = self._new_arena(max(ARENA, size)), 0
            except OSError:
                self._is_full = True
                return None
        end = (taken + size + ALIGNED - 1) // ALIGNED * ALIGNED
        self._arenas[-1] = (arena, end)
        flat = torch.frombuffer(arena, dtype=like.dtype, count=like.numel(), offset=taken)
        return flat.view(like.shape)

    def _new_arena(self, size: int) -> mmap.mmap:
        """Raises OSError if the disk has no room: to write to a page without room would end the process."""
        if self._file is None:
            folder = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
            self._file, path = tempfile.mkstemp(prefix="penstock-", dir=folder)
            os.unlink(path)
        size = (size + mmap.ALLOCATIONGRANULARITY - 1) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        os.posix_fallocate(self._file, self._size, size)
        arena = mmap.mmap(self._file, size, offset=self._size)
        self._size += size
        self._arenas.append((arena, 0))
        begin = torch.frombuffer(arena, dtype=torch.uint8).data_ptr()
        self._begins = sorted([*self._begins, (begin, size)])
        return arena


def _trim() -> None:
    """Makes the C library give back the memory of tensors that have moved, which it would keep for later."""
    with contextlib.suppress(AttributeError, OSError):  # which glibc has
        ctypes.CDLL(None).malloc_trim(0)


class _FileUseWatcher(TorchFunctionMode):
    """Counts how much of the file is used while a constructor runs, and moves copies into it, too: `copy.deepcopy` of
    a layer, by which some modules make all of theirs, registers nothing.
    """

    def __init__(self, weights: PagedWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            if func is Tensor.clone and isinstance(result, Tensor):
                self._weights.move(result)
            for value in (*args, result):
                if isinstance(value, Tensor) and self._weights.holds(value):
                    self._weights.count(value.nbytes)
        return result
