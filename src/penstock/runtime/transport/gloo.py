"""Messages between processes, over a torch.distributed process group (gloo), or from device to device (see `nccl`).

Sends are asynchronous and from a flat copy. So a slow link never holds up computation, and the stage's own tensors
are free at once. Receives are posted ahead: of small messages all of a step's together, of others a few per channel.
More are posted if messages are sent before their receive is posted, because such a message crosses the link only
after news of its receive has crossed it.

The copy of a sent message is released when the channel of its answers says that it was received (each preamble
carries that count), or at the latest when the step ends. Small ones are released together.

How a rank learns of arrivals depends on its dispatch. A frozen rank waits for only the messages that its next op
needs. A dynamic rank must know which messages have come: one thread per channel waits and reports. The same holds for
a rank that measures its links. Otherwise it would not see when messages came that it did not wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import Empty
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.mesh.collective import WeakGroup, explain
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import SHORTEST_WAIT, CrossingLog, StepMessages, TransferRecord
from penstock.runtime.transport.channel import (
    ChannelKey,
    ExpectedMessages,
    IncomingChannel,
    OutgoingChannel,
    PacketPool,
    PendingSend,
    PostedReceive,
    Tags,
)
from penstock.runtime.transport.inbox import THREADS_WAIT, Inbox
from penstock.runtime.transport.nccl import AnnouncedReceive, DeviceLines
from penstock.runtime.transport.wire_format import (
    HEADER_BYTES,
    DevicePacket,
    Packet,
    Preamble,
    WireSpec,
    header_rest,
    pack_header,
    unpack_header,
)

AHEAD = 2
"""Receives posted ahead in each channel: one being filled and one more, so that no sender waits to start."""
AHEAD_BYTES = 1 << 20
"""Bytes of small messages for which receives are posted ahead in each channel, and whose copies are kept. To post all
of a step's together takes about a third of the time that it takes to post each between ops."""
KEPT_PLANS = 16
"""Kinds of steps of which it is remembered what they bring."""
MOST_AHEAD = 16
"""Receives posted ahead where a link is so late that more messages than that are under way."""


class GlooTransport:
    """One rank's end of all its channels.

    Args:
        group: the process group; ranks of the schedule are ranks of the group.
        tags: the same on all ranks.
        timeout: seconds before a wait ends with DeadlineExceeded.
        lines: by which payloads go from device to device; by host memory and the group where not given.
        keeps: whether what a step sent is let go when the next begins, by when all have taken what they were sent (a
            step's losses are summed in between): no wait for that can be broken off where a link is lost.

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
    ) -> None:
        self._group, self._tags, self._timeout = WeakGroup(group), tags, timeout
        self._lines = lines
        self._limit = self._arrival_limit = timedelta(seconds=timeout)
        self.rank = self._rank = group.rank()
        self._keeps = keeps
        self._expected: Sequence[ExpectedMessages] = ()
        self._threaded = False
        self._window: Mapping[int, int] = {}
        self._step = 0
        self._tag_shift = 0
        self._signatures: Sequence[str] = ()
        self._incoming: dict[ChannelKey, IncomingChannel] = {}
        self._outgoing: dict[tuple[ChannelKey, int], OutgoingChannel] = {}
        self._routes: dict[tuple[Edge, int], tuple[OutgoingChannel, int]] = {}
        self._ready: dict[Edge, Payload] = {}
        self._plans: dict[int, tuple[Sequence[ExpectedMessages], dict[Edge, IncomingChannel]]] = {}
        self._channels: Mapping[Edge, IncomingChannel] = {}
        self.inbox = Inbox()
        self._threads: list[threading.Thread] = []
        self._log = CrossingLog()

    def begin(self, step: StepMessages) -> None:
        """Starts a step and posts its first receives. Where a window is full, `send` waits for the oldest message to
        be taken.
        """
        self._step += 1
        self._tag_shift = self._tags.shift(step.digest)
        self._expected, self._signatures = step.expected, step.signatures
        self._threaded, self._window = step.threaded, step.window
        self._arrival_limit = self._limit * THREADS_WAIT if step.threaded else self._limit
        self._channels = self._channels_of(step.expected)
        for incoming in self._incoming.values():
            incoming.received = 0
        if self._keeps:
            self._let_go()
        for key, _, messages in step.expected:
            channel = self._incoming[key]
            channel.waiting.extend(messages)
            used = {step.signatures[edge.consumer.microbatch] for edge, _ in messages}
            channel.headers_due = sum(signature not in channel.pools for signature in used)
            channel.received = 0
            channel.ahead = max(AHEAD, channel.ahead - 1)
            bound = step.window.get(key.slot) if key.slot == 0 else None
            channel.room = None if bound is None else threading.Semaphore(bound)
            if step.threaded:
                thread = threading.Thread(target=self._receive_all, args=(channel, len(messages)), daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._post(channel, wait_for_headers=False)

    def _channels_of(self, expected: Sequence[ExpectedMessages]) -> Mapping[Edge, IncomingChannel]:
        """The channel of each message that a step brings; worked out once for each kind of step."""
        known, channels = self._plans.get(id(expected), (None, {}))
        if known is not expected:
            if len(self._plans) > KEPT_PLANS:
                self._plans.clear()
            channels = {}
            for key, peer, messages in expected:
                channel = self._incoming.get(key)
                if channel is None:
                    channel = self._incoming[key] = IncomingChannel(key, peer, is_direct=self._is_direct(key))
                    self._acquaint(key.reverse(), peer)
                channels.update((edge, channel) for edge, _ in messages)
            self._plans[id(expected)] = expected, channels
        return channels

    def end(self) -> None:
        """Ends a step: returns when all that was sent has been taken, or is kept."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        used = set(self._signatures)
        if not self._keeps:
            self._let_go()
        ends: list[IncomingChannel | OutgoingChannel] = [*self._incoming.values(), *self._outgoing.values()]
        for channel_end in ends:
            for signature, pool in channel_end.pools.items():
                if signature not in used:
                    pool.spare.clear()

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        route = self._routes.get((edge, target))
        if route is None:
            route = self._routes[edge, target] = self._route(edge, target)
        channel, tag = route
        window = self._window.get(edge.slot) if self._window else None
        if window is not None and len(channel.under_way) >= window and not self._keeps:
            self._release(channel, channel.released + 1)
        signature = self._signatures[edge.consumer.microbatch]
        pool = channel.pools.get(signature)
        if pool is None or not pool.spec.fits(payload):
            self._introduce(channel, pool, signature, tag, edge, payload)
            return True
        packet = pool.packet()
        packet.pack(payload)
        packet.announce(self._preamble(channel, tag))
        channel.under_way.append(PendingSend(edge, self._send_packet(channel, packet, tag), packet, pool))
        return True

    def _introduce(
        self,
        channel: OutgoingChannel,
        pool: PacketPool | None,
        signature: str,
        tag: int,
        edge: Edge,
        payload: Payload,
    ) -> None:
        """Sends a message of a spec that the receiver does not know, or expects no more."""
        fresh = self._new_pool(channel, WireSpec.of(payload))
        packet, header = fresh.packet(), pack_header(signature, fresh.spec)
        packet.pack(payload)
        preamble = self._preamble(channel, tag)
        if pool is None:
            channel.pools[signature] = fresh
            works = [self._isend(part, channel.peer, self._tags.header(channel.key)) for part in header]
        else:
            # Not what the shapes promised: a message of the size the receiver waits for says so, the rest follows.
            promised = pool.packet()
            promised.announce(preamble._replace(changed=1))
            works = self._send_packet(channel, promised, tag)
            works += [self._isend(part, channel.peer, tag) for part in header]
        packet.announce(preamble)
        works += self._send_packet(channel, packet, tag)
        channel.under_way.append(PendingSend(edge, works, packet, fresh))

    def _preamble(self, channel: OutgoingChannel, tag: int) -> Preamble:
        """Of a message that is copied from where it was made, and leaves now."""
        received = 0 if channel.answers is None else channel.answers.received
        return Preamble(tag, self._step, received, perf_counter_ns())

    def _route(self, edge: Edge, target: int) -> tuple[OutgoingChannel, int]:
        key = ChannelKey.of(edge)
        channel = self._outgoing.get((key, target))
        if channel is None:
            channel = self._outgoing[key, target] = OutgoingChannel(key, target, is_direct=self._is_direct(key))
            self._acquaint(key, target)
        return channel, self._tags.message(edge)

    def _acquaint(self, key: ChannelKey, peer: int) -> None:
        """Lets the channel `key` to a rank and that of its answers know each other, once both are there."""
        outgoing, answers = self._outgoing.get((key, peer)), self._incoming.get(key.reverse())
        if outgoing is not None and answers is not None and answers.peer == peer:
            outgoing.answers, answers.answered = answers, outgoing

    def _new_pool(self, channel: OutgoingChannel | IncomingChannel, spec: WireSpec) -> PacketPool:
        """A spec of a channel, with buffers where its payloads are to lie."""
        if self._lines is not None and channel.is_direct:
            return PacketPool(spec, self._lines.packet)
        return PacketPool(spec, Packet, AHEAD_BYTES // spec.num_bytes)

    def _is_direct(self, key: ChannelKey) -> bool:
        """Whether a channel's payloads go from device to device. Tokens always go by host memory."""
        return self._lines is not None and key.slot >= 0

    def _send_packet(self, channel: OutgoingChannel, packet: Packet, tag: int) -> list[Any]:
        """Starts to send a packet; what to wait for. One that goes from device to device is announced first."""
        if self._lines is None or not isinstance(packet, DevicePacket):
            return [self._isend(packet.buffer, channel.peer, tag)]
        return [self._isend(packet.head, channel.peer, tag), self._lines.send(channel, packet, self._timeout)]

    def _receive_packet(self, channel: IncomingChannel, packet: Packet, tag: int) -> Any:
        if self._lines is None or not isinstance(packet, DevicePacket):
            return self._irecv(packet.buffer, channel.peer, tag)
        announced = self._irecv(packet.head, channel.peer, tag)
        return AnnouncedReceive(announced, partial(self._lines.receive, channel, packet, self._timeout))

    def _isend(self, buffer: Tensor, target: int, tag: int) -> Any:
        try:
            return self._group().send([buffer], target, tag + self._tag_shift)
        except RuntimeError as error:
            raise explain(error, self._rank, target, "a message to leave", self._timeout) from None

    def _release(self, channel: OutgoingChannel, taken: int) -> None:
        """Lets go of a channel's first messages, up to the `taken`-th of the step."""
        while channel.released < taken and channel.under_way:
            _, works, packet, pool = channel.under_way.popleft()
            for work in works:
                self._wait(work, channel.peer, "its messages to be taken")
            pool.spare.append(packet)
            channel.released += 1

    def _let_go(self) -> None:
        """Lets go of all that was sent in a step, also where its links have failed since."""
        errors = []
        for channel in self._outgoing.values():
            while channel.under_way:
                try:
                    self._release(channel, channel.released + 1)
                except RuntimeFailure as error:
                    errors.append(error)
            channel.released = channel.taken = 0
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
            left = self._timeout if until is None else max(0.0, (until - perf_counter_ns()) / 1e9)
            try:
                return self.inbox.wait(min(left, self._timeout))
            except Empty:
                if left < self._timeout:
                    return []
                raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who()}") from None
        for edge in awaited:
            if edge in self._ready:
                continue
            channel = self._channels[edge]
            posted = self._next(channel)
            return self._accept(channel, posted)
        raise RuntimeFailure(f"{who()}, and no message is due that it could wait for")

    def wake(self) -> None:
        """Ends this rank's wait, or the next one, in a step whose arrivals are reported; any thread may call it."""
        self.inbox.put(list)

    def take(self, edge: Edge) -> Payload:
        if self._window and edge.slot == 0 and (room := self._channels[edge].room) is not None:
            room.release()
        return self._ready.pop(edge)

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in since the last call, those of which it is known when: all where threads wait."""
        return self._log.take()

    def close(self) -> None:
        """Nothing is left behind: a step's threads end with it."""
        if self._lines is not None:
            self._lines.close()
        self.inbox.close()

    def _next(self, channel: IncomingChannel) -> PostedReceive:
        """Waits for the next message of a channel, and posts a receive for one after it."""
        if not channel.posted:
            self._post(channel, wait_for_headers=True)
        posted = channel.posted.popleft()
        start = perf_counter_ns()
        self._wait_to_come(posted.work, channel.peer, posted.edge)
        now = perf_counter_ns()
        # A thread waits all the time; a rank that finds the message there already can't tell how long it lay there.
        if self._threaded or now - start > SHORTEST_WAIT:
            posted.arrived = now
        if channel.is_direct:
            posted.arrived = None  # a receive from device to device is looked at now and then
        if channel.waiting:
            self._post(channel, wait_for_headers=False, follows=True)
        return posted

    def _accept(self, channel: IncomingChannel, posted: PostedReceive) -> list[Edge]:
        """Checks a message that came in and makes it ready to be taken."""
        packet = posted.packet
        tag, step, received, sent, changed = packet.preamble()
        if tag != posted.tag or step != self._step:
            raise RuntimeFailure(
                f"rank {self._rank} expected {posted.edge} (message {posted.tag} of step {self._step}) from rank "
                f"{channel.peer} and got message {tag} of step {step}; the ranks run different schedules or steps"
            )
        if changed:
            _, spec = self._read_header(tag, channel.peer, posted.edge)
            packet = self._new_pool(channel, spec).packet()
            self._wait_to_come(self._receive_packet(channel, packet, tag), channel.peer, posted.edge)
        elif posted.since > sent:
            # It waited for its receive, and so tells nothing about the link.
            if posted.follows:
                channel.ahead = min(channel.ahead + 1, MOST_AHEAD)
        elif posted.arrived is not None:
            size = packet.spec.carried_bytes
            self._log.add(channel.peer, self._rank, size, sent, posted.since, posted.arrived, posted.edge)
        if (answered := channel.answered) is not None:
            if answered.under_way and len(answered.under_way) > answered.under_way[0].pool.ahead:
                self._release(answered, received)  # may fail where links do: this one then counts as not come
            answered.taken = received
        channel.received += 1
        self._ready[posted.edge] = packet.unpack()
        posted.pool.spare.append(posted.packet)
        return [posted.edge]

    def _post(self, channel: IncomingChannel, wait_for_headers: bool, follows: bool = False) -> None:
        """Posts receives some ahead. An edge whose spec is not known waits for its header, or is left."""
        waiting, already = channel.waiting, channel.posted
        while waiting:
            edge, tag = waiting[0]
            pool = channel.pools.get(self._signatures[edge.consumer.microbatch])
            if pool is None:
                if not wait_for_headers or already:
                    return
                self._learn(channel, edge)
                continue
            if len(already) >= max(channel.ahead, pool.ahead):
                return
            waiting.popleft()
            packet = pool.packet()
            since = perf_counter_ns()
            work = self._receive_packet(channel, packet, tag)
            already.append(PostedReceive(edge, tag, work, packet, pool, since, follows))

    def _learn(self, channel: IncomingChannel, edge: Edge) -> None:
        """Takes in the next header of a channel."""
        if channel.headers_due == 0:
            raise RuntimeFailure(f"rank {channel.peer} announced no shapes for {edge}; the ranks run different steps")
        signature, spec = self._read_header(self._tags.header(channel.key), channel.peer, edge)
        channel.headers_due -= 1
        channel.pools[signature] = self._new_pool(channel, spec)

    def _read_header(self, tag: int, peer: int, edge: Edge) -> tuple[Any, WireSpec]:
        first = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self._wait_to_come(self._irecv(first, peer, tag), peer, edge)
        rest = None
        if more := header_rest(first):
            rest = torch.empty(more, dtype=torch.uint8, device="cpu")
            self._wait_to_come(self._irecv(rest, peer, tag), peer, edge)
        return unpack_header(first, rest)

    def _irecv(self, buffer: Tensor, source: int, tag: int) -> Any:
        try:
            return self._group().recv([buffer], source, tag + self._tag_shift)
        except RuntimeError as error:
            raise explain(error, self._rank, source, "a message", self._timeout) from None

    def _wait(self, work: Any, peer: int | None, what: Edge | str, limit: timedelta | None = None) -> None:
        limit = limit or self._limit
        try:
            work.wait(limit)
        except RuntimeError as error:
            raise explain(error, self._rank, peer, str(what), limit.total_seconds()) from None

    def _wait_to_come(self, work: Any, peer: int, what: Edge) -> None:
        self._wait(work, peer, what, self._arrival_limit)

    def _receive_all(self, channel: IncomingChannel, count: int) -> None:
        """A thread's work: waits for a channel's messages in order and reports each."""
        try:
            for _ in range(count):
                seconds = self._arrival_limit.total_seconds()
                if channel.room is not None and not channel.room.acquire(timeout=seconds):
                    raise DeadlineExceeded(
                        f"rank {self._rank} took nothing that came from rank {channel.peer} for {seconds:g} s"
                    )
                self.inbox.put(partial(self._accept, channel, self._next(channel)))
        except BaseException as error:
            self.inbox.fail(error)
