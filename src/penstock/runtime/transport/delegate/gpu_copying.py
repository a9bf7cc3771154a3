"""Copies between a GPU and slots, beside the computation: streams of their own, and slots that CUDA knows (pinned).

    op ends | next op computes ...
            |--device to host--| event | thread: slot is full --> delegate sends

    take --host to device--> the computation's stream waits for the event, the rank does not
                             the slot is free when the event has come

Needs its own thread, since nothing else notices that a copy ended while the rank computes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.delegate.packets import SlotPacket
from penstock.runtime.transport.wire_format import BufferPlace


class GpuCopying:
    """Args:
    lock: held while a packed message is handed over.
    """

    lends = False

    def __init__(self, device: torch.device, lock: threading.RLock) -> None:
        self._device, self._lock = device, lock
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._unpacked: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()
        self._packing: SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = SimpleQueue()
        self._num_packing = 0
        self._packed = threading.Condition(lock)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._hand_over, name="penstock-copies", daemon=True)
        self._thread.start()

    def pack(self, packet: SlotPacket, payload: Payload, packed: Callable[[], None]) -> None:
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            for view, place, leaf in packet.parts(payload):
                _to_host(view, place, leaf)
                if leaf.is_cuda:
                    leaf.record_stream(self._outward)
            # One that blocks lets the thread that waits for it sleep.
            event = torch.cuda.Event(blocking=True)
            event.record(self._outward)
        self._num_packing += 1
        self._packing.put((event, packed))

    def unpack(self, packet: SlotPacket, unpacked: Callable[[], None]) -> Payload:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._inward):
            payload = packet.unpack_with(self._to_device)
            event = torch.cuda.Event()
            event.record(self._inward)
        current.wait_event(event)
        for leaf in payload.leaves:
            if leaf is not None:
                leaf.record_stream(current)
        self._unpacked.append((event, unpacked))
        return payload

    def _to_device(self, view: Tensor, place: BufferPlace) -> Tensor:
        if place.rebuilt is None:
            leaf = torch.empty_strided(place.shape, place.strides, dtype=place.dtype, device=self._device)
            leaf.copy_(view, non_blocking=True)
        else:
            there = view.to(self._device, non_blocking=True)
            leaf = torch.empty_strided(place.shape, place.rebuilt, dtype=place.dtype, device=self._device)
            leaf.copy_(there)
        return leaf if place.repeated is None else leaf.expand(place.repeated)

    def progress(self) -> None:
        if self._error is not None:
            raise RuntimeFailure(f"a copy from the GPU failed: {self._error}") from self._error
        while self._unpacked and self._unpacked[0][0].query():
            self._unpacked.popleft()[1]()

    def flush(self) -> None:
        with self._lock:
            self._packed.wait_for(lambda: not self._num_packing or self._error is not None, timeout=60.0)

    def close(self) -> None:
        self._packing.put(None)
        self._thread.join()
        torch.cuda.synchronize(self._device)  # nothing copies from or to memory that is about to go

    def _hand_over(self) -> None:
        """A thread's work: hands messages over as their copies end."""
        while (item := self._packing.get()) is not None:
            event, packed = item
            try:
                event.synchronize()
                with self._lock:
                    packed()
            except BaseException as error:
                self._error = error
            with self._lock:
                self._num_packing -= 1
                self._packed.notify_all()


def _to_host(view: Tensor, place: BufferPlace, leaf: Tensor) -> None:
    """Copies a leaf into its place; asynchronous where it lies on a GPU.

    A copy between different strides would pass through a buffer of torch's, and an asynchronous one might read that
    too early: a leaf with gaps is put together on the GPU first.
    """
    source = place.once(leaf)
    if place.rebuilt is not None:
        source = source.contiguous()
    view.copy_(source, non_blocking=True)
