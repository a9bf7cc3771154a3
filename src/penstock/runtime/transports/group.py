"""Messages between processes, over a torch.distributed process group (gloo).

Sends are asynchronous, from a flat copy, so that a slow link never holds up compute and the stage's own
tensors are free at once. Receives are posted ahead, a few in each channel. The copy of a sent message is
let go when the channel of its answers says that it was taken (each preamble carries that count), or at
the latest when the step ends.

How a rank learns of arrivals depends on its dispatch. A frozen rank waits for just the messages its next op
needs. A dynamic one must know which have come: one thread a channel waits and reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.message import Edge, Payload
from penstock.runtime.transports.channel import (
    ChannelKey,
    Expected,
    Incoming,
    Known,
    Outgoing,
    Posted,
    Sent,
    Tags,
)
from penstock.runtime.transports.failure import explain
from penstock.runtime.wire_format import (
    HEADER_BYTES,
    Packet,
    Preamble,
    Spec,
    header_rest,
    pack_header,
    unpack_header,
)

AHEAD = 2
"""Receives posted ahead in each channel: one being filled and one more, so that no sender waits to start."""


class GroupTransport:
    """One rank's end of all its channels.

    Args:
        group: the process group; ranks of the schedule are ranks of the group.
        tags: the same on all ranks.
        timeout: seconds before a wait ends with DeadlineExceeded.
    """

    def __init__(self, group: dist.ProcessGroup, tags: Tags, timeout: float) -> None:
        self._group, self._tags, self._timeout = group, tags, timeout
        self._limit = timedelta(seconds=timeout)
        self._rank = dist.get_rank(group)
        self._threaded = False
        self._window: Mapping[int, int] = {}
        self._step = 0
        self._tag_shift = 0
        self._signatures: Sequence[str] = ()
        self._incoming: dict[ChannelKey, Incoming] = {}
        self._outgoing: dict[ChannelKey, Outgoing] = {}
        self._routes: dict[Edge, tuple[Outgoing, int]] = {}
        self._ready: dict[Edge, Payload] = {}
        self._events: SimpleQueue[tuple[Incoming, Posted] | BaseException] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(
        self,
        expected: Sequence[Expected],
        signatures: Sequence[str],
        digest: int,
        threaded: bool,
        window: Mapping[int, int],
    ) -> None:
        """Starts a step and posts its first receives.

        Args:
            expected: see `expected_by_channel`; the edges in the order in which this rank's frozen order needs them.
            signatures: of each microbatch; equal signatures promise equal specs.
            digest: of the step's shapes; ranks that differ in it don't talk to each other.
            threaded: whether arrivals are reported as they come (dynamic) or waited for (frozen).
            window: slot -> most messages of a channel under way before `send` waits for the oldest, for
                channels that bring no answers. A slot that is not there has no bound.
        """
        self._step += 1
        self._tag_shift = self._tags.shift(digest)
        self._signatures, self._threaded, self._window = signatures, threaded, window
        for key, peer, messages in expected:
            channel = self._incoming.get(key)
            if channel is None:
                channel = self._incoming[key] = Incoming(key, peer)
                self._acquaint(key.reverse())
            channel.waiting.extend(messages)
            used = {signatures[edge.consumer.microbatch] for edge, _ in messages}
            channel.headers_due = sum(signature not in channel.known for signature in used)
            channel.received = 0
            if threaded:
                thread = threading.Thread(target=self._receive_all, args=(channel, len(messages)), daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._post(channel, wait_for_headers=False)

    def end(self) -> None:
        """Ends a step: returns when all that was sent has been taken."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        used = set(self._signatures)
        for channel in self._outgoing.values():
            self._release(channel, channel.taken + len(channel.under_way))
            channel.taken = 0
        ends: list[Incoming | Outgoing] = [*self._incoming.values(), *self._outgoing.values()]
        for channel_end in ends:
            for signature, known in channel_end.known.items():
                if signature not in used:
                    known.spare.clear()

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        route = self._routes.get(edge)
        if route is None:
            route = self._routes[edge] = self._route(edge, target)
        channel, tag = route
        window = self._window.get(edge.slot)
        if window is not None and len(channel.under_way) >= window:
            self._release(channel, channel.taken + 1)
        signature = self._signatures[edge.consumer.microbatch]
        works: list[Any] = []
        known = channel.known.get(signature)
        if known is None:
            known = channel.known[signature] = Known(Spec.of(payload), make=self._packet)
            for part in pack_header(signature, known.spec):
                works.append(self._isend(part, target, self._tags.header(channel.key)))
        preamble = Preamble(tag, self._step, channel.answers.received if channel.answers is not None else 0)
        packet = known.packet()
        if not known.spec.fits(payload):
            # Not what the shapes promised: a message of the size the receiver waits for says so, the rest follows.
            packet.announce(preamble._replace(changed=1))
            works.append(self._send_packet(channel, packet, tag))
            known = Known(Spec.of(payload), make=self._packet)
            for part in pack_header(signature, known.spec):
                works.append(self._isend(part, target, tag))
            packet = known.packet()
        packet.pack(payload, preamble)
        works.append(self._send_packet(channel, packet, tag))
        channel.under_way.append(Sent(works, packet, known))
        return True

    def _route(self, edge: Edge, target: int) -> tuple[Outgoing, int]:
        key = ChannelKey.of(edge)
        channel = self._outgoing.get(key)
        if channel is None:
            channel = self._outgoing[key] = Outgoing(key, target)
            self._acquaint(key)
        return channel, self._tags.message(edge)

    def _acquaint(self, key: ChannelKey) -> None:
        """Lets the channel `key` and that of its answers know each other, once both are there."""
        outgoing, answers = self._outgoing.get(key), self._incoming.get(key.reverse())
        if outgoing is not None and answers is not None:
            outgoing.answers, answers.answered = answers, outgoing

    def _packet(self, spec: Spec) -> Packet:
        """A buffer for payloads."""
        return Packet(spec)

    def _send_packet(self, channel: Outgoing, packet: Packet, tag: int) -> Any:
        return self._isend(packet.buffer, channel.peer, tag)

    def _receive_packet(self, channel: Incoming, packet: Packet, tag: int) -> Any:
        return self._irecv(packet.buffer, channel.peer, tag)

    def _isend(self, buffer: Tensor, target: int, tag: int) -> Any:
        try:
            return self._group.send([buffer], target, tag + self._tag_shift)
        except RuntimeError as error:
            raise explain(error, self._rank, target, "a message to leave", self._timeout) from None

    def _release(self, channel: Outgoing, taken: int) -> None:
        """Lets go of a channel's first messages, up to the `taken`-th of the step."""
        while channel.taken < taken and channel.under_way:
            works, packet, known = channel.under_way.popleft()
            for work in works:
                self._wait(work, channel.peer, "its messages to be taken")
            known.spare.append(packet)
            channel.taken += 1

    # Receiving.

    def arrivals(self) -> list[Edge]:
        edges: list[Edge] = []
        while self._threaded:
            try:
                edges.append(self._report(self._events.get_nowait()))
            except Empty:
                break
        return edges

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str]) -> list[Edge]:
        """Waits until at least one message has come in (one of `awaited`, where the rank is frozen).

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        if self._threaded:
            try:
                return [self._report(self._events.get(timeout=self._timeout))]
            except Empty:
                raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who()}") from None
        for edge in awaited:
            if edge in self._ready:
                continue
            channel = self._incoming[ChannelKey.of(edge)]
            posted = self._next(channel)
            self._accept(channel, posted)
            return [posted.edge]
        raise RuntimeFailure(f"{who()}, and no message is due that it could wait for")

    def take(self, edge: Edge) -> Payload:
        return self._ready.pop(edge)

    def _next(self, channel: Incoming) -> Posted:
        """Waits for the next message of a channel, and posts a receive for one after it."""
        if not channel.posted:
            self._post(channel, wait_for_headers=True)
        posted = channel.posted.popleft()
        self._wait(posted.work, channel.peer, posted.edge)
        if channel.waiting:
            self._post(channel, wait_for_headers=False)
        return posted

    def _report(self, event: tuple[Incoming, Posted] | BaseException) -> Edge:
        if isinstance(event, BaseException):
            raise event
        self._accept(*event)
        return event[1].edge

    def _accept(self, channel: Incoming, posted: Posted) -> None:
        """Checks a message that came in and makes it ready to be taken."""
        packet = posted.packet
        tag, step, received, changed = packet.preamble()
        if tag != posted.tag or step != self._step:
            raise RuntimeFailure(
                f"rank {self._rank} expected {posted.edge} (message {posted.tag} of step {self._step}) from rank "
                f"{channel.peer} and got message {tag} of step {step}; the ranks run different schedules or steps"
            )
        if changed:
            _, spec = self._read_header(tag, channel.peer, posted.edge)
            packet = self._packet(spec)
            self._wait(self._receive_packet(channel, packet, tag), channel.peer, posted.edge)
        channel.received += 1
        self._ready[posted.edge] = packet.unpack()
        posted.known.spare.append(posted.packet)
        if channel.answered is not None:
            self._release(channel.answered, received)

    def _post(self, channel: Incoming, wait_for_headers: bool) -> None:
        """Posts receives up to AHEAD. An edge whose spec is not known waits for its header, or is left."""
        while channel.waiting and len(channel.posted) < AHEAD:
            edge, tag = channel.waiting[0]
            known = channel.known.get(self._signatures[edge.consumer.microbatch])
            if known is None:
                if not wait_for_headers or channel.posted:
                    return
                self._learn(channel, edge)
                continue
            channel.waiting.popleft()
            packet = known.packet()
            work = self._receive_packet(channel, packet, tag)
            channel.posted.append(Posted(edge, tag, work, packet, known))

    def _learn(self, channel: Incoming, edge: Edge) -> None:
        """Takes in the next header of a channel."""
        if channel.headers_due == 0:
            raise RuntimeFailure(f"rank {channel.peer} announced no shapes for {edge}; the ranks run different steps")
        signature, spec = self._read_header(self._tags.header(channel.key), channel.peer, edge)
        channel.headers_due -= 1
        channel.known[signature] = Known(spec, make=self._packet)

    def _read_header(self, tag: int, peer: int, edge: Edge) -> tuple[Any, Spec]:
        first = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._wait(self._irecv(first, peer, tag), peer, edge)
        rest = None
        if more := header_rest(first):
            rest = torch.empty(more, dtype=torch.uint8)
            self._wait(self._irecv(rest, peer, tag), peer, edge)
        return unpack_header(first, rest)

    def _irecv(self, buffer: Tensor, source: int, tag: int) -> Any:
        try:
            return self._group.recv([buffer], source, tag + self._tag_shift)
        except RuntimeError as error:
            raise explain(error, self._rank, source, "a message", self._timeout) from None

    def _wait(self, work: Any, peer: int, what: Edge | str) -> None:
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise explain(error, self._rank, peer, str(what), self._timeout) from None

    def _receive_all(self, channel: Incoming, count: int) -> None:
        """A thread's work: waits for a channel's messages in order and reports each."""
        try:
            for _ in range(count):
                self._events.put((channel, self._next(channel)))
        except BaseException as error:
            self._events.put(error)
