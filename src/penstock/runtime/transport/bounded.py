"""Channels as in other frameworks: messages to a rank go in program order, and only a few are under way.

    rank 0   |F0|F1|F2|............|F3|      depth 2: F2's message finds two under way and waits for room, and F3,
               `----. `----.       ^         though it is ready, is not started. Room comes when it is known that F0's
                     v      v      |         message has arrived
    rank 1          .|F0|---arrived

This is the head-of-line blocking of the PipeMorph paper, section 3.2, and `ps.Blocking(depth)` in the simulator. A
message counts from when it is sent until it has arrived, whether its receiver is busy or not.

Gloo does not say when a message has arrived. So its receiver answers with a small message (`Acknowledgements`):

    rank 0 ====message====> rank 1's thread     by a group of their own, so that they never queue behind messages
    rank 0 <--one byte----- the same thread     and at once, whether rank 1 is busy or not
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.mesh.collective import WeakGroup, explain, explained, wait_for
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import Transport, TransportLayer
from penstock.runtime.transport.channel import ChannelKey
from penstock.runtime.transport.inbox import THREADS_WAIT, Inbox
from penstock.runtime.transport.wiring import wire
from penstock.schedule import Schedule, needed_channel_depth

DEPTH = 2
"""Messages that a channel holds where nothing else is said."""


def require_depth(schedule: Schedule, depth: int) -> None:
    """Refuses a schedule whose order may come to a standstill with channels of this depth.

    That takes messages that are awaited in another order than they leave in: those that leave in order arrive one
    after the other, whether their receiver is busy or not, and make room.

    Raises:
        RuntimeFailure: with the depth that is needed.
    """
    if depth < 1:
        raise RuntimeFailure(f"a channel of depth {depth} can carry nothing: give at least 1")
    if _keeps_order(schedule):
        return
    needed = needed_channel_depth(schedule)
    if needed > depth:
        raise RuntimeFailure(
            f"{schedule.name} needs channels of depth {needed}: a rank sends that many messages before the other one "
            f"takes the first, and channels of depth {depth} would hold both up forever; give depth={needed} or "
            "transport='host'"
        )


def _keeps_order(schedule: Schedule) -> bool:
    """Whether all messages of each channel are awaited in the order in which they leave."""
    wiring = wire(schedule)
    place = {op: number for row in schedule.order for number, op in enumerate(row)}
    for rank in range(schedule.num_ranks):
        latest: dict[ChannelKey, int] = {}
        for edge in wiring.expected(rank):
            key = ChannelKey.of(edge)
            if place[edge.producer] < latest.get(key, -1):
                return False
            latest[key] = place[edge.producer]
    return True


class BoundedTransport(TransportLayer):
    """Any transport, with one channel to each other rank, of bounded depth.

    Args:
        depth: most messages under way to another rank. Gradients of tied parameters ride along with those of the
            chain.

    Raises:
        RuntimeFailure: a depth below 1.
    """

    def __init__(self, inner: Transport, depth: int) -> None:
        super().__init__(inner)
        if depth < 1:
            raise RuntimeFailure(f"a channel of depth {depth} can carry nothing: give at least 1")
        self._depth = depth
        self._unbounded: set[int] = set()

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links, by their two ranks in either order, are without bound from now on."""
        self._unbounded = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        if edge.slot <= 0 and target not in self._unbounded and not self.inner.has_room(target, self._depth):
            return False
        return self.inner.send(edge, target, payload)


LINGER = 5.0
"""Seconds that the thread of a link stays when all it sent has arrived, for more."""
TAG = 1
"""The tag of all acknowledgements: they are counted, not told apart."""


class AcknowledgedLink:
    """The sending end of the link to one rank: what is under way, and a thread that waits for what arrived."""

    def __init__(self, group: WeakGroup, rank: int, peer: int, timeout: float, inbox: Inbox) -> None:
        self._group, self._rank, self._peer = group, rank, peer
        self._timeout, self._inbox = timeout, inbox
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_full = self._runs = self._lost = False

    def has_room(self, depth: int) -> bool:
        """Whether fewer messages than that are under way; where not, the inbox gets an event when one arrived."""
        with self._changed:
            self._is_full = self._under_way >= depth
            return not self._is_full

    def sent(self) -> None:
        """One more is under way."""
        with self._changed:
            self._under_way += 1
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="penstock-acknowledgements", daemon=True).start()
            else:
                self._changed.notify_all()

    def drain(self) -> None:
        """Waits until all has arrived."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._lost or not self._under_way, self._timeout):
                raise DeadlineExceeded(
                    f"rank {self._rank} waited {self._timeout:g} s for {self._under_way} messages to arrive at rank "
                    f"{self._peer}"
                )
        if self._lost:
            self._inbox.poll()  # raises what happened

    def give_up(self) -> None:
        """Ends `drain`: what is under way may never be acknowledged."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _work(self) -> None:
        buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
        limit = timedelta(seconds=self._timeout * THREADS_WAIT)
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._under_way, LINGER):
                    self._runs = False
                    return
            try:
                self._group().recv([buffer], self._peer, TAG).wait(limit)
            except RuntimeError as error:
                self._inbox.fail(explain(error, self._rank, self._peer, "a message to arrive", limit.total_seconds()))
                with self._changed:
                    self._runs, self._lost = False, True
                    self._changed.notify_all()
                return
            with self._changed:
                self._under_way -= 1
                is_awaited, self._is_full = self._is_full, False
                self._changed.notify_all()
            if is_awaited:
                self._inbox.put(list)


class Acknowledgements:
    """One rank's acknowledgements, both ways.

    Every rank of `group` makes one at the same time.

    Args:
        timeout: seconds before a wait ends with DeadlineExceeded.
        depth: most messages that are under way to another rank: it has room for as many.
        own_group: a group of the same ranks for them alone, which others end; one is made here where not given.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, depth: int, own_group: Any = None) -> None:
        self.depth = depth
        self._rank, self._timeout = dist.get_rank(group), timeout
        members = dist.get_process_group_ranks(group)
        is_everyone = len(members) == dist.get_world_size()
        self._may_end = own_group is None and is_everyone
        if own_group is None:
            own_group = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout),
                backend="gloo",
                use_local_synchronization=not is_everyone,
            )
            assert isinstance(own_group, dist.ProcessGroup)  # every rank of the group is in it
        self._group = WeakGroup(own_group)
        self._links: dict[int, AcknowledgedLink] = {}
        self._answers: deque[tuple[Any, torch.Tensor]] = deque()
        self._is_closed = self._is_given_up = False

    def to(self, peer: int, inbox: Inbox) -> AcknowledgedLink:
        """The link to a rank. `inbox` is where it tells of room and of failures."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = AcknowledgedLink(self._group, self._rank, peer, self._timeout, inbox)
        return link

    def answer(self, peer: int) -> None:
        """Tells a rank that a message of its own has arrived; any thread may."""
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        with explained(self._rank, peer, "an acknowledgement to leave", self._timeout):
            self._answers.append((self._group().send([token], peer, TAG), token))

    def end(self) -> None:
        """Ends a step: waits until all that was sent has arrived."""
        for link in self._links.values():
            if not self._is_given_up:
                link.drain()

    def give_up(self) -> None:
        """Has nothing wait any more for what arrived: connections broke, and messages go another way. Any thread may
        call it.
        """
        self._is_given_up = True
        for link in list(self._links.values()):
            link.give_up()

    def flush(self) -> None:
        """Waits until what this rank answered has been taken."""
        while self._answers:
            wait_for(
                self._answers.popleft()[0], self._rank, None, "the last acknowledgements to be taken", self._timeout
            )

    def close(self) -> None:
        """Ends the group, once.

        One that its members alone made stays until torch.distributed ends. Such a group is named after its members
        and after how many groups they know, so the next one of that name would find these addresses in the store.
        """
        if not self._is_closed and self._may_end and self._group.is_alive:
            dist.destroy_process_group(self._group())
        self._is_closed = True
