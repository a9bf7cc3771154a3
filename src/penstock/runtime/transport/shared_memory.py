"""Messages between processes of one host, through memory that both ends map. No thread, and no copy by the kernel.

    rank 0's memory   | asleep? | ring to rank 1 | ring to rank 2 | slot | slot | ...
                                       |                              ^
                                       '---- where the message lies --'

Each rank has memory of its own. It writes a message into a slot there, and then the slot's place into the ring of the
rank that is to get it. That rank finds it when it looks, copies it out, and marks the slot as free. A channel uses
its slots in turn, because its messages are received in the order in which they are sent.

A rank that finds nothing sleeps on a pipe. First it says so in its memory, so that others write to the pipe only if
somebody sleeps there. It also watches the processes that owe it messages, and so notices when one ends.

Each step ends with a sum over all ranks, which goes through the same memory:

    rank 0's memory   | ... | sum 6 | row of numbers |   | sum 7 | row of numbers |
    rank 1's memory   | ... | sum 6 | row of numbers |   | sum 5 | row of numbers |    has not come to sum 7 yet

Each rank writes its row and the sum's number into its own memory, and reads the others' rows once all are there. The
last one to come wakes those who sleep. A rank that writes sum 7 has read all of sum 6, for which all had written. So
two places per rank are enough, and nobody overwrites what another rank still reads.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, NamedTuple

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import CrossingLog, StepMessages, TransferRecord
from penstock.runtime.transport.channel import ChannelKey, Tags, why_unexpected
from penstock.runtime.transport.inbox import BRIEFLY, FINELY
from penstock.runtime.transport.rank_memory import (
    ASLEEP,
    NONCE,
    SUMMING,
    WAITING,
    WANTED,
    IncomingRing,
    MemoryAddress,
    MemorySlot,
    OutgoingRing,
    OwnMemory,
    PeerMemory,
    ReadSlot,
    fence,
)
from penstock.runtime.transport.wire_format import ALIGN, WireSpec

TRIMMED = 1 << 16
"""Bytes from which a slot that is no longer used gives its pages back."""
POLL_S = 0.5
"""Seconds after which a rank that sleeps looks up, whatever was said."""
SOON_S = 0.001
"""Seconds after which a rank that found a full ring tries again: those who read a ring wake nobody."""


class SentSpec(NamedTuple):
    """A spec of this rank's messages: where it lies in the rank's memory, and what slots for it have."""

    spec: WireSpec
    place: int
    num_bytes: int
    capacity: int


class OutChannel:
    """The sending end of a channel.

    Attributes:
        target: the rank that receives.
        specs: by signature, of the last message that had it.
        slots: by capacity, the longest used first.
        under_way: slots that were full when last looked at, where the channel has a bound.
    """

    __slots__ = ("slots", "specs", "target", "under_way")

    def __init__(self, target: int) -> None:
        self.target = target
        self.specs: dict[str, SentSpec] = {}
        self.slots: defaultdict[int, deque[MemorySlot]] = defaultdict(deque)
        self.under_way: deque[MemorySlot] = deque()

    def has_room(self, window: int) -> bool:
        """Whether fewer messages than that are not taken."""
        under_way = self.under_way
        while under_way and not under_way[0].full[0]:
            under_way.popleft()
        return len(under_way) < window


class SharedMemoryTransport:
    """One rank's end of all its channels to other processes of the host.

    Args:
        rank: whose end this is. tags: the same on all ranks.
        timeout: seconds before a wait ends with DeadlineExceeded.
        own: this rank's memory and pipe. addresses: everyone's, by rank.

    Raises:
        OSError, ValueError: the memory of another rank can't be reached.
    """

    def __init__(
        self, rank: int, tags: Tags, timeout: float, own: OwnMemory, addresses: Sequence[MemoryAddress]
    ) -> None:
        self.rank = rank
        self._tags, self._timeout = tags, timeout
        self._own = own
        self._step = self._now = self._sum = 0
        self._signatures: Sequence[str] = ()
        self._window: Mapping[int, int] = {}
        self._senders: dict[int, OutgoingRing] = {}
        self._receivers: dict[int, IncomingRing] = {}
        self._watched: dict[int, IncomingRing] = {}
        """By a descriptor that tells when the process ends."""
        self._owing: list[IncomingRing] = []
        self._specs: dict[WireSpec, SentSpec] = {}
        self._routes: dict[tuple[Edge, int], tuple[OutChannel, int]] = {}
        self._channels: dict[tuple[ChannelKey, int], OutChannel] = {}
        self._full: OutChannel | None = None
        self._ready: dict[Edge, tuple[IncomingRing, ReadSlot]] = {}
        self._arrived: list[Edge] = []
        self._woken = self._closed = False
        self.require_going_on: Callable[[], object] = bool
        """Raises where what this rank sends is in vain."""
        self._log = CrossingLog()
        self._opened: list[int] = []
        try:
            for peer, address in enumerate(addresses):
                if peer != rank:
                    self._meet(peer, address)
        except BaseException:
            self.close()
            raise
        memories = {rank: own.memory} | {peer: receiver.memory for peer, receiver in self._receivers.items()}
        rows = [memories[each].rows(len(memories)) for each in sorted(memories)]
        self._rows = [[places[which] for places in rows] for which in (0, 1)]

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
        self._senders[peer] = OutgoingRing(self._own.memory.ring(peer), memory.words[ASLEEP : ASLEEP + 1], wake)
        self._receivers[peer] = self._watched[pidfd] = IncomingRing(peer, memory, memory.ring(self.rank))

    # Steps.

    def begin(self, step: StepMessages) -> None:
        """Starts a step. `threaded` makes no difference: arrivals are seen as they come.

        Raises:
            RuntimeFailure: messages came that are not of this step.
        """
        self._step += 1
        self._now = self._step << 32 | step.digest & 0xFFFFFFFF
        self._signatures, self._window, self._full = step.signatures, step.window, None
        self._owing = list({peer: self._receivers[peer] for _, peer, _ in step.expected}.values())
        for receiver in self._receivers.values():
            receiver.due = {}
        for _, peer, messages in step.expected:
            self._receivers[peer].due.update({tag: edge for edge, tag in messages})
        for receiver in self._receivers.values():
            early, receiver.early = receiver.early, []
            for offset in early:
                self._came(receiver, offset)

    def end(self) -> None:
        """Ends a step: all that was sent lies where its receiver finds it. Large slots that the last two steps did
        not use give their pages back.
        """
        for channel in self._channels.values():
            for capacity, slots in channel.slots.items():
                for slot in slots if capacity >= TRIMMED else ():
                    if slot.step and slot.step < self._step - 1 and not slot.full[0]:
                        slot.step = 0
                        self._own.give_back(slot)

    def close(self) -> None:
        """Lets go of all memory. What was sent stays with those that have mapped it."""
        if self._closed:
            return
        self._closed = True
        memories = [receiver.memory for receiver in self._receivers.values()]
        self._owing, self._rows, self._full = [], [], None
        for views in (self._ready, self._routes, self._channels, self._senders, self._watched, self._receivers):
            views.clear()  # memory is unmapped when nothing looks at it any more
        for memory in memories:
            memory.close()
        for descriptor in self._opened:
            os.close(descriptor)
        self._own.close()

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Writes a message where its receiver finds it. False where the channel has a bound and is full: try again
        after a wait.

        Raises:
            RuntimeFailure: no memory is left, or a tensor that can't travel.
            DeadlineExceeded, PeerLost: the receiver does not look at what it was sent before.
        """
        sent = perf_counter_ns()
        route = self._routes.get((edge, target))
        if route is None:
            route = self._routes[edge, target] = self._route(edge, target)
        channel, tag = route
        window = self._window.get(edge.slot) if self._window else None
        if window is not None:
            self._full = None if channel.has_room(window) else channel
            if self._full is not None:
                return False
        signature = self._signatures[edge.consumer.microbatch]
        known = channel.specs.get(signature)
        if known is None or not known.spec.fits(payload):
            known = channel.specs[signature] = self._sent_spec(WireSpec.of(payload))
        slot = self._slot(channel, known)
        slot.packet.pack(payload)
        there = perf_counter_ns()
        slot.write_header(1, tag, self._now, sent, there, known.place, known.num_bytes)
        slot.step = self._step
        if window is not None:
            channel.under_way.append(slot)
        if not self._senders[target].put(slot.offset):
            self._put_later(target, slot.offset)
        return True

    def _put_later(self, target: int, offset: int) -> None:
        """Puts a message into a ring that is full until its receiver looks, which may itself wait for this rank to
        look.
        """
        end = time.monotonic() + self._timeout
        what = f"for rank {target} to look at what it was sent"
        while not self._senders[target].put(offset):
            self.require_going_on()
            if self._receivers[target].gone:
                raise PeerLost(f"rank {self.rank} waited {what}, and the process of rank {target} has ended")
            if time.monotonic() > end:
                raise DeadlineExceeded(f"rank {self.rank} waited {self._timeout:g} s {what}")
            for receiver in self._receivers.values():
                for come in receiver.new():
                    self._came(receiver, come)
            self._sleep(SOON_S)

    def _route(self, edge: Edge, target: int) -> tuple[OutChannel, int]:
        channel = self._channels.setdefault((ChannelKey.of(edge), target), OutChannel(target))
        return channel, self._tags.message(edge)

    def _sent_spec(self, spec: WireSpec) -> SentSpec:
        """A spec, written where all receivers find it."""
        known = self._specs.get(spec)
        if known is None:
            text = spec.to_bytes()
            place = self._own.allocate(len(text))
            self._own.memory.map[place : place + len(text)] = text
            known = self._specs[spec] = SentSpec(spec, place, len(text), _capacity(spec.num_bytes))
        return known

    def _slot(self, channel: OutChannel, known: SentSpec) -> MemorySlot:
        """A free slot, laid out for a spec."""
        slots, memory = channel.slots[known.capacity], self._own.memory
        if slots and not slots[0].full[0]:
            slot = slots.popleft()
            if slot.packet.spec is not known.spec:
                slot.packet = memory.packet(slot.offset, known.spec)
        else:
            slot = MemorySlot(memory, self._own.allocate(known.capacity), known.capacity, known.spec)
        slots.append(slot)
        return slot

    # Receiving.

    def arrivals(self) -> list[Edge]:
        """Edges whose messages came in since the last call.

        Raises:
            RuntimeFailure: one came that is not expected.
        """
        for receiver in self._owing:
            for offset in receiver.new():
                self._came(receiver, offset)
        arrived = self._arrived
        if arrived:
            self._arrived = []
        return arrived

    def _came(self, receiver: IncomingRing, offset: int) -> None:
        """Takes note of a message."""
        _, tag, now, sent, there, place, num_bytes = receiver.memory.header(offset)
        slot = receiver.slots.get(offset)
        if slot is None or slot.place != place:
            slot = receiver.lay_out(offset, place, num_bytes)
        if now != self._now and now >> 32 > self._step:
            receiver.early.append(offset)
            return
        edge = receiver.due.pop(tag, None)
        if edge is None or now != self._now:
            raise RuntimeFailure(why_unexpected(self.rank, self._step, receiver.peer, now >> 32, tag, edge))
        self._ready[edge] = receiver, slot
        self._log.add(receiver.peer, self.rank, slot.packet.spec.carried_bytes, sent, sent, there, edge)
        self._arrived.append(edge)

    def take(self, edge: Edge) -> Payload:
        """The payload of an edge that has arrived. Its slot is free again."""
        receiver, slot = self._ready.pop(edge)
        payload = slot.packet.unpack()
        slot.full[0] = 0
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
        asleep, full = self._own.asleep, self._full
        while True:
            asleep[0] = WAITING
            if full is not None:
                self._senders[full.target].ring[WANTED] = 1
            fence()
            if (came := self.arrivals()) or self._woken or (full and not full.under_way[0].full[0]):
                asleep[0] = 0
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
                    asleep[0] = 0
                    return came
                if soon < FINELY:
                    time.sleep(min(soon, BRIEFLY))
                    continue
                left = min(left, soon - FINELY / 2)
            self._sleep(min(POLL_S, left))

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

    # Sums.

    def sum(self, row: Sequence[float]) -> list[float]:
        """The sum of every rank's row of numbers, in the order of the ranks: the same everywhere. Rows have the same
        length, at most `rank_memory.ROW`.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for whom.
        """
        self._sum += 1
        number, size = self._sum, len(row)
        places = self._rows[number % 2]
        word, numbers = places[self.rank]
        numbers[:size] = array("d", row)
        fence()
        word[0] = number
        fence()
        if missing := [rank for rank, (word, _) in enumerate(places) if word[0] != number]:
            self._wait_for_rows(missing, number)
        else:
            for sender in self._senders.values():
                if sender.asleep[0] == SUMMING:
                    sender.rouse()
        return [sum(column) for column in zip(*(numbers[:size].tolist() for _, numbers in places), strict=True)]

    def _wait_for_rows(self, missing: list[int], number: int) -> None:
        """Waits until these ranks have written their rows of a sum."""
        asleep, places = self._own.asleep, self._rows[number % 2]
        end = time.monotonic() + self._timeout
        while True:
            asleep[0] = SUMMING
            fence()
            missing = [rank for rank in missing if places[rank][0][0] != number]
            if not missing:
                asleep[0] = 0
                fence()
                return
            if lost := [rank for rank in missing if self._receivers[rank].gone]:
                raise PeerLost(
                    f"rank {self.rank} lost its connection to rank {lost[0]}, whose process has ended, while it "
                    "waited for a sum over all ranks"
                )
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"rank {self.rank} waited {self._timeout:g} s for a sum over all ranks from rank "
                    f"{', '.join(map(str, missing))}; if that is just slow, give a longer timeout; if not, it stands "
                    "still or was given other batches or calls"
                )
            self._sleep(min(POLL_S, left))


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
