"""Messages between processes, over a torch.distributed process group (gloo), or from device to device (see `nccl`).

Sends are asynchronous and from a flat copy. So a slow link never holds up computation, and the stage's own tensors
are free at once. The copy is released when the channel of its answers says that it was received (each preamble
carries that count), or at the latest when the step ends. Small ones are released together.

Receives are posted ahead: of small messages all of a step's together, of others a few per channel. More are posted if
messages are sent before their receive is posted, because such a message crosses the link only after news of its
receive has crossed it. That needs buffers of the right size, so the sender says what messages look like (their spec):
by itself before the first one of a microbatch of some shapes, which promises the same spec for all such microbatches,
and in the place of a message that breaks this promise.

    tag of specs    | notice | spec of F0 |
    tag of F0       | F0 |                           a receive of the spec's size was posted, and so it was for
    tag of F1       | F1 |                           F1, whose microbatch has the same shapes
    tag of F2       | notice | spec of F2 | F2 |     other shapes than F0's, though its microbatch has the same

How a rank learns of arrivals depends on its dispatch. A frozen rank waits for only the messages that its next op
needs. A dynamic rank must know which messages have come: one thread per channel waits and reports. The same holds for
a rank that measures its links. Otherwise it would not see when messages came that it did not wait for.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.mesh.collective import WeakGroup, explain
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import SHORTEST_WAIT, CrossingLog, StepMessages, TransferRecord
from penstock.runtime.transport.channel import ChannelKey, Tags, why_unexpected
from penstock.runtime.transport.inbox import POLL_S, THREADS_WAIT, Inbox
from penstock.runtime.transport.nccl import DeviceLines
from penstock.runtime.transport.wire_format import Packet, Preamble, WireSpec

AHEAD = 2
"""Receives posted ahead in each channel: one being filled and one more, so that no sender waits to start."""
AHEAD_BYTES = 1 << 20
"""Bytes of small messages for which receives are posted ahead in each channel, and whose copies are kept. To post all
of a step's together takes about a third of the time that it takes to post each between ops."""
MOST_AHEAD = 16
"""Receives posted ahead where a link is so late that more messages than that are under way."""
NOTICE = WireSpec((), "0")
"""The spec of a notice: a preamble alone."""


@dataclass(slots=True)
class PacketPool:
    """Packets of one spec that both ends of a channel know.

    Attributes:
        make: makes one more. spare: those that are free.
        ahead: how many receives are posted ahead at the least, and how many sent packets are kept.
    """

    spec: WireSpec
    make: Callable[[WireSpec], Packet]
    ahead: int
    spare: list[Packet] = field(default_factory=list)

    def packet(self) -> Packet:
        return self.spare.pop() if self.spare else self.make(self.spec)


class PendingSend(NamedTuple):
    """A message that was not let go: all its sends, and its packet."""

    works: Sequence[Any]
    packet: Packet
    pool: PacketPool


@dataclass(slots=True)
class OutgoingChannel:
    """The sending end of a channel.

    Attributes:
        answers: the channel that brings them. is_direct: whether payloads go from device to device.
        pools: by signature, what the receiver has been told.
        under_way: this step's messages that were not let go; num_released: how many were.
    """

    key: ChannelKey
    answers: ChannelKey
    is_direct: bool
    pools: dict[str, PacketPool] = field(default_factory=dict)
    under_way: deque[PendingSend] = field(default_factory=deque)
    num_released: int = 0


@dataclass(slots=True)
class PostedReceive:
    """A receive under way.

    Attributes:
        since: when it was posted, in nanoseconds of the monotonic clock.
        follows: whether it was posted because another message of the channel had arrived.
        num_taken: how many of this rank's answers the sender had received when it sent the message.
    """

    edge: Edge
    tag: int
    work: Any
    packet: Packet
    pool: PacketPool
    since: int
    follows: bool
    num_taken: int = 0


@dataclass(slots=True)
class IncomingChannel:
    """The receiving end of a channel.

    Attributes:
        peer: the rank that sends. answered: the channel whose messages these answer.
        is_direct: whether payloads come from device to device.
        pools: by signature, what the sender has told.
        ahead: receives posted ahead of large messages.
        waiting: this step's messages with no receive posted yet; posted: those with one.
        num_received: messages received in this step.
        room: for messages that came in and were not taken yet, where their number has a bound.
    """

    key: ChannelKey
    peer: int
    answered: ChannelKey
    is_direct: bool
    pools: dict[str, PacketPool] = field(default_factory=dict)
    ahead: int = AHEAD
    waiting: deque[tuple[Edge, int]] = field(default_factory=deque)
    posted: deque[PostedReceive] = field(default_factory=deque)
    num_received: int = 0
    room: threading.Semaphore | None = None


class GlooTransport:
    """One rank's end of all its channels.

    Args:
        group: the process group; ranks of the schedule are ranks of the group.
        tags: the same on all ranks.
        timeout: seconds before a wait ends with DeadlineExceeded.
        lines: by which payloads go from device to device; by host memory and the group where not given.
        keeps: whether what a step sent is let go when the next begins, by when all have taken what they were sent (a
            step's losses are summed in between): no wait for that can be broken off where a link is lost.
        ahead: by how many nanoseconds this rank's clock is ahead of each other rank's; one clock where not given.

    Attributes:
        rank: whose end this is. inbox: where its threads report.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tags: Tags,
        timeout: float,
        lines: DeviceLines | None = None,
        keeps: bool = False,
        ahead: Sequence[int] = (),
    ) -> None:
        self._group, self._tags, self._timeout = WeakGroup(group), tags, timeout
        self._lines, self._keeps, self._ahead = lines, keeps, ahead
        self.rank = group.rank()
        self.inbox = Inbox()
        self.fileno = self.inbox.fileno
        self._arrival_timeout = timeout
        self._threaded = False
        self._window: Mapping[int, int] = {}
        self._step = self._tag_shift = 0
        self._signatures: Sequence[str] = ()
        self._incoming: dict[ChannelKey, IncomingChannel] = {}
        self._outgoing: dict[tuple[ChannelKey, int], OutgoingChannel] = {}
        self._routes: dict[tuple[Edge, int], tuple[OutgoingChannel, int]] = {}
        self._ready: dict[Edge, Payload] = {}
        self._threads: list[threading.Thread] = []
        self._log = CrossingLog()

    # Steps.

    def begin(self, step: StepMessages) -> None:
        """Starts a step and posts its first receives. Where a window is full, `send` waits for the oldest message to
        be taken.
        """
        self._step += 1
        self._tag_shift = self._tags.shift(step.digest)
        self._signatures, self._threaded, self._window = step.signatures, step.threaded, step.window
        self._arrival_timeout = self._timeout * (THREADS_WAIT if step.threaded else 1)
        if self._keeps:
            self._let_go()
        for channel in self._incoming.values():
            channel.num_received = 0
        for key, peer, messages in step.expected:
            known = self._incoming.get(key)
            channel = self._incoming[key] = known or IncomingChannel(key, peer, key.reverse(), self._is_direct(key))
            channel.waiting.extend(messages)
            channel.ahead = max(AHEAD, channel.ahead - 1)
            bound = step.window.get(key.slot) if key.slot == 0 else None
            channel.room = None if bound is None else threading.Semaphore(bound)
            if step.threaded:
                thread = threading.Thread(target=self._receive_all, args=(channel, len(messages)), daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._post(channel)

    def end(self) -> None:
        """Ends a step: returns when all that was sent has been taken, or is kept."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if not self._keeps:
            self._let_go()
        used = set(self._signatures)
        ends: list[IncomingChannel | OutgoingChannel] = [*self._incoming.values(), *self._outgoing.values()]
        for channel in ends:
            for signature, pool in channel.pools.items():
                if signature not in used:
                    pool.spare.clear()

    def close(self) -> None:
        """Nothing is left behind: a step's threads end with it."""
        if self._lines is not None:
            self._lines.close()
        self.inbox.close()

    def _is_direct(self, key: ChannelKey) -> bool:
        """Whether a channel's payloads go from device to device. Tokens always go by host memory."""
        return self._lines is not None and key.slot >= 0

    def _new_pool(self, channel: OutgoingChannel | IncomingChannel, spec: WireSpec) -> PacketPool:
        """Packets of a channel, where its payloads are to lie."""
        if self._lines is not None and channel.is_direct:
            return PacketPool(spec, self._lines.packet, 0)
        return PacketPool(spec, Packet, AHEAD_BYTES // spec.num_bytes)

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        route = self._routes.get((edge, target))
        if route is None:
            route = self._routes[edge, target] = self._route(edge, target)
        channel, tag = route
        window = self._window.get(edge.slot) if self._window else None
        if window is not None and len(channel.under_way) >= window and not self._keeps:
            self._release(channel, target, channel.num_released + 1)
        signature, works = self._signatures[edge.consumer.microbatch], []
        pool = promised = channel.pools.get(signature)
        if pool is None or not pool.spec.fits(payload):
            pool = self._new_pool(channel, WireSpec.of(payload))
            channel.pools.setdefault(signature, pool)
            spec_tag = tag if promised is not None else self._tags.of_specs(channel.key)
            works = self._send_spec(target, spec_tag, signature, pool.spec)
        answers = self._incoming.get(channel.answers)
        num_received = answers.num_received if answers is not None and answers.peer == target else 0
        packet = pool.packet()
        packet.pack(payload)
        packet.announce(Preamble(tag, self._step, num_received, perf_counter_ns()))
        works.append(self._isend(packet.head if channel.is_direct else packet.buffer, target, tag))
        if self._lines is not None and channel.is_direct:
            works.append(self._lines.send(channel.key, target, packet, self._timeout))
        channel.under_way.append(PendingSend(works, packet, pool))
        return True

    def _route(self, edge: Edge, target: int) -> tuple[OutgoingChannel, int]:
        """The channel of an edge, and the tag of its message."""
        key = ChannelKey.of(edge)
        fresh = OutgoingChannel(key, key.reverse(), self._is_direct(key))
        return self._outgoing.setdefault((key, target), fresh), self._tags.message(edge)

    def _send_spec(self, target: int, tag: int, signature: str, spec: WireSpec) -> list[Any]:
        """Says what messages of microbatches with a signature look like, or the one that follows under its tag."""
        text = json.dumps(signature).encode() + b"\n" + spec.to_bytes()
        notice = Packet(NOTICE)
        notice.announce(Preamble(tag, self._step, 0, 0, len(text)))
        parts = notice.buffer, torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [self._isend(part, target, tag) for part in parts]

    def _isend(self, buffer: Tensor, target: int, tag: int) -> Any:
        try:
            return self._group().send([buffer], target, tag + self._tag_shift)
        except RuntimeError as error:
            raise explain(error, self.rank, target, "a message to leave", self._timeout) from None

    def _release(self, channel: OutgoingChannel, target: int, num_taken: int) -> None:
        """Lets go of a channel's first messages, up to the `num_taken`-th of the step."""
        while channel.num_released < num_taken and channel.under_way:
            works, packet, pool = channel.under_way.popleft()
            for work in works:
                self._wait(work, target, "its messages to be taken", self._timeout)
            pool.spare.append(packet)
            channel.num_released += 1

    def _let_go(self) -> None:
        """Lets go of all that was sent in a step, also where its links have failed since."""
        errors = []
        for (_, target), channel in self._outgoing.items():
            while channel.under_way:
                try:
                    self._release(channel, target, channel.num_released + 1)
                except RuntimeFailure as error:
                    errors.append(error)
            channel.num_released = 0
        if errors:
            raise errors[0]

    # Receiving.

    def arrivals(self) -> list[Edge]:
        return self.inbox.poll() or [] if self._threaded else []

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until at least one message has come in (one of `awaited`, where the rank is frozen).

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        if self._threaded:
            return self.inbox.wait(self._timeout, who, until)
        for edge in awaited:
            if edge not in self._ready:
                channel = self._incoming[ChannelKey.of(edge)]
                return self._accept(channel, self._next(channel))
        raise RuntimeFailure(f"{who()}, and no message is due that it could wait for")

    def poll(self, who: Callable[[], str]) -> list[Edge] | None:
        """What ends a wait in such a step: what its threads have reported. None for nothing."""
        return self.inbox.poll()

    def looks_again_after(self) -> float:
        return POLL_S

    def wake(self) -> None:
        """Ends this rank's wait, or the next one, in a step whose arrivals are reported; any thread may call it."""
        self.inbox.put(list)

    def take(self, edge: Edge) -> Payload:
        if self._window and edge.slot == 0 and (room := self._incoming[ChannelKey.of(edge)].room) is not None:
            room.release()
        return self._ready.pop(edge)

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call, those of which it is known when: all where threads wait."""
        return self._log.take()

    def _receive_all(self, channel: IncomingChannel, count: int) -> None:
        """A thread's work: waits for a channel's messages in order and reports each."""
        try:
            for _ in range(count):
                seconds = self._arrival_timeout
                if channel.room is not None and not channel.room.acquire(timeout=seconds):
                    raise DeadlineExceeded(
                        f"rank {self.rank} took nothing that came from rank {channel.peer} for {seconds:g} s"
                    )
                self.inbox.put(partial(self._accept, channel, self._next(channel)))
        except BaseException as error:
            self.inbox.fail(error)

    def _post(self, channel: IncomingChannel, may_wait: bool = False, follows: bool = False) -> None:
        """Posts receives some ahead. Where a spec is not known, it waits for that to come, or posts no more."""
        waiting, posted = channel.waiting, channel.posted
        while waiting:
            edge, tag = waiting[0]
            pool = channel.pools.get(self._signatures[edge.consumer.microbatch])
            if pool is None:
                if not may_wait or posted:
                    return
                self._learn(channel, edge)
                continue
            if len(posted) >= max(channel.ahead, pool.ahead):
                return
            waiting.popleft()
            packet, since = pool.packet(), perf_counter_ns()
            work = self._irecv(packet.head if channel.is_direct else packet.buffer, channel.peer, tag)
            posted.append(PostedReceive(edge, tag, work, packet, pool, since, follows))

    def _learn(self, channel: IncomingChannel, edge: Edge) -> None:
        """Takes in the next spec of a channel that goes by itself."""
        tag, notice = self._tags.of_specs(channel.key), Packet(NOTICE)
        self._wait_to_come(notice.buffer, channel, tag, edge)
        signature, spec = self._read_spec(channel, tag, edge, notice.preamble().spec_bytes)
        channel.pools[signature] = self._new_pool(channel, spec)

    def _read_spec(self, channel: IncomingChannel, tag: int, edge: Edge, spec_bytes: int) -> tuple[str, WireSpec]:
        """Takes in the spec that follows a notice, and the signature that it is of."""
        text = torch.empty(spec_bytes, dtype=torch.uint8, device="cpu")
        self._wait_to_come(text, channel, tag, edge)
        signature, _, spec = text.numpy().tobytes().partition(b"\n")
        return json.loads(signature), WireSpec.from_bytes(spec)

    def _next(self, channel: IncomingChannel) -> PostedReceive:
        """Waits for the next message of a channel, and posts a receive for one after it."""
        if not channel.posted:
            self._post(channel, may_wait=True)
        posted, peer = channel.posted.popleft(), channel.peer
        start = perf_counter_ns()
        self._wait(posted.work, peer, posted.edge, self._arrival_timeout)
        now = perf_counter_ns()
        tag, step, posted.num_taken, sent, spec_bytes = posted.packet.preamble()
        if tag != posted.tag or step != self._step:
            raise RuntimeFailure(why_unexpected(self.rank, self._step, peer, step, tag))
        if spec_bytes:
            self._receive_changed(channel, posted, spec_bytes)
        elif posted.since > sent + (self._ahead[peer] if self._ahead else 0):
            # It waited for its receive, and so tells nothing about the link.
            if posted.follows:
                channel.ahead = min(channel.ahead + 1, MOST_AHEAD)
        elif not channel.is_direct and (self._threaded or now - start > SHORTEST_WAIT):
            # Only who waits when a message comes can tell when that was: threads do all the time.
            self._log.add(peer, self.rank, posted.packet.spec.carried_bytes, sent, posted.since, now, posted.edge)
        if self._lines is not None and channel.is_direct:
            now, size = perf_counter_ns(), posted.packet.spec.carried_bytes
            work = self._lines.receive(channel.key, peer, posted.packet, self._timeout)
            self._wait(work, peer, posted.edge, self._arrival_timeout)
            self._log.add(peer, self.rank, size, sent, now, perf_counter_ns(), posted.edge)
        if channel.waiting:
            self._post(channel, follows=True)
        return posted

    def _receive_changed(self, channel: IncomingChannel, posted: PostedReceive, spec_bytes: int) -> None:
        """Receives a message in whose place a notice came, as it is not what was promised."""
        posted.pool.spare.append(posted.packet)
        _, spec = self._read_spec(channel, posted.tag, posted.edge, spec_bytes)
        posted.pool = self._new_pool(channel, spec)
        posted.packet = packet = posted.pool.packet()
        self._wait_to_come(packet.head if channel.is_direct else packet.buffer, channel, posted.tag, posted.edge)
        posted.num_taken = packet.preamble().received

    def _wait_to_come(self, buffer: Tensor, channel: IncomingChannel, tag: int, edge: Edge) -> None:
        """Receives what is not posted ahead."""
        self._wait(self._irecv(buffer, channel.peer, tag), channel.peer, edge, self._arrival_timeout)

    def _accept(self, channel: IncomingChannel, posted: PostedReceive) -> list[Edge]:
        """Makes a message that came in ready to be taken."""
        answered = self._outgoing.get((channel.answered, channel.peer))
        sent = () if answered is None else answered.under_way
        if answered is not None and sent and len(sent) > sent[0].pool.ahead:
            # This may fail where links do. Then this message counts as not come.
            self._release(answered, channel.peer, posted.num_taken)
        channel.num_received += 1
        self._ready[posted.edge] = posted.packet.unpack()
        if self._lines is not None and channel.is_direct:
            self._lines.used(posted.packet)
        posted.pool.spare.append(posted.packet)
        return [posted.edge]

    def _irecv(self, buffer: Tensor, source: int, tag: int) -> Any:
        try:
            return self._group().recv([buffer], source, tag + self._tag_shift)
        except RuntimeError as error:
            raise explain(error, self.rank, source, "a message", self._timeout) from None

    def _wait(self, work: Any, peer: int, what: Edge | str, seconds: float) -> None:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise explain(error, self.rank, peer, str(what), seconds) from None
