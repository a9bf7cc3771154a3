"""The memory of one rank, which all ranks of its host map: how it is laid out, and the pipe that the rank sleeps on.

    | asleep?, nonce | ring to rank 0 | ring to rank 1 | ... | rows of two sums | slot | slot | ...
                             |                                                       ^
                             '---- places of slots, in the order of the messages ----'

A rank writes into its own memory alone, but for three kinds of words: how far it has read another's ring, that a slot
of another's is free again, and that it has woken another.

The spec of a message says how its slot is to be read (see `wire_format`). A rank writes each spec once, for all
receivers, and each message says where it lies.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from mmap import MADV_REMOVE, MAP_SHARED, PAGESIZE, mmap
from struct import Struct
from typing import NamedTuple, Self

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import network_name
from penstock.runtime.transport.wire_format import ALIGN, Packet, WireSpec

RING = 1024
"""Messages that a rank may have sent to another without that one having looked; the next ones wait at the sender."""
ROW = 4096
"""Most numbers of a row that is summed."""

WORD = 8
"""Bytes."""
ASLEEP, NONCE, HEAD = 0, 8, 16
"""Words of a rank's memory: whether it sleeps, what tells it from other memory; then come its rings, and its rows of
sums."""
WRITTEN, READ, ENTRIES = 0, 8, 16
"""Words of a ring: how many messages were put in; how many were taken out; then the places of slots."""
PLACE = 8 + ROW
"""Words of one of the two places of sums: the number of the sum, then its row."""
SLOT_HEADER = Struct("7q")
"""Words of a slot, before its tensors: 1 while its message is not taken; the message's tag, its step with the digest
of the shapes, when it was sent and when it was there; where its spec lies in the sender's memory, and its bytes."""
WAITING, SUMMING = 1, 2
"""What a rank says in its memory that sleeps until a message comes, or until a sum is whole."""

_PORTABLE = 1  # known to all contexts of CUDA, whichever thread registers it
_fence_lock = threading.Lock()


def fence() -> None:
    """Orders what this process reads and writes before and after: taking a lock does."""
    with _fence_lock:
        pass


class MemoryAddress(NamedTuple):
    """Where a process of the same host finds a rank's memory and the pipe that wakes it.

    Attributes:
        host: the same for processes that can reach each other's descriptors.
        memory, wake: descriptors of process `pid`.
        nonce: what the memory holds, so that nothing else is taken for it.
    """

    host: str
    pid: int
    memory: int
    wake: int
    span: int
    nonce: int


class MappedMemory:
    """Memory that several processes map, each by a descriptor of it: as another process made it, or made by `make`.
    What was never written takes no pages.

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


class PeerMemory(MappedMemory):
    """One rank's memory, as its own process or another one maps it."""

    def __init__(self, descriptor: int, span: int) -> None:
        super().__init__(descriptor, span)
        self.words = memoryview(self.map).cast("q")

    def ring(self, target: int) -> memoryview:
        """The ring of messages to a rank."""
        start = HEAD + target * (ENTRIES + RING)
        return self.words[start : start + ENTRIES + RING]

    def rows(self, num_ranks: int) -> list[tuple[memoryview, memoryview[float]]]:
        """The two places of sums, behind the rings: for each the number of the sum, and the row."""
        first = HEAD + num_ranks * (ENTRIES + RING)
        floats = memoryview(self.map)[: self.span // WORD * WORD].cast("d")
        return [(self.words[at : at + 1], floats[at + 8 : at + PLACE]) for at in (first, first + PLACE)]

    def close(self) -> None:
        del self.words
        super().close()


class MemorySlot:
    """A piece of a rank's memory, used for one message after another: by the rank itself, or as another one reads it.

    Attributes:
        full: its first word, not 0 while its message is not taken.
        spec_place: where the spec lies for which it is laid out, in the memory; packet: the slot, so laid out.
        step: of its last message, for the rank itself; 0 if its pages were given back.
    """

    __slots__ = ("capacity", "full", "memory", "offset", "packet", "spec_place", "step")

    def __init__(self, memory: PeerMemory, offset: int, capacity: int = 0) -> None:
        self.memory, self.offset, self.capacity = memory, offset, capacity
        self.full = memory.words[offset // WORD : offset // WORD + 1]
        self.spec_place = self.step = 0
        self.packet: Packet

    def lay_out(self, spec: WireSpec, place: int) -> None:
        """Lays the slot out for messages of a spec, which lies at `place`."""
        self.packet, self.spec_place = Packet(spec, self.memory.part(self.offset, spec.num_bytes)), place


class OutgoingRing:
    """The way to one rank: its ring, and how it is woken."""

    __slots__ = ("asleep", "ring", "wake")

    def __init__(self, ring: memoryview, asleep: memoryview, wake: int) -> None:
        self.ring, self.asleep, self.wake = ring, asleep, wake

    def has_room(self) -> bool:
        """Whether the ring takes one more message."""
        return self.ring[WRITTEN] - self.ring[READ] < RING

    def put(self, offset: int) -> None:
        """Tells the rank of a message in a slot, and wakes it where it sleeps; the ring must have room."""
        ring = self.ring
        written = ring[WRITTEN]
        ring[ENTRIES + written % RING] = offset
        fence()
        ring[WRITTEN] = written + 1
        fence()
        if self.asleep[0] == WAITING:
            self.rouse()

    def rouse(self) -> None:
        """Wakes the rank, once."""
        self.asleep[0] = 0
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.wake, b"\0")


class IncomingRing:
    """What comes from one rank.

    Attributes:
        slots: by their places, as they were last read.
    """

    __slots__ = ("memory", "peer", "ring", "slots")

    def __init__(self, peer: int, memory: PeerMemory, ring: memoryview) -> None:
        self.peer, self.memory, self.ring = peer, memory, ring
        self.slots: dict[int, MemorySlot] = {}

    def new(self) -> list[int]:
        """The places of messages that were put in since the last call."""
        ring = self.ring
        read, written = ring[READ], ring[WRITTEN]
        if read == written:
            return []
        fence()
        places = [ring[ENTRIES + number % RING] for number in range(read, written)]
        ring[READ] = written
        return places


class OwnMemory:
    """The memory that a rank sends from, and the pipe that it sleeps on.

    Args:
        num_ranks: of the pipeline.
        span: bytes of memory, of which what was never written takes none.

    Attributes:
        used: bytes of it that have a place.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, num_ranks: int, span: int | None = None) -> None:
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory that processes could share by descriptors")
        num_words = HEAD + num_ranks * (ENTRIES + RING) + 2 * PLACE
        self.used = -(-num_words * WORD // PAGESIZE) * PAGESIZE
        self._sleeper = select.epoll()
        self.fileno = self._sleeper.fileno
        span = self.used + (span or 2 * os.sysconf("SC_PHYS_PAGES") * PAGESIZE)
        self.memory = PeerMemory.make("penstock-shared", span)
        try:
            self.pipe, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._sleeper.register(self.pipe, select.EPOLLIN)
        except BaseException:
            self.memory.close()
            raise
        self._nonce = int.from_bytes(os.urandom(7))
        self.memory.words[NONCE] = self._nonce
        self.asleep = self.memory.words[ASLEEP : ASLEEP + 1]

    @property
    def address(self) -> MemoryAddress:
        host = f"{network_name()}/{os.stat('/proc/self/ns/pid').st_ino}"
        return MemoryAddress(host, os.getpid(), self.memory.descriptor, self.wake, self.memory.span, self._nonce)

    def allocate(self, num_bytes: int) -> int:
        """A place for so many bytes, for good.

        Raises:
            RuntimeFailure: no memory is left.
        """
        offset, end = self.used, self.used + -(-num_bytes // ALIGN) * ALIGN
        if end > self.memory.span:
            raise RuntimeFailure(
                f"the messages of this rank that were not taken fill {self.memory.span} bytes of shared memory; use "
                "transport='gloo'"
            )
        self.used = end
        return offset

    def give_back(self, slot: MemorySlot) -> None:
        """Gives the system the pages of a slot back, until it is written again."""
        first, last = -(-slot.offset // PAGESIZE) * PAGESIZE, (slot.offset + slot.capacity) // PAGESIZE
        with suppress(OSError):
            self.memory.map.madvise(MADV_REMOVE, first, last * PAGESIZE - first)

    def watch(self, process: int) -> None:
        """Lets the end of a process, given as a descriptor, end a sleep."""
        self._sleeper.register(process, select.EPOLLIN)

    def sleep(self, seconds: float) -> list[int]:
        """Sleeps until somebody writes to the pipe, a process ends, or the time is over.

        Returns those of the processes watched that have ended, each once.
        """
        ended = [descriptor for descriptor, _ in self._sleeper.poll(seconds)]
        if self.pipe in ended:
            ended.remove(self.pipe)
            with suppress(BlockingIOError):
                os.read(self.pipe, 1 << 12)
        for process in ended:
            self._sleeper.unregister(process)
        return ended

    def close(self) -> None:
        del self.asleep
        self.memory.close()
        self._sleeper.close()
        for descriptor in (self.pipe, self.wake):
            os.close(descriptor)
