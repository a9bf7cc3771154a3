"""Messages between ranks by delegates: a light process beside each rank sends and receives while the rank computes.

    rank 0: pack into a slot --> delegate ==TCP==> delegate --> slot, unpack: rank 1
                 shared memory                        shared memory

The rank only copies and writes a descriptor; nothing that happens on a link holds it up (PipeMorph, section 5). Past
the paper: messages are numbered and answered chunk by chunk, so that each arrives once whatever happens to
connections and interfaces, in the middle of a message too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from penstock.control.events import LinkDown, LinkUp
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord
from penstock.runtime.transport.channel import ChannelKey, Tags
from penstock.runtime.transport.delegate.boxes import Counters, DelegateInbox, DelegateProcess, LinkHealth, Outbox
from penstock.runtime.transport.delegate.carrier.frames import Descriptor, DescriptorKind, spec_room
from penstock.runtime.transport.delegate.payload_copies import SlotPacket, copying_for
from penstock.runtime.transport.inbox import POLL_S, sleep_until_found
from penstock.runtime.transport.wire_format import SpecCache

NUM_LANES = 2
"""TCP connections from a rank to another."""
HOST_MEMORY = 1 << 30
"""Bytes of messages that may wait on their way out; a larger message goes alone."""
LATE_MESSAGES_S = 0.5
"""Seconds that what a lost rank had sent may take to come."""
FLUSH_S = 10.0
"""Seconds that `close` waits for what was sent to be there."""


class DelegateTransport:
    """One rank's end of all its links.

    The delegate ends when the rank ends, however it ends.

    Args:
        rank: whose end this is.
        gather: everyone's value, by rank; called once, by all.
        tags: the same on all ranks.
        timeout: seconds before a wait ends with DeadlineExceeded.
        interfaces: local addresses, the preferred one first; when one dies messages go by the next.
        num_lanes: TCP connections to each other rank, which share the chunks of its messages; the same on all ranks.
        host_memory: see `DelegateOptions` in choose.py.
        device: where payloads that came in are to lie.
        starts: whether the delegate is started here. If not, `start` or `prepare` starts it.

    Raises:
        RuntimeFailure: an interface that is not of this host; too few descriptors or processes.
    """

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]],
        tags: Tags,
        timeout: float,
        interfaces: Sequence[str] = ("127.0.0.1",),
        num_lanes: int = NUM_LANES,
        host_memory: int = HOST_MEMORY,
        device: torch.device | str = "cpu",
        starts: bool = True,
    ) -> None:
        if not hasattr(os, "eventfd"):
            raise RuntimeFailure("delegates need Linux; use transport='host'")
        self.rank = rank
        self._tags, self._timeout = tags, timeout
        self.counters = Counters()
        place = torch.device(device)
        self._delegate = DelegateProcess(rank, interfaces, num_lanes, host_memory, place.type == "cuda")
        try:
            self._delegate.meet(gather)
            if starts:
                self._delegate.start()
        except BaseException:
            self._delegate.close()
            raise
        self._outbox = Outbox(self._delegate)
        self._inbox = DelegateInbox(self._delegate)
        self._health = LinkHealth(rank, self._delegate.peers, self.counters)
        self.notices = self._health.notices
        self._specs = SpecCache()
        self._signatures: Sequence[str] = ()
        self._starving = 0
        self._full = self._room = self._failed = self._closed = False
        # One thread of the rank's uses this; another hands over what was copied from a GPU.
        self._lock, self._starting = threading.RLock(), threading.Lock()
        self._copying = copying_for(place, self._lock)

    # Steps.

    def start(self) -> None:
        """Starts the delegate, unless it runs. Any thread may call it; steps by other transports are not held up.

        Raises:
            RuntimeFailure: too few descriptors, processes or memory.
        """
        with self._starting:
            if not (self._closed or self._delegate.is_running):
                self._delegate.start()

    def prepare(self, links: Iterable[tuple[int, int]]) -> None:
        """Starts the delegate and connects it over those of these links (pairs of ranks, in either order) that this
        rank has, before they are needed. Any thread may call it.
        """
        if peers := {a + b - self.rank for a, b in links if self.rank in (a, b)}:
            self.start()
            with self._lock:
                for peer in peers:
                    self._inbox.connect(peer)

    def begin(self, step: StepMessages) -> None:
        """Starts a step. `threaded` and `window` make no difference here: all arrivals are told as they come, and
        host memory bounds what is under way.

        Raises:
            RuntimeFailure: messages came that are not of this step.
        """
        self._signatures = step.signatures
        with self._lock:
            self._inbox.begin(step)
            self._listen()  # slots that are free again are used before memory that was never touched

    def end(self) -> None:
        """Ends a step. What was sent goes on its way: its slots are kept until it is there."""
        with self._lock:
            self._listen()

    def close(self) -> None:
        """Waits until what was sent is there, unless a wait failed before, then ends the delegate."""
        with self._starting:
            if self._closed:
                return
            self._closed = True
        end = time.monotonic() + (0.0 if self._failed else min(FLUSH_S, self._timeout))
        try:
            self._copying.flush()
            while time.monotonic() < end:
                with self._lock:
                    self._listen()
                    if not self._outbox.targets() - self._health.gone:
                        break
                self._delegate.wait(min(POLL_S, end - time.monotonic()))
        except RuntimeFailure:
            pass  # nothing more can be done for what is on its way
        finally:
            self._copying.close()
            self._delegate.close()

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Sends; False where host memory is full.

        Raises:
            RuntimeFailure: a message larger than the memory that delegates map, or one that can't travel.
        """
        with self._lock:
            return self._send(edge, target, payload, perf_counter_ns())

    def _send(self, edge: Edge, target: int, payload: Payload, sent: int) -> bool:
        signature = self._signatures[edge.consumer.microbatch]
        spec, spec_bytes = self._specs.of(payload, ChannelKey.of(edge), signature)
        before = spec_room(len(spec_bytes))
        slot = self._outbox.take(target, before + spec.num_bytes)
        if slot is None:
            self._listen()
            slot = self._outbox.take(target, before + spec.num_bytes)
            if slot is None:
                self._full, self._room = True, False
                return False
        offset, capacity = slot
        memory = self._delegate.out_memory
        memory.map[offset : offset + len(spec_bytes)] = spec_bytes
        packet = SlotPacket(spec, memory.part(offset + before, spec.num_bytes))
        message = Descriptor(
            DescriptorKind.SEND,
            self.rank,
            target,
            tag=self._tags.message(edge),
            stamp=self._inbox.stamp,
            sent=sent,
            offset=offset,
            capacity=capacity,
            spec_bytes=len(spec_bytes),
            payload_bytes=spec.num_bytes,
        )

        def packed(num_bytes: int) -> None:
            nonlocal message
            message = self._outbox.post(message._replace(filled=before + num_bytes))

        self._copying.pack(packet, payload, packed)
        return True

    # Receiving.

    def arrivals(self) -> list[Edge]:
        """Edges whose messages came in since the last call.

        Raises:
            RuntimeFailure: one came that is not expected.
        """
        with self._lock:
            self._listen()
            return self._inbox.arrivals()

    def wait(
        self,
        awaited: Sequence[Edge],
        who: Callable[[], str],
        until: int | None = None,
        beside: Callable[[], list[Edge] | None] = lambda: None,
        looks_again_after: Callable[[], float] = lambda: POLL_S,
    ) -> list[Edge]:
        """Waits until a message has come in, until there is room again after a `send` that found none, or until
        `wake` was called.

        Args:
            beside: looks at another transport, whose descriptor was given to `also_watch`. What it returns ends the
                wait, unless that is None.
            looks_again_after: after how many seconds to look there again even if its descriptor is not ready.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        lost_since: float | None = None

        def look() -> list[Edge] | None:
            nonlocal lost_since
            edges = self.arrivals()
            others = beside()
            if edges or others is not None or self._delegate.woken or (self._full and self._room):
                self._full = self._delegate.woken = False
                return edges + (others or [])
            now = time.monotonic()
            with self._lock:
                lost = self._health.gone & (self._inbox.owed() | self._outbox.targets())
                lost_since = (lost_since or now) if lost else None
                if lost_since is not None and now - lost_since >= LATE_MESSAGES_S:
                    raise PeerLost(f"rank {min(lost)} is gone, its process or its delegate has ended: {who()}")
                if self._starving:  # this rank may stand still for just the message that has no room
                    self._delegate.order(Descriptor(DescriptorKind.GRANT, number=2 * self._starving))
                    self._starving = 0
            return None

        def who_and_why() -> str:
            return f"{who()}{self._health.words()}"

        try:
            sleep = self._delegate.wait
            return sleep_until_found(look, sleep, self._timeout, who_and_why, until, looks_again_after) or []
        except (DeadlineExceeded, PeerLost):
            self._failed = True
            raise

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        if not self._closed:
            self._delegate.wake()

    def take(self, edge: Edge) -> Payload:
        """The payload of an edge that has arrived."""
        with self._lock:
            note = self._inbox.take(edge)
            memory = self._delegate.in_memory
            spec = self._specs.read(memory.map[note.offset : note.offset + note.spec_bytes])
            start = note.offset + spec_room(note.spec_bytes)
            returned = self._inbox.lend(note) if self._copying.lends else None
            if returned is not None:
                return SlotPacket(spec, memory.lend(start, note.payload_bytes, returned)).leaves_in_place()
            packet = SlotPacket(spec, memory.part(start, note.payload_bytes))
            return self._copying.unpack(packet, lambda: self._inbox.free(note))

    # What was seen.

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call, timed in the delegates."""
        with self._lock:
            self._listen()
            return self._inbox.crossings.take()

    def link_events(self) -> list[LinkDown | LinkUp]:
        """Links from this rank whose own interfaces died or came back since the last call.

        A link that is down in this sense goes on over another interface where there is one.
        """
        with self._lock:
            self._listen()
            found, self._health.events = self._health.events, []
            return found

    def also_watch(self, descriptor: int) -> None:
        """Lets `wait` look again when this descriptor is ready to be read. The delegate must have started."""
        self._delegate.also_watch(descriptor)

    @property
    def pids(self) -> dict[str, int]:
        """The delegate's process, by name, if it has started."""
        return (
            {} if not self._delegate.is_running else {f"the delegate of rank {self.rank}": self._delegate.process.pid}
        )

    # The delegate.

    def _listen(self) -> None:
        """Takes in all that the delegate told."""
        if not self._delegate.is_running:
            return
        self._copying.progress()
        self._inbox.take_back()
        for note in self._delegate.notes():
            if note.kind is DescriptorKind.MESSAGE:
                self.counters.messages += 1
                self._inbox.heard(note)
            elif note.kind is DescriptorKind.ANSWERED:
                self._outbox.answered(note)
                self._room = True
            elif note.kind is DescriptorKind.STARVED:
                self.counters.starved += 1
                self._starving = max(self._starving, note.number)
            else:
                self._health.learn(note)
