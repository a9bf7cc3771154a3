"""A lane delivers each message once and in order, whatever happens to connections and to the delegates at its ends.

The network of the test: connections carry frames in order and may be cut at any moment, losing what they hold; the
sender may open several before it knows that an older one is dead, and what lingers in old ones still comes, at any
time; messages may come twice. Either delegate may die: the sending one starts anew from what its rank has not seen
answered, the receiving one from what its rank was given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.lane import LaneError, ReceivingEnd, SendingEnd
from tiers import examples

pytestmark = pytest.mark.property

NUM_MESSAGES = 6


@dataclass
class Connection:
    """Frames under way in both directions of one connection. `heard`: its greeting came."""

    epoch: int
    there: deque[tuple[str, int]] = field(default_factory=deque)
    back: deque[tuple[str, int]] = field(default_factory=deque)
    heard: bool = False
    closed: bool = False  # by the receiver
    half: int = 0  # the message whose first half came


class World:
    """A lane's two ends and the connections between them."""

    def __init__(self) -> None:
        self.sending, self.receiving = SendingEnd(), ReceivingEnd()
        self.connections: list[Connection] = []
        self.current: Connection | None = None  # the sender's
        self.generation = 0
        self.delivered: list[int] = []
        self.released = 0  # what the sender's rank was told is there

    # The sender.

    def give(self) -> None:
        if self.sending.given < NUM_MESSAGES:
            self.sending = self.sending.give(self.sending.given + 1)

    def connect(self) -> None:
        self.sending = self.sending.cut().connect()
        self.current = Connection(self.sending.epoch)
        self.current.there.append(("hello", self.sending.epoch))
        self.connections.append(self.current)

    def write(self) -> None:
        number = self.sending.next()
        if number is not None and self.current is not None:
            self.sending = self.sending.wrote()
            self.current.there += [("half", number), ("whole", number)]

    def hear(self) -> None:
        """The sender reads a frame of its current connection."""
        if self.current is None or not self.current.back:
            return
        what, number = self.current.back.popleft()
        if what == "welcome":
            self.sending, _ = self.sending.welcome(self.current.epoch, number)
        else:
            self.sending = self.sending.answer(number)
        assert self.sending.answered <= len(self.delivered)  # never answered before it was there
        self.released = max(self.released, self.sending.answered)

    def restart_sender(self) -> None:
        self.generation += 1
        self.sending = SendingEnd(given=self.released, answered=self.released, epoch=self.generation << 32)
        self.current = None
        given = self.sending.given
        for number in range(given + 1, self.highest + 1):
            self.sending = self.sending.give(number)

    highest = 0

    # The network and the receiver.

    def arrive(self, connection: Connection) -> None:
        """The receiver reads a frame."""
        if not connection.there or connection.closed:
            return
        what, number = connection.there.popleft()
        try:
            if what == "hello":
                self.receiving = self.receiving.hello(number)
                connection.heard = True
                for other in self.connections:
                    if other is not connection and other.heard:
                        other.closed = True
                connection.back.append(("welcome", self.receiving.last))
            elif what == "half":
                connection.half = number if self.receiving.begins(connection.epoch, number) else 0
            elif connection.half == number:
                self.receiving = self.receiving.whole(connection.epoch, number)
                self.delivered.append(number)
                connection.back.append(("answer", number))
            else:  # what was dropped is answered too
                connection.back.append(("answer", self.receiving.last))
        except LaneError:
            connection.closed = True

    def double(self, connection: Connection, number: int) -> None:
        """A message comes once more, after what is under way."""
        if 0 < number <= self.sending.written:
            connection.there += [("half", number), ("whole", number)]

    def cut(self, connection: Connection) -> None:
        """The network loses it: the sender knows when it was its own."""
        self.connections.remove(connection)
        if connection is self.current:
            self.current = None
            self.sending = self.sending.cut()

    def restart_receiver(self) -> None:
        self.receiving = ReceivingEnd(last=len(self.delivered))
        for connection in self.connections:
            connection.closed = True


# Weighted, so that connections live long enough to carry something, and die while they do.
MOVES = (
    *("give",) * 3,
    *("connect",) * 2,
    *("write",) * 3,
    *("arrive",) * 4,
    *("hear",) * 3,
    *("flow",) * 3,
    "double",
    "cut",
    "restart sender",
    "restart receiver",
)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 3)), min_size=15, max_size=100))
def test_each_message_is_delivered_once_and_in_order(moves: list[tuple[str, int]]) -> None:
    world = World()
    for move, which in moves:
        chosen = world.connections[which % len(world.connections)] if world.connections else None
        if move == "give":
            world.give()
            world.highest = world.sending.given
        elif move == "connect" and len(world.connections) < 4:
            world.connect()
        elif move == "write":
            world.write()
        elif move == "hear":
            world.hear()
        elif move == "arrive" and chosen is not None:
            world.arrive(chosen)
        elif move == "flow" and world.current is not None:
            for _ in range(which + 1):
                world.arrive(world.current)
                world.hear()
                world.write()
        elif move == "double" and world.current is not None:
            world.double(world.current, which + 1)
        elif move == "cut" and chosen is not None:
            world.cut(chosen)
        elif move == "restart sender":
            world.restart_sender()
        elif move == "restart receiver":
            world.restart_receiver()
        assert world.delivered == list(range(1, len(world.delivered) + 1))
        assert world.released <= len(world.delivered)
    # Then the network behaves: all that was given gets there, and the sender learns it.
    world.connections.clear()
    world.connect()
    (last,) = world.connections
    for _ in range(4 * NUM_MESSAGES + 4):
        world.write()
        world.arrive(last)
        world.hear()
    assert world.delivered == list(range(1, world.highest + 1))
    assert world.sending.idle


def test_rules_that_the_other_end_breaks_are_errors() -> None:
    sending = SendingEnd().give(1).connect()
    with pytest.raises(LaneError, match="message 3 given after message 1"):
        sending.give(3)
    with pytest.raises(LaneError, match="a receiver that has 2"):
        sending.welcome(1, 2)
    with pytest.raises(LaneError, match="welcome to connection 7"):
        sending.welcome(7, 0)
    live, again = sending.welcome(1, 0)
    assert again == 0
    with pytest.raises(LaneError, match="answer to message 1"):
        live.answer(1)
    receiving = ReceivingEnd().hello(2)
    with pytest.raises(LaneError, match="epoch 2 after one of epoch 2"):
        receiving.hello(2)
    with pytest.raises(LaneError, match="message 2 after message 0"):
        receiving.begins(2, 2)
    with pytest.raises(LaneError, match="newest is 2"):
        receiving.begins(1, 1)
    whole = receiving.whole(2, 1)
    with pytest.raises(LaneError, match="second time"):
        whole.whole(2, 1)


def test_what_a_dead_connection_swallowed_is_counted_as_sent_again() -> None:
    sending = SendingEnd().give(1).give(2).give(3).connect()
    sending, _ = sending.welcome(1, 0)
    sending = sending.wrote().wrote().answer(1).cut().connect()
    sending, again = sending.welcome(2, 1)
    assert again == 1
    assert sending.next() == 2
