"""The memory of one rank, which all ranks of its host map: how it is laid out, and the pipe that the rank sleeps on.

    | asleep?, nonce | ring to rank 0 | ring to rank 1 | ... | rows of two sums | slot | slot | ...
                             |                                                       ^
                             '---- places of slots, in the order of the messages ----'

A rank writes into its own memory alone, but for three kinds of words: how far it has read another's ring, that a slot
of another's is free again, and that it has woken another.
"""

from __future__ import annotations

import os
import platform
import select
import threading
from collections import deque
from contextlib import suppress
from mmap import PAGESIZE
from typing import NamedTuple

from penstock.runtime.mesh.interfaces import network_name
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.mapped_memory import MappedMemory
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
WRITTEN, READ, WANTED, ENTRIES = 0, 8, 9, 16
"""Words of a ring: how many messages were put in; how many were taken out, and whether the sender waits until one is
used; then the places of slots."""
PLACE = 8 + ROW
"""Words of one of the two places of sums: the number of the sum, then its row."""
FULL, TAG, STEP, SENT, THERE, SPEC, TOLD_AT, TOLD = range(8)
"""Words of a slot, before its tensors. The step's has the digest of its shapes too; the last two say where in the
slot the bytes of a spec lie that the receiver has not met, and how many they are."""

_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether processors see one another's writes in the order in which they were made, and read in order. None of them
keeps a read behind a write that comes before it."""
_fence_lock = threading.Lock()


def fence() -> None:
    """Orders what this process reads and writes before and after: taking a lock does."""
    with _fence_lock:
        pass


def sums_start(num_ranks: int) -> int:
    """The first word of the rows that are summed, behind the rings."""
    return HEAD + num_ranks * (ENTRIES + RING)


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


class PeerMemory(MappedMemory):
    """One rank's memory, as its own process or another one maps it."""

    def __init__(self, descriptor: int, span: int) -> None:
        super().__init__(descriptor, span)
        self.words = memoryview(self.map).cast("q")

    def numbers(self, start: int, size: int) -> memoryview[float]:
        """Some of its words, as floating-point numbers."""
        return memoryview(self.map)[start * WORD : (start + size) * WORD].cast("d")

    def ring(self, target: int) -> memoryview:
        """The ring of messages to a rank."""
        start = HEAD + target * (ENTRIES + RING)
        return self.words[start : start + ENTRIES + RING]

    def header(self, offset: int) -> memoryview:
        """The words of a slot before its tensors."""
        return self.words[offset // WORD : (offset + ALIGN) // WORD]

    def packet(self, offset: int, spec: WireSpec) -> Packet:
        """A slot, laid out for payloads of a spec."""
        return Packet(spec, self.part(offset, spec.num_bytes))

    def close(self) -> None:
        self.words.release()
        super().close()


class MemorySlot:
    """A piece of this rank's memory, used for one message after another."""

    __slots__ = ("capacity", "header", "offset", "packet", "spec", "step")

    def __init__(self, memory: PeerMemory, offset: int, capacity: int) -> None:
        self.offset, self.capacity = offset, capacity
        self.header = memory.header(offset)
        self.spec: WireSpec | None = None
        self.packet: Packet | None = None
        self.step = 0


class PeerRing:
    """The way to one rank: its ring, what found no room there yet, and how it is woken."""

    __slots__ = ("asleep", "ring", "specs", "unsent", "wake")

    def __init__(self, ring: memoryview, asleep: memoryview, wake: int) -> None:
        self.ring, self.asleep, self.wake = ring, asleep, wake
        self.unsent: deque[int] = deque()
        self.specs: dict[WireSpec, int] = {}

    def put(self, offset: int) -> bool:
        """Tells the rank of a message in a slot, and wakes it where it sleeps; False where the ring has no room."""
        ring = self.ring
        written = ring[WRITTEN]
        if written - ring[READ] >= RING:
            return False
        ring[ENTRIES + written % RING] = offset
        if not _IN_ORDER:
            fence()
        ring[WRITTEN] = written + 1
        fence()
        if self.asleep[0]:
            self.rouse()
        return True

    def rouse(self) -> None:
        """Wakes the rank, once."""
        self.asleep[0] = 0
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.wake, b"\0")


class IncomingRing:
    """What comes from one rank.

    Attributes:
        due: this step's messages that are yet to come, by tag.
        early: places of messages of the next step.
        gone: whether its process is known to have ended. What it wrote before may be there still.
    """

    __slots__ = ("due", "early", "gone", "memory", "packets", "peer", "ring", "specs")

    def __init__(self, peer: int, memory: PeerMemory, ring: memoryview) -> None:
        self.peer, self.memory, self.ring = peer, memory, ring
        self.due: dict[int, Edge] = {}
        self.early: list[int] = []
        self.specs: dict[int, WireSpec] = {}
        self.packets: dict[int, tuple[int, Packet, memoryview]] = {}
        self.gone = False

    def new(self) -> list[int]:
        """The places of messages that were put in since the last call."""
        ring = self.ring
        read, written = ring[READ], ring[WRITTEN]
        if read == written:
            return []
        if not _IN_ORDER:
            fence()
        places = [ring[ENTRIES + number % RING] for number in range(read, written)]
        ring[READ] = written
        return places


class OwnMemory:
    """The memory that a rank sends from, and the pipe that it sleeps on.

    Args:
        num_ranks: of the pipeline.
        span: bytes of memory, of which what was never written takes none.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, num_ranks: int, span: int | None = None) -> None:
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory that processes could share by descriptors")
        self.first_slot = -(-(sums_start(num_ranks) + 2 * PLACE) * WORD // PAGESIZE) * PAGESIZE
        self.span = self.first_slot + (span or 2 * os.sysconf("SC_PHYS_PAGES") * PAGESIZE)
        self._sleeper = select.epoll()
        self.memory = PeerMemory.make("penstock-shared", self.span)
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
        return MemoryAddress(host, os.getpid(), self.memory.descriptor, self.wake, self.span, self._nonce)

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
        self.asleep.release()
        self.memory.close()
        self._sleeper.close()
        for descriptor in (self.pipe, self.wake):
            os.close(descriptor)
