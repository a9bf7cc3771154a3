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
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, NamedTuple

from penstock.runtime.errors import PeerLost
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord
from penstock.runtime.transport.channel import ChannelKey, Tags
from penstock.runtime.transport.inbox import POLL_S, StepInbox, sleep_until_found
from penstock.runtime.transport.rank_memory import (
    ASLEEP,
    NONCE,
    SLOT_HEADER,
    SUMMING,
    WAITING,
    IncomingRing,
    MemoryAddress,
    MemorySlot,
    OutgoingRing,
    OwnMemory,
    PeerMemory,
    fence,
)
from penstock.runtime.transport.wire_format import ALIGN, SpecCache, WireSpec

TRIMMED = 1 << 16
"""Bytes from which a slot that is no longer used gives its pages back."""
SOON_S = 0.001
"""Seconds after which a rank whose channel was full looks again: those who take messages wake nobody."""


class WrittenSpec(NamedTuple):
    """A spec of this rank's messages: where it lies in the rank's memory, how long, and what slots for it have."""

    place: int
    num_bytes: int
    capacity: int


class OutChannel:
    """The sending end of a channel.

    Attributes:
        target: the rank that receives; ring: to it.
        slots: by capacity, the longest used first.
        under_way: slots that were full when last looked at, where the channel has a bound.
    """

    __slots__ = ("ring", "slots", "target", "under_way")

    def __init__(self, target: int, ring: OutgoingRing) -> None:
        self.target, self.ring = target, ring
        self.slots: defaultdict[int, deque[MemorySlot]] = defaultdict(deque)
        self.under_way: deque[MemorySlot] = deque()

    def has_room(self, window: int | None) -> bool:
        """Whether the ring takes one more message, and fewer than `window` of the channel's are not taken."""
        under_way = self.under_way
        while under_way and not under_way[0].full[0]:
            under_way.popleft()
        return self.ring.has_room() and (window is None or len(under_way) < window)


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
        self._own, self.fileno = own, own.fileno
        self._inbox: StepInbox[MemorySlot] = StepInbox(rank)
        self._num_sums = 0
        self._signatures: Sequence[str] = ()
        self._window: Mapping[int, int] = {}
        self._senders: dict[int, OutgoingRing] = {}
        self._receivers: dict[int, IncomingRing] = {}
        self._owing: list[IncomingRing] = []
        self._watched: dict[int, int] = {}
        """The rank of each process, by a descriptor that tells when it ends."""
        self._gone: set[int] = set()
        """Ranks whose process has ended. What they wrote before may be there still."""
        self._specs, self._written = SpecCache(), dict[bytes, WrittenSpec]()
        self._routes: dict[tuple[Edge, int], tuple[OutChannel, int]] = {}
        self._channels: dict[tuple[ChannelKey, int], OutChannel] = {}
        self._full: tuple[OutChannel, int | None] | None = None
        """The channel that had no room for a message, and its bound."""
        self._woken = self._closed = False
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
        self._watched[pidfd] = peer
        self._senders[peer] = OutgoingRing(self._own.memory.ring(peer), memory.words[ASLEEP : ASLEEP + 1], wake)
        self._receivers[peer] = IncomingRing(peer, memory, memory.ring(self.rank))

    # Steps.

    def begin(self, step: StepMessages) -> None:
        """Starts a step. `threaded` makes no difference: arrivals are seen as they come.

        Raises:
            RuntimeFailure: messages came that are not of this step.
        """
        self._signatures, self._window, self._full = step.signatures, step.window, None
        self._owing = [self._receivers[peer] for peer in dict.fromkeys(peer for _, peer, _ in step.expected)]
        self._inbox.begin(step)

    def end(self) -> None:
        """Ends a step: all that was sent lies where its receiver finds it. Large slots that the last two steps did
        not use give their pages back.
        """
        for channel in self._channels.values():
            for capacity, slots in channel.slots.items():
                for slot in slots if capacity >= TRIMMED else ():
                    if slot.step and slot.step < self._inbox.step - 1 and not slot.full[0]:
                        slot.step = 0
                        self._own.give_back(slot)

    def close(self) -> None:
        """Lets go of all memory. What was sent stays with those that have mapped it."""
        if self._closed:
            return
        self._closed = True
        memories = [receiver.memory for receiver in self._receivers.values()]
        # Memory is unmapped when nothing looks at it any more.
        self._rows, self._owing, self._full = [], [], None
        self._inbox, self._specs = StepInbox(self.rank), SpecCache()
        for views in (self._routes, self._channels, self._senders, self._receivers):
            views.clear()
        for memory in memories:
            memory.close()
        for descriptor in self._opened:
            os.close(descriptor)
        self._own.close()

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Writes a message where its receiver finds it. False where the receiver has not taken, or not looked at, as
        many as there may be: try again after a wait.

        Raises:
            RuntimeFailure: no memory is left, or a tensor that can't travel.
        """
        sent = perf_counter_ns()
        route = self._routes.get((edge, target))
        if route is None:
            route = self._routes[edge, target] = self._route(edge, target)
        channel, tag = route
        window = self._window.get(edge.slot) if self._window else None
        self._full = None if channel.has_room(window) else (channel, window)
        if self._full is not None:
            return False
        spec, text = self._specs.of(payload, channel, self._signatures[edge.consumer.microbatch])
        written = self._written.get(text) or self._write_spec(spec, text)
        slot = self._slot(channel, spec, written)
        slot.packet.pack(payload)
        stamp, there = self._inbox.stamp, perf_counter_ns()
        SLOT_HEADER.pack_into(
            slot.memory.map, slot.offset, 1, tag, stamp, sent, there, written.place, written.num_bytes
        )
        slot.step = self._inbox.step
        if window is not None:
            channel.under_way.append(slot)
        channel.ring.put(slot.offset)
        return True

    def _route(self, edge: Edge, target: int) -> tuple[OutChannel, int]:
        """The channel of an edge, and the tag of its message."""
        fresh = OutChannel(target, self._senders[target])
        return self._channels.setdefault((ChannelKey.of(edge), target), fresh), self._tags.message(edge)

    def _write_spec(self, spec: WireSpec, text: bytes) -> WrittenSpec:
        """Writes a spec where all receivers find it. Slots for it have at most a quarter more than it needs, so that
        messages of like sizes share slots.
        """
        place = self._own.allocate(len(text))
        self._own.memory.map[place : place + len(text)] = text
        step = max(ALIGN, 1 << max(0, spec.num_bytes.bit_length() - 3))
        written = self._written[text] = WrittenSpec(place, len(text), -(-spec.num_bytes // step) * step)
        return written

    def _slot(self, channel: OutChannel, spec: WireSpec, written: WrittenSpec) -> MemorySlot:
        """A free slot, laid out for a spec."""
        slots, capacity = channel.slots[written.capacity], written.capacity
        if slots and not slots[0].full[0]:
            slot = slots.popleft()
        else:
            slot = MemorySlot(self._own.memory, self._own.allocate(capacity), capacity)
        if slot.spec_place != written.place:
            slot.lay_out(spec, written.place)
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
        return self._inbox.arrivals()

    def _came(self, receiver: IncomingRing, offset: int) -> None:
        """Takes in a message that lies in a slot."""
        memory = receiver.memory
        _, tag, stamp, sent, there, place, num_bytes = SLOT_HEADER.unpack_from(memory.map, offset)
        slot = receiver.slots.get(offset)
        if slot is None:
            slot = receiver.slots[offset] = MemorySlot(memory, offset)
        if slot.spec_place != place:
            slot.lay_out(self._specs.read(memory.map[place : place + num_bytes]), place)
        self._inbox.came(receiver.peer, tag, stamp, slot, slot.packet.spec.carried_bytes, sent, sent, there)

    def take(self, edge: Edge) -> Payload:
        """The payload of an edge that has arrived. Its slot is free again."""
        slot = self._inbox.take(edge)
        payload = slot.packet.unpack()
        slot.full[0] = 0
        return payload

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until at least one message has come in, the channel that was full has room, or `wake` was called.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        try:
            look = self.looks_again_after
            return sleep_until_found(lambda: self._look(who), self._sleep, self._timeout, who, until, look) or []
        finally:
            self._own.asleep[0] = 0

    # Watched from outside, by a rank that waits for other things as well.

    def poll(self, who: Callable[[], str]) -> list[Edge] | None:
        """What ends a wait: the edges whose messages came in, perhaps none. None if nothing does: then others make
        the descriptor ready as soon as something does.

        Raises:
            PeerLost: a rank that owes a message has ended.
        """
        self._sleep(0.0)
        return self._look(who)

    def looks_again_after(self) -> float:
        """Seconds after which to poll again though the descriptor is not ready."""
        return POLL_S if self._full is None else SOON_S

    def _look(self, who: Callable[[], str]) -> list[Edge] | None:
        """Says in this rank's memory that it sleeps, then looks whether it need not."""
        full, asleep = self._full, self._own.asleep
        asleep[0] = WAITING
        fence()
        came = self.arrivals()
        if came or self._woken or (full is not None and full[0].has_room(full[1])):
            asleep[0], self._woken = 0, False
            return came
        if self._gone:
            self._require_alive(self._inbox.owed() | (set() if full is None else {full[0].target}), who)
        return None

    def _require_alive(self, ranks: Iterable[int], who: Callable[[], str]) -> None:
        if lost := self._gone.intersection(ranks):
            raise PeerLost(
                f"rank {self.rank} lost its connection to rank {min(lost)}, whose process has ended: {who()}"
            )

    def _sleep(self, seconds: float) -> None:
        """Sleeps until somebody writes to the pipe, or another rank's process ends."""
        for ended in self._own.sleep(seconds):
            self._gone.add(self._watched[ended])

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._woken = True
        with suppress(BlockingIOError):
            os.write(self._own.wake, b"\0")

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call: each arrived when it was written, whoever looked when."""
        return self._inbox.crossings.take()

    # Sums.

    def sum(self, row: Sequence[float]) -> list[float]:
        """The sum of every rank's row of numbers, in the order of the ranks: the same everywhere. Rows have the same
        length, at most `rank_memory.ROW`.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for whom.
        """
        self._num_sums += 1
        number, size = self._num_sums, len(row)
        places = self._rows[number % 2]
        word, numbers = places[self.rank]
        numbers[:size] = array("d", row)
        fence()
        word[0] = number
        fence()

        def missing() -> list[int]:
            return [rank for rank, (word, _) in enumerate(places) if word[0] != number]

        def who() -> str:
            ranks = ", ".join(map(str, missing()))
            return (
                f"rank {self.rank} waits for a sum over all ranks from rank {ranks}; if that is just slow, give a "
                "longer timeout; if not, it stands still or was given other batches or calls"
            )

        def look() -> bool | None:
            self._own.asleep[0] = SUMMING
            fence()
            if not (late := missing()):
                return True
            self._require_alive(late, who)
            return None

        if missing():
            try:
                sleep_until_found(look, self._sleep, self._timeout, who)
            finally:
                self._own.asleep[0] = 0
            fence()
        else:
            for sender in self._senders.values():
                if sender.asleep[0] == SUMMING:
                    sender.rouse()
        return [sum(column) for column in zip(*(numbers[:size].tolist() for _, numbers in places), strict=True)]


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
