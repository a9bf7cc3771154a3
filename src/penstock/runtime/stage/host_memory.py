"""Activations in host memory. OFFLOAD moves what a forward saved for its backward there, and RELOAD moves it back.

    F         autograd asks where to put what it saves: into slots that are known here
    OFFLOAD   the memory of the slots is copied to host memory, and the slots release it
    RELOAD    it is copied back, to the bit and in the same layout, before the backward asks for it

On a GPU, the copies use pinned memory and run on a stream of their own. On a CPU they are real copies too, so that
the memory they would free can be counted. Some tensors stay where they are: parameters and buffers; the stage's
inputs and outputs, because others hold them too; small parts of larger tensors; and tensors without plain memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.storage import storage_of

_LEAST_COVERED = 0.5
"""The share of a tensor's memory that must be saved for all of it to be moved."""


class SavedSlot:
    """One tensor that autograd saved; None while it is in host memory.

    Attributes:
        version: of the tensor when it was saved.
        layout: how it lies in its memory: its type, offset, size and strides.
    """

    __slots__ = ("layout", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version
        self.layout: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None

    def get(self) -> Tensor:
        """The tensor, for autograd.

        Raises:
            RuntimeFailure: it is in host memory, or was changed in place since it was saved.
        """
        if self.tensor is None:
            raise RuntimeFailure(
                "a backward asked for what lies in host memory: its RELOAD has not ended; ps.check(schedule) says "
                "whether it comes before the backward"
            )
        if self.tensor._version != self.version:
            raise RuntimeFailure(
                f"a tensor of shape {tuple(self.tensor.shape)} that a backward needs was changed in place after its "
                f"forward had saved it: it is at version {self.tensor._version}, not {self.version}; change a copy"
            )
        return self.tensor

    def leave(self) -> None:
        """Lets go of the tensor, and remembers its layout."""
        tensor = self.get()
        self.layout = tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        self.tensor = None

    def come_back(self, memory: Tensor) -> None:
        """Makes the tensor again, in this memory."""
        assert self.layout is not None
        dtype, *rest = self.layout
        self.tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), *rest)
        self.version = self.tensor._version


class HostMemory:
    """The host memory of a process's ranks, for what their stages send there.

    Attributes:
        num_bytes: there now. peak: most at once in this step, or the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = self.peak = 0
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Starts a step, whatever a broken one left."""
        self.num_bytes = self.peak = 0

    def take(self, num_bytes: int) -> Tensor:
        """So many bytes of it; torch keeps pinned memory that was used before."""
        with self._lock:
            self.num_bytes += num_bytes
            self.peak = max(self.peak, self.num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes

    def copies(self, pairs: Iterable[tuple[Tensor, Tensor]], then: Callable[[], None]) -> HostCopy | None:
        """Copies sources to targets, each (target, source), then calls `then`. Returns what to wait for; None where
        all is done."""
        if self._device.type != "cuda":
            for target, source in pairs:
                target.copy_(source)
            then()
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return HostCopy(event, then)


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor on a device; itself, where it lies there.

    From host memory to a GPU it is copied behind what the GPU runs, by way of pinned memory, as the host would have
    to wait for a copy from any other.
    """
    if device.type != "cuda" or tensor.is_cuda or tensor.requires_grad or not tensor.is_contiguous():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(device: torch.device, payload: Payload) -> Payload:
    """A payload whose tensors lie on a device; the same one where all of them do."""
    if all(leaf is None or leaf.device == device for leaf in payload.leaves):
        return payload
    leaves = [None if leaf is None else copied_to(device, leaf) for leaf in payload.leaves]
    return Payload(leaves, payload.skeleton, payload.needs_grad)


class HostCopy:
    """Copies under way on a GPU's stream."""

    def __init__(self, event: Any, then: Callable[[], None]) -> None:
        self._event, self._then = event, then

    def wait(self) -> None:
        self._event.synchronize()
        self._then()


class SavedTensors:
    """What the forward of one microbatch of a stage saved for its backward."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._slots: list[SavedSlot] = []
        self._away: list[tuple[Tensor, list[SavedSlot], torch.device]] = []
        self._staying: Collection[int] = ()

    def recording(self) -> AbstractContextManager[Any]:
        """Around the forward."""
        return saved_tensors_hooks(self._pack, SavedSlot.get)

    def close(self, own: Collection[int], given: Iterable[Tensor]) -> None:
        """After the forward.

        Args:
            own: addresses of the memory of the stage's parameters and buffers. given: what it was given, and gave.
        """
        self._staying = {*own, *map(storage_of, given)}

    def _pack(self, tensor: Tensor) -> SavedSlot:
        # A view that knows nothing of the graph; leaves as they are, since some functions ask which one they get.
        slot = SavedSlot(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)
        self._slots.append(slot)
        return slot

    def offload(self) -> HostCopy | None:
        """Sends away what can be; returns what to wait for, None where all is there."""
        by_memory: dict[int, list[SavedSlot]] = {}
        for slot in self._slots:
            tensor = slot.get()
            if not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized):
                by_memory.setdefault(storage_of(tensor), []).append(slot)
        self._slots.clear()
        pairs = []
        for address, slots in by_memory.items():
            if not address or address in self._staying:  # no plain memory, or memory that others hold too
                continue
            tensors = [slot.get() for slot in slots]
            memory, device = tensors[0].untyped_storage(), tensors[0].device
            # Tensors that lie alike count once.
            lying = {(t.dtype, t.storage_offset(), t.size(), t.stride()): t.nbytes for t in tensors}
            if sum(lying.values()) < _LEAST_COVERED * memory.nbytes():
                continue
            source = torch.empty(0, dtype=torch.uint8, device=device).set_(memory)
            target = self._host.take(memory.nbytes())
            pairs.append((target, source))
            self._away.append((target, slots, device))

        def let_go() -> None:
            pairs.clear()  # of the sources too
            for _, slots, _ in self._away:
                for slot in slots:
                    slot.leave()

        return self._host.copies(pairs, let_go)

    def reload(self) -> HostCopy | None:
        """Brings back what was sent away; returns what to wait for, None where all is back."""
        pairs = []
        for taken, slots, device in self._away:
            memory = torch.empty(taken.numel(), dtype=torch.uint8, device=device)
            pairs.append((memory, taken))
            for slot in slots:
                slot.come_back(memory)

        def give_back() -> None:
            for taken, _, _ in self._away:
                self._host.give_back(taken.numel())
            self._away.clear()

        return self._host.copies(pairs, give_back)
