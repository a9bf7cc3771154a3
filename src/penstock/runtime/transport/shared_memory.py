"""Messages between processes of one host, through memory that both ends map. No thread, and no copy by the kernel.

    rank 0's memory   | asleep? | ring to rank 1 | ring to rank 2 | slot | slot | ...
                                       |                              ^
                                       '---- where the message lies --'

Each rank has memory of its own. It writes a message into a slot there, and then the slot's place into the ring of the
rank that is to get it. That rank finds it when it looks, copies it out, and marks the slot as free. A channel uses
its slots in turn, because its messages are received in the order in which they are sent.

A rank that finds nothing sleeps on a pipe. First it says so in its memory, so that others write to the pipe only if
somebody sleeps there. It also watches the processes that owe it messages, and so notices when one ends.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from mmap import MADV_REMOVE, PAGESIZE
from time import perf_counter_ns
from typing import Any

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import CrossingLog, StepMessages, TransferRecord
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages, Tags, why_unexpected
from penstock.runtime.transport.inbox import BRIEFLY, FINELY
from penstock.runtime.transport.rank_memory import (
    ASLEEP,
    FULL,
    NONCE,
    SENT,
    SPEC,
    STEP,
    TAG,
    THERE,
    TOLD,
    TOLD_AT,
    WANTED,
    IncomingRing,
    MemoryAddress,
    MemorySlot,
    OwnMemory,
    PeerMemory,
    PeerRing,
    fence,
)
from penstock.runtime.transport.shared_sums import POLL_S, SharedSums
from penstock.runtime.transport.wire_format import ALIGN, Packet, WireSpec

KEPT_PLANS = 16
"""Kinds of steps of which it is remembered what they bring."""
TRIMMED = 1 << 16
"""Bytes from which a slot that is no longer used gives its pages back."""


class KnownSpec:
    """A spec that was sent to a rank: its number there, or its bytes, which the next message brings."""

    __slots__ = ("capacity", "number", "spec", "told")

    def __init__(self, spec: WireSpec, number: int, told: bytes) -> None:
        self.spec, self.number, self.told = spec, number, told
        self.capacity = _capacity(spec.num_bytes)


class OutChannel:
    """The sending end of a channel.

    Attributes:
        known: what the receiver knows of shapes, by signature.
        slots: by capacity, the longest used first.
        under_way: slots that were full when last looked at, where the channel has a bound.
    """

    __slots__ = ("known", "slots", "under_way")

    def __init__(self) -> None:
        self.under_way: deque[MemorySlot] = deque()
        self.known: dict[str, KnownSpec] = {}
        self.slots: dict[int, deque[MemorySlot]] = {}


class SharedMemoryTransport:
    """One rank's end of all its channels to other processes of the host.

    Args:
        rank: whose end this is. tags: the same on all ranks.
        timeout: seconds before a wait ends with DeadlineExceeded.
        own: this rank's memory and pipe. peers: everyone's addresses, by rank.

    Raises:
        OSError, ValueError: the memory of another rank can't be reached.
    """

    def __init__(
        self, rank: int, tags: Tags, timeout: float, own: OwnMemory, addresses: Sequence[MemoryAddress]
    ) -> None:
        self.rank = rank
        self._tags, self._timeout = tags, timeout
        self._own = own
        self._step = self._now = 0
        self._signatures: Sequence[str] = ()
        self._routes: dict[tuple[Edge, int], tuple[OutChannel, int]] = {}
        self._channels: dict[tuple[ChannelKey, int], OutChannel] = {}
        self._senders: dict[int, PeerRing] = {}
        self._receivers: dict[int, IncomingRing] = {}
        self._watched: dict[int, IncomingRing] = {}
        """By a descriptor that tells when the process ends."""
        self._owing: list[IncomingRing] = []
        self._plans: dict[int, tuple[Sequence[ExpectedMessages], dict[int, dict[int, Edge]]]] = {}
        self._ready: dict[Edge, tuple[IncomingRing, Packet, memoryview]] = {}
        self._arrived: list[Edge] = []
        self._window: Mapping[int, int] = {}
        self._full: OutChannel | None = None
        self._has_unsent = self._woken = self._closed = False
        self._next = own.first_slot
        self._log = CrossingLog()
        self._opened: list[int] = []
        self._sums: SharedSums | None = None
        try:
            for peer, address in enumerate(addresses):
                if peer != rank:
                    self._meet(peer, address)
            self._sums = SharedSums(rank, own, self._senders, self._receivers, timeout, self._sleep)
        except BaseException:
            self.close()
            raise

    def _meet(self, peer: int, address: MemoryAddress) -> None:
        descriptors = f"/proc/{address.pid}/fd/"
        memory_fd = os.open(f"{descriptors}{address.memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = PeerMemory(memory_fd, address.span)
        finally:
            os.close(memory_fd)
        if memory.words[NONCE] != address.nonce:
            raise ValueError(f"what process {address.pid} has there is not rank {peer}'s memory")
        wake = os.open(f"{descriptors}{address.wake}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._opened.append(wake)
        pidfd = os.pidfd_open(address.pid)
        self._opened.append(pidfd)
        self._own.watch(pidfd)
        self._senders[peer] = PeerRing(self._own.memory.ring(peer), memory.words[ASLEEP : ASLEEP + 1], wake)
        self._receivers[peer] = self._watched[pidfd] = IncomingRing(peer, memory, memory.ring(self.rank))

    # Steps.

    def begin(self, step: StepMessages) -> None:
        """Starts a step. `threaded` makes no difference: arrivals are seen as they come.

        Raises:
            RuntimeFailure: messages came that are not of this step.
        """
        self._step += 1
        self._now, self._signatures, self._window = _step_word(self._step, step.digest), step.signatures, step.window
        self._full, expected = None, step.expected
        plan = self._plans.get(id(expected))
        if plan is None or plan[0] is not expected:
            if len(self._plans) > KEPT_PLANS:
                self._plans.clear()
            by_peer: dict[int, dict[int, Edge]] = {}
            for _, peer, messages in expected:
                by_peer.setdefault(peer, {}).update({tag: edge for edge, tag in messages})
            plan = self._plans[id(expected)] = expected, by_peer
        self._owing = [self._receivers[peer] for peer in plan[1]]
        for receiver in self._owing:
            receiver.due = plan[1][receiver.peer].copy()
        for receiver in self._receivers.values():
            early, receiver.early = receiver.early, []
            for offset in early:
                self._came(receiver, offset)

    def end(self) -> None:
        """Ends a step: all that was sent lies where its receiver finds it."""
        end = time.monotonic() + self._timeout
        while self._has_unsent:
            self._flush()
            if self._has_unsent:
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"rank {self.rank} waited {self._timeout:g} s to send the last of a step")
                time.sleep(0.001)  # a ring is full until its receiver, which wakes nobody for that, reads on
        for channel in self._channels.values():
            for capacity, slots in channel.slots.items():
                if capacity >= TRIMMED:
                    self._trim(slots)

    def _trim(self, slots: deque[MemorySlot]) -> None:
        """Gives back the pages of slots that the last two steps did not use."""
        for slot in slots:
            if slot.step and slot.step < self._step - 1 and not slot.header[FULL]:
                first, last = -(-slot.offset // PAGESIZE) * PAGESIZE, (slot.offset + slot.capacity) // PAGESIZE
                slot.step = 0
                with suppress(OSError):
                    self._own.memory.map.madvise(MADV_REMOVE, first, last * PAGESIZE - first)

    def close(self) -> None:
        """Lets go of all memory. What was sent stays with those that have mapped it."""
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        self._routes.clear()
        self._channels.clear()
        if self._sums is not None:
            self._sums.close()
        for sender in self._senders.values():
            sender.ring.release()
            sender.asleep.release()
        for receiver in self._receivers.values():
            receiver.packets.clear()
            receiver.ring.release()
            receiver.memory.close()
        for descriptor in self._opened:
            os.close(descriptor)
        self._own.close()

    def sum(self, row: Sequence[float]) -> list[float]:
        """The sum of every rank's row of numbers, the same everywhere; see `SharedSums`."""
        assert self._sums is not None
        return self._sums.sum(row)

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Writes a message where its receiver finds it. False where the channel has a bound and is full: try again
        after a wait.

        Raises:
            RuntimeFailure: no memory is left, or a tensor that can't travel.
        """
        sent = perf_counter_ns()
        route = self._routes.get((edge, target))
        if route is None:
            route = self._routes[edge, target] = self._route(edge, target)
        channel, tag = route
        window = self._window.get(edge.slot) if self._window else None
        if window is not None and not self._is_open(channel, target, window):
            return False
        signature = self._signatures[edge.consumer.microbatch]
        known = channel.known.get(signature)
        if known is None or not known.spec.fits(payload):
            known = channel.known[signature] = self._tell(target, WireSpec.of(payload))
        spec, told = known.spec, known.told
        slot = self._slot(channel, spec, _capacity(spec.num_bytes + len(told)) if told else known.capacity)
        packet = slot.packet
        assert packet is not None
        packet.pack(payload)
        header = slot.header
        if told:
            start = slot.offset + spec.num_bytes
            self._own.memory.map[start : start + len(told)] = told
            known.told, header[TOLD_AT] = b"", spec.num_bytes
        header[TAG], header[STEP], header[SPEC], header[TOLD] = tag, self._now, known.number, len(told)
        header[SENT], header[THERE] = sent, perf_counter_ns()
        header[FULL] = 1
        slot.step = self._step
        if self._window:
            channel.under_way.append(slot)
        sender = self._senders[target]
        if sender.unsent or not sender.put(slot.offset):
            sender.unsent.append(slot.offset)
            self._has_unsent = True
        return True

    def _is_open(self, channel: OutChannel, target: int, window: int) -> bool:
        """Whether fewer messages of a channel than that are not taken; where not, this rank is woken once one is."""
        under_way = channel.under_way
        while under_way and not under_way[0].header[FULL]:
            under_way.popleft()
        if len(under_way) < window:
            self._full = None
            return True
        self._full = channel
        self._senders[target].ring[WANTED] = 1
        return False

    def _flush(self) -> None:
        """Puts in what found no room before."""
        self._has_unsent = False
        for sender in self._senders.values():
            while sender.unsent and sender.put(sender.unsent[0]):
                sender.unsent.popleft()
            self._has_unsent = self._has_unsent or bool(sender.unsent)

    def _route(self, edge: Edge, target: int) -> tuple[OutChannel, int]:
        key = ChannelKey.of(edge), target
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = OutChannel()
        return channel, self._tags.message(edge)

    def _tell(self, target: int, spec: WireSpec) -> KnownSpec:
        """A spec as a rank knows it, or will once it has its bytes."""
        numbers = self._senders[target].specs
        number = numbers.get(spec)
        if number is not None:
            return KnownSpec(spec, number, b"")
        numbers[spec] = len(numbers)
        return KnownSpec(spec, numbers[spec], spec.to_json().encode())

    def _slot(self, channel: OutChannel, spec: WireSpec, capacity: int) -> MemorySlot:
        """A free slot, laid out for a spec."""
        slots = channel.slots.get(capacity)
        if slots is None:
            slots = channel.slots[capacity] = deque()
        if slots and not slots[0].header[FULL]:
            slot = slots.popleft()
        else:
            if self._next + capacity > self._own.span:
                raise RuntimeFailure(
                    f"the messages of rank {self.rank} that were not taken fill {self._own.span} bytes of shared "
                    "memory; use transport='gloo'"
                )
            slot = MemorySlot(self._own.memory, self._next, capacity)
            self._next += capacity
        slots.append(slot)
        if slot.spec is not spec:
            slot.spec, slot.packet = spec, self._own.memory.packet(slot.offset, spec)
        return slot

    # Receiving.

    def arrivals(self) -> list[Edge]:
        """Edges whose messages came in since the last call.

        Raises:
            RuntimeFailure: one came that is not expected.
        """
        if self._has_unsent:
            self._flush()
        for receiver in self._owing:
            for offset in receiver.new():
                self._came(receiver, offset)
        arrived = self._arrived
        if arrived:
            self._arrived = []
        return arrived

    def _came(self, receiver: IncomingRing, offset: int) -> None:
        """Takes note of a message."""
        number, packet, header = receiver.packets.get(offset) or self._laid_out(receiver, offset)
        if header[SPEC] != number:
            number, packet, header = self._laid_out(receiver, offset)
        now, tag = header[STEP], header[TAG]
        if now != self._now and now >> 32 > self._step:
            receiver.early.append(offset)
            return
        edge = receiver.due.pop(tag, None)
        if edge is None or now != self._now:
            raise RuntimeFailure(why_unexpected(self.rank, self._step, receiver.peer, now >> 32, tag, edge))
        self._ready[edge] = receiver, packet, header
        sent = header[SENT]
        self._log.add(receiver.peer, self.rank, packet.spec.carried_bytes, sent, sent, header[THERE], edge)
        self._arrived.append(edge)

    def _laid_out(self, receiver: IncomingRing, offset: int) -> tuple[int, Packet, memoryview]:
        memory = receiver.memory
        header = memory.header(offset)
        number = header[SPEC]
        spec = receiver.specs.get(number)
        if spec is None:
            start = offset + header[TOLD_AT]
            spec = receiver.specs[number] = WireSpec.from_json(memory.map[start : start + header[TOLD]].decode())
        found = receiver.packets[offset] = number, memory.packet(offset, spec), header
        return found

    def take(self, edge: Edge) -> Payload:
        """The payload of an edge that has arrived. Its slot is free again."""
        receiver, packet, header = self._ready.pop(edge)
        payload = packet.unpack()
        header[FULL] = 0
        if self._window:
            fence()
            if receiver.ring[WANTED]:
                receiver.ring[WANTED] = 0
                self._senders[receiver.peer].rouse()
        return payload

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until at least one message has come in, the channel that was full has room, or `wake` was called.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        end = time.monotonic() + self._timeout
        asleep = self._own.memory.words
        while True:
            asleep[ASLEEP] = 1
            fence()
            full = self._full
            if (came := self.arrivals()) or self._woken or (full and not full.under_way[0].header[FULL]):
                asleep[ASLEEP] = 0
                self._woken = False
                return came
            lost = next((receiver.peer for receiver in self._owing if receiver.gone and receiver.due), None)
            if lost is not None:
                raise PeerLost(
                    f"rank {self.rank} lost its connection to rank {lost}, whose process has ended: {who()}"
                )
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who()}")
            if until is not None:
                soon = (until - perf_counter_ns()) / 1e9
                if soon <= 0:
                    asleep[ASLEEP] = 0
                    return came
                if soon < FINELY:
                    time.sleep(min(soon, BRIEFLY))
                    continue
                left = min(left, soon - FINELY / 2)
            self._sleep(0.001 if self._has_unsent else min(POLL_S, left))

    def _sleep(self, seconds: float) -> None:
        """Sleeps until somebody writes to the pipe, or another rank's process ends."""
        for ended in self._own.sleep(seconds):
            self._watched[ended].gone = True

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._woken = True
        with suppress(BlockingIOError):
            os.write(self._own.wake, b"\0")

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call: each arrived when it was written, whoever looked when."""
        return self._log.take()


def open_shared_memory(
    rank: int, num_ranks: int, gather: Callable[[Any], list[Any]], tags: Tags, timeout: float
) -> SharedMemoryTransport | None:
    """One rank's end, or None on every rank where not all of them can reach each other's memory. All must call it."""
    own: OwnMemory | None = None
    with suppress(OSError):
        own = OwnMemory(num_ranks)
    addresses: list[MemoryAddress | None] = gather(None if own is None else own.address)
    made: SharedMemoryTransport | None = None
    known = [address for address in addresses if address is not None]
    if own is not None and len(known) == num_ranks and len({address.host for address in known}) == 1:
        with suppress(OSError, ValueError):
            made = SharedMemoryTransport(rank, tags, timeout, own, known)
    elif own is not None:
        own.close()
    if not all(gather(made is not None)):
        if made is not None:
            made.close()
        return None
    return made


def _capacity(num_bytes: int) -> int:
    """What a slot for so many bytes has: at most a quarter more, so that messages of like sizes share slots."""
    step = max(ALIGN, 1 << max(0, num_bytes.bit_length() - 3))
    capacity = -(-num_bytes // step) * step
    return -(-capacity // ALIGN) * ALIGN


def _step_word(step: int, digest: int) -> int:
    return step << 32 | digest & 0xFFFFFFFF
