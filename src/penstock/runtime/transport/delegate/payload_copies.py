"""How payloads get into slots of the memory that a rank and its delegate share, and out of them.

Payloads are copied at once from the host, and beside ops from a GPU. Large ones are copied piece by piece, and the
delegate sends each as soon as it is there.

In a slot lie the bytes of the spec, then the flat buffer of the wire format. Copies between a GPU and slots have
streams of their own, and slots that CUDA knows (pinned):

    op ends | next op computes ...
            |--device to host--| event | thread: slot is full --> delegate sends

    take --host to device--> the computation's stream waits for the event, the rank does not
                             the slot is free when the event has come

That needs a thread, since nothing else notices that a copy ended while the rank computes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wire_format import ALIGN, BufferPlace, Packet

COPY_STREAMS = 2
"""Streams of a GPU that copies have: one for payloads that go out, one for those that come in."""
PIECE = 1 << 21
"""Bytes of a payload that are copied before the delegate is told of them."""


class SlotPacket(Packet):
    """A packet whose buffer lies in memory that others share."""

    def pieces(self, payload: Payload) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Which tensor to copy where, piece by piece, and how much of the buffer is there when it was copied."""
        for view, place, leaf in zip(self._views, self.spec.places, payload.leaves, strict=True):
            if leaf is None or view is None or place is None:
                continue
            source = place.once(leaf)
            if place.num_bytes <= PIECE or place.rebuilt is not None or source.is_conj() or source.is_neg():
                yield view, source, place.start + place.num_bytes
                continue
            # Its elements fill their memory without gaps, in the buffer as in the leaf.
            size, step = view.numel(), PIECE // view.element_size()
            flat_view, flat_source = view.as_strided((size,), (1,)), source.as_strided((size,), (1,))
            for at in range(0, size, step):
                end = min(at + step, size)
                yield flat_view[at:end], flat_source[at:end], place.start + end * view.element_size()

    def leaves_in_place(self) -> Payload:
        """The payload, where it lies: its leaves keep the memory. Each counts its changes by itself."""
        return self.unpack(lambda view, place: _in_place(view, place).data)


def _in_place(view: Tensor, place: BufferPlace) -> Tensor:
    if place.rebuilt is not None:
        return place.leaf(view)
    return view if place.repeated is None else view.expand(place.repeated)


class PayloadCopier:
    """Copies between payloads and packets in shared memory: here at once, from and to host memory.

    Attributes:
        lends: whether payloads may stay where they came in.
    """

    lends = True

    def pack(self, packet: SlotPacket, payload: Payload, packed: Callable[[int], None]) -> None:
        """Copies a payload in; calls `packed` with how many bytes of the buffer are there, the last time with all."""
        if packet.spec.num_bytes <= 2 * PIECE:
            packet.pack(payload)
            packed(packet.spec.num_bytes)
        else:
            self._pack_pieces(packet, payload, packed)

    def _pack_pieces(self, packet: SlotPacket, payload: Payload, packed: Callable[[int], None]) -> None:
        whole, told = packet.spec.num_bytes, 0
        for view, source, there in packet.pieces(payload):
            self._copy(view, source)
            if told + PIECE <= there < whole - ALIGN:
                self._when_copied(packed, there)
                told = there
        self._when_copied(packed, whole)

    def _copy(self, view: Tensor, source: Tensor) -> None:
        view.copy_(source)

    def _when_copied(self, packed: Callable[[int], None], there: int) -> None:
        packed(there)

    def unpack(self, packet: SlotPacket, unpacked: Callable[[], None]) -> Payload:
        """The payload, copied out; calls `unpacked` when the packet's memory is free again."""
        payload = packet.unpack()
        unpacked()
        return payload

    def progress(self) -> None:
        """Calls what has become due."""

    def flush(self) -> None:
        """Waits until all that is packed is there."""

    def close(self) -> None:
        """Ends what runs beside."""


class GpuPayloadCopier(PayloadCopier):
    """From and to a GPU, beside its ops.

    Args:
        lock: held while a packed message is handed over.
    """

    lends = False

    def __init__(self, device: torch.device, lock: threading.RLock) -> None:
        self._device, self._lock = device, lock
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._unpacked: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()
        self._thread = ThreadPoolExecutor(1, "penstock-copies")
        self._packing: deque[Future[None]] = deque()

    def pack(self, packet: SlotPacket, payload: Payload, packed: Callable[[int], None]) -> None:
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            self._pack_pieces(packet, payload, packed)

    def _copy(self, view: Tensor, source: Tensor) -> None:
        # A copy between different strides would pass through a buffer of torch's, and an asynchronous one might read
        # that too early: a tensor with gaps is put together on the GPU first.
        view.copy_(source if source.stride() == view.stride() else source.contiguous(), non_blocking=True)
        if source.is_cuda:
            source.record_stream(self._outward)

    def _when_copied(self, packed: Callable[[int], None], there: int) -> None:
        # An event that blocks lets the thread that waits for it sleep.
        event = torch.cuda.Event(blocking=True)
        event.record(self._outward)
        self._packing.append(self._thread.submit(self._hand_over, event, packed, there))

    def _hand_over(self, event: torch.cuda.Event, packed: Callable[[int], None], there: int) -> None:
        event.synchronize()
        with self._lock:
            packed(there)

    def unpack(self, packet: SlotPacket, unpacked: Callable[[], None]) -> Payload:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._inward):
            payload = packet.unpack(self._to_device)
            event = torch.cuda.Event()
            event.record(self._inward)
        current.wait_event(event)
        for leaf in payload.leaves:
            if leaf is not None:
                leaf.record_stream(current)
        self._unpacked.append((event, unpacked))
        return payload

    def _to_device(self, view: Tensor, place: BufferPlace) -> Tensor:
        if place.rebuilt is not None:
            view = view.to(self._device, non_blocking=True)
        strides = place.strides if place.rebuilt is None else place.rebuilt
        leaf = torch.empty_strided(place.shape, strides, dtype=place.dtype, device=self._device)
        leaf.copy_(view, non_blocking=True)
        return leaf if place.repeated is None else leaf.expand(place.repeated)

    def progress(self) -> None:
        while self._packing and self._packing[0].done():
            if (error := self._packing[0].exception()) is not None:
                raise RuntimeFailure(f"a copy from the GPU failed: {error}") from error
            self._packing.popleft()
        while self._unpacked and self._unpacked[0][0].query():
            self._unpacked.popleft()[1]()

    def flush(self) -> None:
        wait(self._packing, timeout=60.0)

    def close(self) -> None:
        self._thread.shutdown()
        torch.cuda.synchronize(self._device)  # nothing copies from or to memory that is about to go


def copying_for(device: torch.device, lock: threading.RLock) -> PayloadCopier:
    """The way of copying for payloads on a device; `lock` is held where messages are handed over beside."""
    return GpuPayloadCopier(device, lock) if device.type == "cuda" else PayloadCopier()
