"""How payloads get into slots and out of them: at once from host memory, beside the computation from a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.delegate.gpu_copying import GpuCopying
from penstock.runtime.transport.delegate.packets import SlotPacket


class Copying(Protocol):
    """Copies between payloads and packets in shared memory.

    Attributes:
        lends: whether payloads may stay where they came in.
    """

    lends: bool

    def pack(self, packet: SlotPacket, payload: Payload, packed: Callable[[], None]) -> None:
        """Copies a payload in; calls `packed` when all of it is there, in the order of the calls."""

    def unpack(self, packet: SlotPacket, unpacked: Callable[[], None]) -> Payload:
        """The payload, copied out; calls `unpacked` when the packet's memory is free again."""

    def progress(self) -> None:
        """Calls what has become due."""

    def flush(self) -> None:
        """Waits until all that is packed is there."""

    def close(self) -> None:
        """Ends what runs beside."""


class HostCopying:
    """From and to host memory."""

    lends = True

    def pack(self, packet: SlotPacket, payload: Payload, packed: Callable[[], None]) -> None:
        packet.pack(payload)
        packed()

    def unpack(self, packet: SlotPacket, unpacked: Callable[[], None]) -> Payload:
        payload = packet.unpack()
        unpacked()
        return payload

    def progress(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def copying_for(device: torch.device, lock: threading.RLock) -> Copying:
    """The way of copying for payloads on a device; `lock` is held where messages are handed over beside."""
    return GpuCopying(device, lock) if device.type == "cuda" else HostCopying()
