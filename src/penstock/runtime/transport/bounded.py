"""What frameworks do: messages to another rank go through one channel, in program order, and few are under way.

    rank 0   |F0|F1|F2|............|F3|      depth 2: F2's message finds two under way and waits for room, and F3,
               `----. `----.       ^         though it is ready, is not started. Room comes when the other side
                     v      v      |         acknowledges that F0's message has arrived
    rank 1          .|F0|---acknowledgement

That is the head-of-line blocking of the PipeMorph paper, section 3.2, and `ps.Blocking(depth)` in the simulator. A
message holds its place from its sending until it has arrived, whether its receiver is busy or not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, RuntimeFailure
from penstock.runtime.mesh.failure import explain
from penstock.runtime.mesh.weak_group import WeakGroup
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages, Incoming, Posted, Tags
from penstock.runtime.transport.conditioned import ConditionedTransport
from penstock.runtime.transport.gloo import THREADS_WAIT, GlooTransport
from penstock.runtime.transport.inbox import Inbox
from penstock.runtime.transport.wiring import wire
from penstock.schedule import Schedule, needed_channel_depth

DEPTH = 2
LINGER = 5.0
"""Seconds that the thread of a link stays when all it sent has arrived, for more."""
ACKNOWLEDGEMENT = 1
"""The tag of all acknowledgements: they are counted, not told apart."""


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
            f"takes the first, and channels of depth {depth} would hold both up for ever; give depth={needed} or "
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


class Link:
    """The sending end of the channel to one rank: what is under way, and a thread that waits for what arrived."""

    def __init__(self, group: WeakGroup, rank: int, peer: int, timeout: float, inbox: Inbox) -> None:
        self._group, self._rank, self._peer = group, rank, peer
        self._timeout, self._inbox = timeout, inbox
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_full = self._runs = self._lost = False

    def enter(self, depth: int) -> bool:
        """Takes a place, or returns False where all are taken: the inbox then gets an event when one is free."""
        with self._changed:
            if self._under_way >= depth:
                self._is_full = True
                return False
            self._under_way += 1
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="penstock-acknowledgements", daemon=True).start()
            else:
                self._changed.notify_all()
            return True

    def settle(self) -> None:
        """Waits until all has arrived."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._lost or not self._under_way, self._timeout):
                raise DeadlineExceeded(
                    f"rank {self._rank} waited {self._timeout:g} s for {self._under_way} messages to arrive at rank "
                    f"{self._peer}"
                )
        if self._lost:
            self._inbox.poll()  # raises what happened

    def _work(self) -> None:
        buffer = torch.empty(1, dtype=torch.uint8)
        limit = timedelta(seconds=self._timeout * THREADS_WAIT)
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._under_way, LINGER):
                    self._runs = False
                    return
            try:
                self._group().recv([buffer], self._peer, ACKNOWLEDGEMENT).wait(limit)
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


class DirectTransport(GlooTransport):
    """A `GlooTransport` with one channel to each other rank, of bounded depth.

    Every rank of `group` makes one at the same time: acknowledgements have a group of their own, so that they never
    queue behind messages. Threads receive, however ranks decide, for a message is acknowledged when it arrives.

    Args:
        depth: most messages under way to another rank. Tied gradients ride along with those of the chain.

    Raises:
        RuntimeFailure: a depth below 1.
    """

    def __init__(self, group: dist.ProcessGroup, tags: Tags, timeout: float, depth: int = DEPTH) -> None:
        super().__init__(group, tags, timeout)
        if depth < 1:
            raise RuntimeFailure(f"a channel of depth {depth} can carry nothing: give at least 1")
        self._depth = depth
        self._ahead = max(self._ahead, depth)
        members = dist.get_process_group_ranks(group)
        self._may_end = len(members) == dist.get_world_size()
        made = dist.new_group(
            members, timeout=self._limit, backend="gloo", use_local_synchronization=not self._may_end
        )
        assert isinstance(made, dist.ProcessGroup)  # every rank of the group is in it
        self._acknowledgements = WeakGroup(made)
        self._is_closed = False
        self._links: dict[int, Link] = {}
        self._acknowledged: deque[tuple[Any, torch.Tensor]] = deque()

    def begin(
        self,
        expected: Sequence[ExpectedMessages],
        signatures: Sequence[str],
        digest: int,
        threaded: bool,
        window: Mapping[int, int],
    ) -> None:
        super().begin(expected, signatures, digest, True, window)

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        if edge.slot <= 0:
            link = self._links.get(target)
            if link is None:
                link = Link(self._acknowledgements, self._rank, target, self._timeout, self.inbox)
                self._links[target] = link
            if not link.enter(self._depth):
                return False
        return super().send(edge, target, payload)

    def end(self) -> None:
        for link in self._links.values():
            link.settle()
        super().end()
        while self._acknowledged:
            self._wait(self._acknowledged.popleft()[0], None, "the last acknowledgements to be taken")

    def close(self) -> None:
        """Ends the acknowledgements' group, once.

        One that its members alone made stays until torch.distributed ends. Such a group is named after its members
        and after how many groups they know, so the next one of that name would find these addresses in the store.
        """
        if not self._is_closed and self._may_end and self._acknowledgements.is_alive:
            dist.destroy_process_group(self._acknowledgements())
        self._is_closed = True
        super().close()

    def _came_in(self, channel: Incoming, posted: Posted) -> None:
        if posted.edge.slot <= 0:
            token = torch.zeros(1, dtype=torch.uint8)
            self._acknowledged.append((self._acknowledge(channel.peer, token), token))
        super()._came_in(channel, posted)

    def _acknowledge(self, peer: int, token: torch.Tensor) -> Any:
        try:
            return self._acknowledgements().send([token], peer, ACKNOWLEDGEMENT)
        except RuntimeError as error:
            raise explain(error, self._rank, peer, "an acknowledgement to leave", self._timeout) from None


class ConditionedDirect(ConditionedTransport, DirectTransport):
    """A `DirectTransport` whose messages are held back as the conditions say, acknowledgements never."""
