"""Messages between ranks by delegates: light processes that send and receive while the rank computes.

    rank 0: pack into a slot --> delegate ==TCP==> delegate --> slot, unpack: rank 1
                 shared memory                        shared memory

The rank only copies and writes a descriptor; nothing that happens on a link holds it up (PipeMorph, section 5). Past
the paper: messages are numbered and answered, so that each arrives once whatever happens to connections, interfaces
and delegates, in the middle of a message too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

import torch

from penstock.control.events import LinkDown, LinkUp
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord
from penstock.runtime.transport.channel import ChannelKey, Tags
from penstock.runtime.transport.delegate.boxes import DelegateInbox, Outbox
from penstock.runtime.transport.delegate.carrier.descriptor import (
    Descriptor,
    DescriptorKind,
    Lane,
    body_bytes,
    spec_room,
)
from penstock.runtime.transport.delegate.delegates import DelegateKey, Delegates, cannot
from penstock.runtime.transport.delegate.health import ConnectionHealth, Counters
from penstock.runtime.transport.delegate.payload_copies import SlotPacket, SpecCache, copying_for
from penstock.runtime.transport.inbox import BRIEFLY, FINELY

HOST_MEMORY = 1 << 30
"""Bytes of messages that may wait on their way out, and as many that came in."""
POLL_S = 0.5
"""Seconds after which a wait looks up, whatever was said."""
LATE_MESSAGES_S = 0.5
"""Seconds that what a lost rank had sent may take to come."""
FLUSH_S = 10.0
"""Seconds that `close` waits for what was sent to be there."""


class DelegateTransport:
    """One rank's end of all its links.

    Delegates are started as links need them, or ahead by `prepare`. They end when the rank ends, however it ends.

    Args:
        rank, num_ranks: of the pipeline.
        gather: everyone's value, by rank; called once, by all.
        tags: the same on all ranks.
        timeout: seconds before a wait ends with DeadlineExceeded.
        interfaces: local addresses, the preferred one first; when one dies messages go by the next.
        num_lanes: delegates of each kind and direction to begin with.
        most_lanes: as many as measured rates may ask for; the same on all ranks.
        host_memory: bytes that messages may take on their way out, and as many when they came in.
        device: where payloads that came in are to lie.
        takes_over: whether a step may go on here that another transport began, see `begin_within`.

    Raises:
        RuntimeFailure: an interface that is not of this host, too few descriptors or processes, numbers that make no
            sense.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        gather: Callable[[Any], list[Any]],
        tags: Tags,
        timeout: float,
        *,
        interfaces: Sequence[str] = ("127.0.0.1",),
        num_lanes: int = 1,
        most_lanes: int = 4,
        host_memory: int = HOST_MEMORY,
        device: torch.device | str = "cpu",
        takes_over: bool = False,
    ) -> None:
        if not hasattr(os, "eventfd"):
            raise RuntimeFailure("delegates need Linux; use transport='host'")
        if not 1 <= num_lanes <= most_lanes <= 255:
            raise RuntimeFailure(f"{num_lanes} lanes of at most {most_lanes}: give at least 1, and at most 255")
        if host_memory < 1 << 20:
            raise RuntimeFailure(f"{host_memory} bytes of host memory for delegates: give at least {1 << 20}")
        self.rank = rank
        self._tags, self._timeout = tags, timeout
        self.counters = Counters()
        place = torch.device(device)
        pinned = place.type == "cuda"
        self._delegates = Delegates(rank, num_ranks, gather, interfaces, most_lanes, host_memory, pinned)
        self._outbox = Outbox(self._delegates, num_lanes, most_lanes)
        self._inbox = DelegateInbox(self._delegates, self.counters, takes_over)
        self._health = ConnectionHealth(rank, self._delegates.addresses, self.counters)
        self._num_lanes = num_lanes
        self._specs = SpecCache()
        self._step = self._digest = 0
        self._signatures: Sequence[str] = ()
        self._arrived: list[Edge] = []
        self._starving: dict[DelegateKey, int] = {}
        self._full = self._room = self._failed = self._closed = False
        # One thread of the rank's uses this; the other one is the delegates' own.
        self._lock = threading.RLock()
        self._copying = copying_for(place, self._lock)
        self._delegates.supervise(self._lock, self._restart)
        try:
            self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            self._delegates.close()
            raise cannot(error) from None
        self._delegates.also_watch(self._waker)

    # Steps.

    def prepare(self, links: Iterable[tuple[int, int]]) -> None:
        """Starts and connects the delegates of this rank's links (pairs of ranks, in either order), both ways, before
        they are needed.
        """
        with self._lock:
            for peer in {a + b - self.rank for a, b in links if self.rank in (a, b)}:
                for kind in (0, 1):
                    for place in range(self._num_lanes):
                        self._inbox.expect(Lane(peer, self.rank, kind, place))
                    self._outbox.connect(peer, kind)

    def begin(self, step: StepMessages) -> None:
        """Starts a step. `threaded` and `window` make no difference here: all arrivals are told as they come, and
        host memory bounds what is under way.

        Raises:
            RuntimeFailure: messages came that are not of this step.
        """
        self._step += 1
        self._digest, self._signatures = step.digest & 0xFFFFFFFF, step.signatures
        with self._lock:
            self._listen()
            self._outbox.grow()
            self._arrived = self._inbox.begin(self._step, self._digest, step.expected, self._num_lanes)

    def skip(self) -> None:
        """A step begins in which this transport carries nothing, unless `begin_within` says otherwise."""
        self._step += 1

    def begin_within(self, step: StepMessages) -> None:
        """The step that began goes on here: `expected` is still to come too. What else there is of it, or of steps
        before, has come in another way, and is dropped where it comes once more.
        """
        self._digest, self._signatures = step.digest & 0xFFFFFFFF, step.signatures
        with self._lock:
            self._listen()
            self._arrived += self._inbox.begin_within(self._step, self._digest, step.expected, self._num_lanes)

    def end(self) -> None:
        """Ends a step. What was sent goes on its way: its slots are kept until it is there."""
        with self._lock:
            self._listen()

    def close(self) -> None:
        """Waits until what was sent is there, unless a wait failed before, then ends the delegates."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + (0.0 if self._failed else min(FLUSH_S, self._timeout))
        try:
            self._copying.flush()
            while time.monotonic() < end:
                with self._lock:
                    self._listen()
                    if not self._outbox.targets() - self._health.gone():
                        break
                self._pause(min(POLL_S, end - time.monotonic()))
        except RuntimeFailure:
            pass  # nothing more can be done for what is on its way
        finally:
            self._delegates.stop()
            self._copying.close()
            self._delegates.close()
            os.close(self._waker)

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        """Sends; False where host memory is full.

        Raises:
            RuntimeFailure: a message larger than all host memory for delegates, or one that can't travel.
        """
        with self._lock:
            return self._send(edge, target, payload, perf_counter_ns())

    def _send(self, edge: Edge, target: int, payload: Payload, sent: int) -> bool:
        key = ChannelKey.of(edge)
        spec, spec_bytes = self._specs.of(payload, key, self._signatures[edge.consumer.microbatch])
        size = body_bytes(len(spec_bytes), spec.num_bytes)
        kind = 0 if key.forward else 1
        found = self._outbox.take(target, kind, size)
        if found is None:
            self._listen()
            found = self._outbox.take(target, kind, size)
            if found is None:
                self._full, self._room = True, False
                return False
        lane, (offset, capacity) = found
        memory = self._delegates.out_memory
        memory.map[offset : offset + len(spec_bytes)] = spec_bytes
        packet = SlotPacket(spec, memory.part(offset + spec_room(len(spec_bytes)), spec.num_bytes))
        tag = self._tags.message(edge)
        message = Descriptor(
            DescriptorKind.SEND,
            lane,
            tag=tag,
            step=self._step,
            digest=self._digest,
            sent=sent,
            offset=offset,
            capacity=capacity,
            spec_bytes=len(spec_bytes),
            payload_bytes=spec.num_bytes,
        )
        self._copying.pack(packet, payload, lambda: self._outbox.post(message))
        return True

    # Receiving.

    def arrivals(self) -> list[Edge]:
        """Edges whose messages came in since the last call.

        Raises:
            RuntimeFailure: one came that is not expected.
        """
        with self._lock:
            self._listen()
            edges, self._arrived = self._arrived, []
            return edges

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until a message has come in, until there is room again after a `send` that found none, or until
        another descriptor that is watched is ready.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        end = time.monotonic() + self._timeout
        lost_since: float | None = None
        while True:
            edges = self.arrivals()
            if edges or (self._full and self._room):
                self._full = False
                return edges
            now = time.monotonic()
            with self._lock:
                lost = self._health.gone() & (self._inbox.owed() | self._outbox.targets())
                lost_since = (lost_since or now) if lost else None
                if lost_since is not None and now - lost_since >= LATE_MESSAGES_S:
                    self._failed = True
                    raise PeerLost(f"rank {min(lost)} is gone, its process has ended: {who()}")
                if now >= end:
                    self._failed = True
                    words = self._health.words()
                    why = f" ({words})" if words else ""
                    raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who()}{why}")
                self._feed()
            left, soon = min(POLL_S, end - now), FINELY
            if until is not None:
                soon = (until - perf_counter_ns()) / 1e9
                if soon <= 0:
                    return []
                left = min(left, soon - FINELY / 2) if soon >= FINELY else 0.0
            if self._pause(left):
                with suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
                return self.arrivals()
            if soon < FINELY:
                time.sleep(min(soon, BRIEFLY))

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        if not self._closed:
            os.eventfd_write(self._waker, 1)

    def take(self, edge: Edge) -> Payload:
        """The payload of an edge that has arrived.

        Raises:
            RuntimeFailure: its shapes can't be read.
        """
        with self._lock:
            held = self._inbox.take(edge)
            note = held.note
            memory = self._delegates.memory(held.key)
            spec_bytes = memory.map[note.offset : note.offset + note.spec_bytes]
            spec = self._specs.read(spec_bytes, note.payload_bytes)
            start = note.offset + spec_room(note.spec_bytes)
            returned = self._inbox.lend(held) if self._copying.lends else None
            if returned is not None:
                return SlotPacket(spec, memory.lend(start, note.payload_bytes, returned)).leaves_in_place()
            packet = SlotPacket(spec, memory.part(start, note.payload_bytes))
            return self._copying.unpack(packet, lambda: self._inbox.free(held))

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

    @property
    def notices(self) -> list[str]:
        """What a person should know of interfaces that were left for others."""
        return self._health.notices

    def also_watch(self, descriptor: int) -> None:
        """Lets `wait` return, too, when this descriptor is ready to be read."""
        self._delegates.also_watch(descriptor)

    @property
    def pids(self) -> dict[str, int]:
        """The delegates' processes, by name."""
        with self._lock:
            found = [self._delegates.get(key) for key in self._delegates.started_keys()]
            return {delegate.name: delegate.pid for delegate in found}

    # Delegates.

    def _pause(self, seconds: float) -> bool:
        """Sleeps until a delegate says something; returns whether another descriptor is ready."""
        other = self._delegates.wait(seconds)
        with self._lock:
            self._delegates.reset_wakeups()
        return other

    def _restart(self, key: DelegateKey) -> None:
        """Starts a dead delegate again, after all that it still told was taken in."""
        self._listen()
        if key.outgoing:
            self.counters.resent += self._outbox.restart(key)
        else:
            self._inbox.restart(key)
        self._starving.pop(key, None)

    def _listen(self) -> None:
        """Takes in all that the delegates told."""
        if self._delegates.error is not None:
            raise self._delegates.error
        self._copying.progress()
        self._inbox.take_back()
        for key, note in self._delegates.notes():
            if note.kind is DescriptorKind.MESSAGE:
                if (edge := self._inbox.came(key, note)) is not None:
                    self._arrived.append(edge)
            elif note.kind is DescriptorKind.ANSWERED:
                self._room = self._outbox.answered(note) or self._room
            elif note.kind is DescriptorKind.STARVED:
                self.counters.starved += 1
                self._starving[key] = note.number
            else:
                self._health.learn(note)
        self.counters.restarts = self._delegates.restarts

    def _feed(self) -> None:
        """Lets starving delegates have more than their share: the rank may stand still for just that."""
        for key, num_bytes in list(self._starving.items()):
            if self._inbox.grant(key, 2 * num_bytes):
                del self._starving[key]
        for key in self._delegates.started_keys():
            if not key.outgoing:
                self._inbox.flush(key)
