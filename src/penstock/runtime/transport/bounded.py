"""Channels as in other frameworks: messages to a rank go in program order, and only a few are under way.

    rank 0   |F0|F1|F2|............|F3|      depth 2: F2's message finds two under way and waits for room, and F3,
               `----. `----.       ^         though it is ready, is not started. Room comes when it is known that F0's
                     v      v      |         message has arrived
    rank 1          .|F0|---arrived

This is the head-of-line blocking of the PipeMorph paper, section 3.2, and `ps.Blocking(depth)` in the simulator. A
message counts from when it is sent until it has arrived, whether its receiver is busy or not.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import Transport, TransportLayer
from penstock.runtime.transport.channel import ChannelKey
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
        delegated: links, by their two ranks in either order, that have no bound.

    Raises:
        RuntimeFailure: a depth below 1.
    """

    def __init__(self, inner: Transport, depth: int, delegated: Collection[tuple[int, int]] = ()) -> None:
        super().__init__(inner)
        if depth < 1:
            raise RuntimeFailure(f"a channel of depth {depth} can carry nothing: give at least 1")
        self._depth = depth
        self.route(delegated)

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links are without bound from now on."""
        self._unbounded = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        if edge.slot <= 0 and target not in self._unbounded and not self.inner.has_room(target, self._depth):
            return False
        return self.inner.send(edge, target, payload)
