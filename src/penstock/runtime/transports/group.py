"""Messages between processes, over a torch.distributed process group (gloo).

Sends are asynchronous, from a flat copy, so that a slow link never holds up compute and the stage's own
tensors are free at once. Receives are posted ahead, a few in each channel. The copy of a sent message is
let go when the channel of its answers says that it was taken (each preamble carries that count), or at
the latest when the step ends.

How a rank learns of arrivals depends on its dispatch. A frozen rank waits for just the message its next op
needs. A dynamic one must know which have come: one thread a channel waits and reports.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.message import Edge, Payload
from penstock.runtime.transports.channel import ChannelKey, Incoming, Outgoing, Posted, SignatureOf, Tags
from penstock.runtime.transports.failure import explained
from penstock.runtime.wire_format import (
    HEADER_BYTES,
    Preamble,
    Spec,
    header_rest,
    pack,
    pack_header,
    unpack,
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
        self._rank = dist.get_rank(group)
        self._threaded = False
        self._window: dict[int, int] = {}
        self._step = 0
        self._signature_of: SignatureOf = lambda edge: ""
        self._incoming: dict[ChannelKey, Incoming] = {}
        self._outgoing: dict[ChannelKey, Outgoing] = {}
        self._ready: dict[Edge, Payload] = {}
        self._events: SimpleQueue[tuple[Incoming, Posted] | BaseException] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._spare: dict[int, list[Tensor]] = {}

    def begin(
        self,
        expected: Sequence[tuple[Edge, int]],
        signature_of: SignatureOf,
        threaded: bool,
        window: dict[int, int],
    ) -> None:
        """Starts a step and posts its first receives.

        Args:
            expected: (edge, its sender's rank) in the order in which this rank's frozen order needs them.
            threaded: whether arrivals are reported as they come (dynamic) or waited for (frozen).
            window: slot -> most messages of a channel under way before `send` waits for the oldest, for
                channels that bring no answers. A slot that is not there has no bound.
        """
        self._step += 1
        self._signature_of, self._threaded, self._window = signature_of, threaded, window
        used: dict[ChannelKey, set[str]] = {}
        for edge, source in expected:
            key = ChannelKey.of(edge)
            channel = self._incoming.get(key)
            if channel is None:
                channel = self._incoming[key] = Incoming(key, source)
            channel.waiting.append(edge)
            used.setdefault(key, set()).add(signature_of(edge))
        for key, signatures in used.items():
            channel = self._incoming[key]
            channel.headers_due = sum(signature not in channel.known for signature in signatures)
            channel.received = 0
            if threaded:
                thread = threading.Thread(target=self._receive_all, args=(channel, len(channel.waiting)), daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._post(channel, wait_for_headers=False)

    def end(self) -> None:
        """Ends a step: returns when all that was sent has been taken."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for channel in self._outgoing.values():
            self._release(channel, channel.taken + len(channel.under_way))
            channel.taken = 0

    # Sending.

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        key = ChannelKey.of(edge)
        channel = self._outgoing.get(key)
        if channel is None:
            channel = self._outgoing[key] = Outgoing(key, target)
        window = self._window.get(edge.slot)
        if window is not None and len(channel.under_way) >= window:
            self._release(channel, channel.taken + 1)
        signature, spec = self._signature_of(edge), Spec.of(payload)
        tag = self._tags.message(edge)
        answers = self._incoming.get(key.reverse())
        received = answers.received if answers is not None else 0
        sends: list[tuple[Any, Tensor]] = []
        expected = channel.known.get(signature)
        if expected is None:
            channel.known[signature] = expected = spec
            for part in pack_header(signature, spec):
                sends.append(self._isend(part, target, self._tags.header(key)))
        if spec != expected:
            # Not what the shapes promised: a message of the size the receiver waits for says so, the rest follows.
            notice = self._buffer(expected.num_bytes)
            Preamble(tag, self._step, received, changed=True).write(notice)
            for part in [notice, *pack_header(signature, spec)]:
                sends.append(self._isend(part, target, tag))
        buffer = self._buffer(spec.num_bytes)
        pack(payload, spec, Preamble(tag, self._step, received), buffer)
        sends.append(self._isend(buffer, target, tag))
        channel.under_way.append(sends)
        return True

    def _isend(self, buffer: Tensor, target: int, tag: int) -> tuple[Any, Tensor]:
        with explained(self._rank, target, "a send to start", self._timeout):
            return dist.isend(buffer, group=self._group, group_dst=target, tag=tag), buffer

    def _buffer(self, num_bytes: int) -> Tensor:
        spare = self._spare.get(num_bytes)
        return spare.pop() if spare else torch.empty(num_bytes, dtype=torch.uint8)

    def _release(self, channel: Outgoing, taken: int) -> None:
        """Lets go of a channel's first messages, up to the `taken`-th of the step."""
        while channel.taken < taken and channel.under_way:
            for work, buffer in channel.under_way.popleft():
                self._wait(work, channel.peer, "its messages to be taken")
                self._spare.setdefault(buffer.numel(), []).append(buffer)
            channel.taken += 1

    # Receiving.

    def arrivals(self) -> list[Edge]:
        edges = []
        while self._threaded:
            try:
                edges.append(self._report(self._events.get_nowait()))
            except Empty:
                break
        return edges

    def wait(self, awaited: Sequence[Edge], who: str) -> list[Edge]:
        """Waits until at least one message has come in (one of `awaited`, where the rank is frozen).

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        if self._threaded:
            try:
                return [self._report(self._events.get(timeout=self._timeout))]
            except Empty:
                raise DeadlineExceeded(f"nothing came in for {self._timeout:g} s: {who}") from None
        for edge in awaited:
            if edge in self._ready:
                continue
            channel = self._incoming[ChannelKey.of(edge)]
            self._post(channel, wait_for_headers=True)
            posted = channel.posted.popleft()
            self._wait(posted.work, channel.peer, str(posted.edge))
            self._post(channel, wait_for_headers=False)
            self._accept(channel, posted)
            return [posted.edge]
        raise RuntimeFailure(f"{who}, and no message is due that it could wait for")

    def take(self, edge: Edge) -> Payload:
        return self._ready.pop(edge)

    def _report(self, event: tuple[Incoming, Posted] | BaseException) -> Edge:
        if isinstance(event, BaseException):
            raise event
        self._accept(*event)
        return event[1].edge

    def _accept(self, channel: Incoming, posted: Posted) -> None:
        """Checks a message that came in and makes it ready to be taken."""
        preamble, spec, buffer = Preamble.read(posted.buffer), posted.spec, posted.buffer
        expected = self._tags.message(posted.edge), self._step
        if (preamble.tag, preamble.step) != expected:
            raise RuntimeFailure(
                f"rank {self._rank} expected {posted.edge} (message {expected}) from rank {channel.peer} and got "
                f"message {(preamble.tag, preamble.step)}; the ranks run different schedules or steps"
            )
        if preamble.changed:
            _, spec = self._read_header(expected[0], channel.peer, posted.edge)
            buffer = torch.empty(spec.num_bytes, dtype=torch.uint8)
            self._wait(self._irecv(buffer, channel.peer, expected[0]), channel.peer, str(posted.edge))
        channel.received += 1
        self._ready[posted.edge] = unpack(buffer, spec)
        answered = self._outgoing.get(channel.key.reverse())
        if answered is not None:
            self._release(answered, preamble.received)

    def _post(self, channel: Incoming, wait_for_headers: bool) -> None:
        """Posts receives up to AHEAD. An edge whose spec is not known waits for its header, or is left."""
        while channel.waiting and len(channel.posted) < AHEAD:
            edge = channel.waiting[0]
            signature = self._signature_of(edge)
            while signature not in channel.known:
                if not wait_for_headers or channel.posted:
                    return
                self._learn(channel, edge)
            channel.waiting.popleft()
            spec = channel.known[signature]
            buffer = torch.empty(spec.num_bytes, dtype=torch.uint8)
            work = self._irecv(buffer, channel.peer, self._tags.message(edge))
            channel.posted.append(Posted(edge, work, buffer, spec))

    def _learn(self, channel: Incoming, edge: Edge) -> None:
        """Takes in the next header of a channel."""
        if channel.headers_due == 0:
            raise RuntimeFailure(f"rank {channel.peer} announced no shapes for {edge}; the ranks run different steps")
        signature, spec = self._read_header(self._tags.header(channel.key), channel.peer, edge)
        channel.headers_due -= 1
        channel.known[signature] = spec

    def _read_header(self, tag: int, peer: int, edge: Edge) -> tuple[Any, Spec]:
        first = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._wait(self._irecv(first, peer, tag), peer, str(edge))
        rest = None
        if more := header_rest(first):
            rest = torch.empty(more, dtype=torch.uint8)
            self._wait(self._irecv(rest, peer, tag), peer, str(edge))
        return unpack_header(first, rest)

    def _irecv(self, buffer: Tensor, source: int, tag: int) -> Any:
        with explained(self._rank, source, "a receive to start", self._timeout):
            return dist.irecv(buffer, group=self._group, group_src=source, tag=tag)

    def _wait(self, work: Any, peer: int, what: str) -> None:
        with explained(self._rank, peer, what, self._timeout):
            work.wait(timedelta(seconds=self._timeout))

    def _receive_all(self, channel: Incoming, count: int) -> None:
        """A thread's work: waits for a channel's messages in order and reports each."""
        try:
            for _ in range(count):
                self._post(channel, wait_for_headers=True)
                posted = channel.posted.popleft()
                self._wait(posted.work, channel.peer, str(posted.edge))
                self._post(channel, wait_for_headers=False)
                self._events.put((channel, posted))
        except BaseException as error:
            self._events.put(error)
