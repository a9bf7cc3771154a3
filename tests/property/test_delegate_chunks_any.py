"""Each message arrives once and whole, whatever happens to the connections that carry its chunks.

The network of the test: several connections at once, each carrying frames in order. A connection may be cut at the
sender at any moment; what lingers in it still comes, at any time, or never. A chunk's bytes come in two halves, and a
message's memory is another message's as soon as it was delivered, as the sender's is once all is answered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.frames import Descriptor, DescriptorKind
from penstock.runtime.transport.delegate.carrier.lanes import CHUNK, InStream, OutStream
from tiers import examples

pytestmark = pytest.mark.property

NUM_MESSAGES, NUM_LANES = 5, 3


@dataclass(eq=False)
class Connection:
    """Frames under way: halves of chunks there, answers back. `taken`: the chunk that the receiver takes in."""

    there: deque[tuple[str, Descriptor]] = field(default_factory=deque)
    back: int = 0
    unanswered: deque[Descriptor] = field(default_factory=deque)
    taken: Descriptor | None = None
    is_closed: bool = False  # by the receiver


class World:
    """A sender, a receiver, and the connections between them, also those that the sender gave up."""

    def __init__(self) -> None:
        self.out, self.incoming = OutStream(), InStream()
        self.lanes = [Connection() for _ in range(NUM_LANES)]
        self.given_up: list[Connection] = []
        self.num_given = 0
        self.freed: set[int] = set()  # of which the sender's memory has other bytes now
        self.parts: dict[int, dict[int, str]] = {}  # message -> where a chunk begins -> what of it is there
        self.delivered: list[int] = []

    def give(self, num_chunks: int) -> None:
        if self.num_given < NUM_MESSAGES:
            self.num_given += 1
            size = num_chunks * CHUNK - 100
            self.out.give(Descriptor(DescriptorKind.SEND, 0, 1, number=self.num_given, payload_bytes=size))

    def write(self, lane: Connection) -> None:
        if self.out.next is not None:
            chunk = self.out.take()
            lane.unanswered.append(chunk)
            lane.there += [("begin", chunk), ("end", chunk)]

    def cut(self, place: int) -> None:
        lane = self.lanes[place]
        self.out.again(lane.unanswered)
        self.given_up.append(lane)
        self.lanes[place] = Connection()

    def hear(self, lane: Connection) -> None:
        """The sender reads what was answered."""
        while lane.back:
            lane.back -= 1
            chunk = lane.unanswered.popleft()
            if self.out.answered(chunk):
                assert chunk.number in self.delivered
                self.freed.add(chunk.number)

    def arrive(self, connection: Connection) -> None:
        """The receiver reads half a chunk."""
        if not connection.there or connection.is_closed:
            return
        half, chunk = connection.there.popleft()
        if half == "begin":
            is_new, other = self.incoming.begins(chunk, connection)
            if other is not None:
                self.close(other)
            connection.taken = chunk if is_new else None
            if is_new:
                assert chunk.number not in self.delivered
                assert self.parts.setdefault(chunk.number, {}).get(chunk.offset) != "whole"
                self.parts[chunk.number][chunk.offset] = "half"
            return
        if connection.taken is not None:
            assert chunk.number not in self.freed  # what is written into the message was still the message
            assert chunk.number not in self.delivered
            self.parts[chunk.number][chunk.offset] = "whole"
            if self.incoming.ended(chunk):
                assert set(self.parts[chunk.number].values()) == {"whole"}
                self.delivered.append(chunk.number)
            connection.taken = None
        connection.back += 1

    def close(self, connection: Connection) -> None:
        connection.is_closed = True
        if connection.taken is not None:
            self.incoming.dropped(connection.taken, connection)
            connection.taken = None


MOVES = ("give", "write", "write", "write", "arrive", "arrive", "arrive", "linger", "linger", "hear", "cut", "forget")


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 5)), min_size=15, max_size=120))
def test_each_message_is_delivered_once_and_whole(moves: list[tuple[str, int]]) -> None:
    world = World()
    for move, which in moves:
        place = which % NUM_LANES
        lane = world.lanes[place]
        if move == "give":
            world.give(1 + place)
        elif move == "write":
            world.write(lane)
        elif move == "arrive":
            world.arrive(lane)
        elif move == "hear":
            world.hear(lane)
        elif move == "cut" or lane.is_closed:
            world.cut(place)
        elif move == "linger" and world.given_up:
            world.arrive(world.given_up[which % len(world.given_up)])
        elif move == "forget" and world.given_up:  # the receiver sees its end
            world.close(world.given_up.pop(which % len(world.given_up)))
        assert len(set(world.delivered)) == len(world.delivered)
    # Then the network behaves: all that was given gets there, and the sender learns it.
    for place in range(NUM_LANES):
        world.cut(place)
    while world.out.next is not None:
        world.write(world.lanes[0])
    while world.lanes[0].there and not world.lanes[0].is_closed:
        world.arrive(world.lanes[0])
    world.hear(world.lanes[0])
    assert sorted(world.delivered) == list(range(1, world.num_given + 1)) == sorted(world.freed)


def test_a_chunk_that_an_older_connection_still_brings_is_dropped() -> None:
    stream = InStream()
    chunk = Descriptor(DescriptorKind.CHUNK, 0, 1, number=1, offset=0, capacity=10, payload_bytes=20)
    assert stream.begins(chunk, "older") == (True, None)
    again = chunk._replace(attempt=1)
    assert stream.begins(again, "newer") == (True, "older")
    stream.dropped(chunk, "older")
    assert stream.begins(chunk, "oldest") == (False, None)
    assert not stream.ended(again)
    assert stream.begins(again._replace(attempt=2), "newest") == (False, None)
    rest = chunk._replace(offset=10)
    assert stream.begins(rest, "newer") == (True, None)
    assert stream.ended(rest)
    assert stream.has(1)
    assert stream.begins(chunk, "older") == (False, None)
