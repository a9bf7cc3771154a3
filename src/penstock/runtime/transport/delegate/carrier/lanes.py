"""Messages between two delegates, in chunks over several connections (lanes): each message arrives exactly once.

    OutLink to rank 1                                    rank 1's delegate
      give 1              chunks 1a 1b 1c due
      lane 0 takes 1a  -- CHUNK 1a -->                   begins 1a, has it: ANSWER
      lane 1 takes 1b  -- CHUNK 1b (half)  X  cut        the part of 1b that came is dropped
      1b is due again     chunks 1b 1c due
      lane 0 takes 1b  -- CHUNK 1b, attempt 1 -->        begins 1b, has it: ANSWER
      lane 0 takes 1c  -- CHUNK 1c -->                   message 1 is whole: MESSAGE to its rank

A chunk is written as far as the rank has filled it in, and read right into the slot of its message, so that copying,
the wire and reading overlap. The sender keeps a message until all of its chunks are answered, and gives a chunk to
another connection only after it gave up the one before. The receiver may not know that yet. It takes a chunk from the
latest attempt alone, since an older connection might still write into the message's slot when the slot has been given
to another message.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .frames import (
    BEAT,
    FRAME_BYTES,
    GONE,
    MS,
    RESETS,
    Descriptor,
    DescriptorKind,
    SocketStream,
    begin_connect,
    frames,
    is_unacknowledged,
)

if TYPE_CHECKING:
    from .process import Delegate

CHUNK = 2 << 20
"""Bytes of a message that one connection carries in a row."""
CHUNKS_A_TURN = 8
"""Chunks that a lane writes, and reads that it makes, before others have their turn."""
SILENCE = 2_000 * MS
"""A receiver without room that says nothing for so long is gone."""


class OutStream:
    """The messages to one rank that are not answered: the chunks that are due, and how many each message lacks."""

    def __init__(self) -> None:
        self._due: deque[Descriptor] = deque()
        self._lacks: dict[int, int] = {}
        self.messages: dict[int, Descriptor] = {}

    def give(self, message: Descriptor) -> None:
        """One more message; or more bytes of one are in its slot."""
        size, number = message.body_bytes, message.number
        if number not in self.messages:
            starts = range(0, size, CHUNK)
            self._lacks[number] = len(starts)
            self._due += [message._replace(offset=at, capacity=min(CHUNK, size - at)) for at in starts]
        self.messages[number] = message

    def filled(self, chunk: Descriptor) -> int:
        """How many bytes of a chunk are in its message's slot; below 0 where the slot is filled up to before it."""
        return min(self.messages[chunk.number].filled - chunk.offset, chunk.capacity)

    @property
    def next(self) -> Descriptor | None:
        """The chunk that is due next."""
        return self._due[0] if self._due else None

    def take(self) -> Descriptor:
        """A connection writes the next chunk, and keeps it until it is answered."""
        return self._due.popleft()

    def answered(self, chunk: Descriptor) -> bool:
        """A chunk is there; returns whether its message is, whole."""
        self._lacks[chunk.number] -= 1
        if self._lacks[chunk.number]:
            return False
        del self._lacks[chunk.number], self.messages[chunk.number]
        return True

    def again(self, chunks: Iterable[Descriptor]) -> None:
        """Chunks of a connection that went are due once more, before all others."""
        self._due.extendleft(chunk._replace(attempt=chunk.attempt + 1) for chunk in reversed(list(chunks)))


class InStream:
    """The chunks of messages from one rank."""

    def __init__(self) -> None:
        self._whole_up_to = 0
        self._whole: set[int] = set()  # of later messages
        self._lacks: dict[int, int] = {}  # bytes of messages that are not whole
        self._chunks: dict[int, dict[int, tuple[float, Any]]] = {}
        """By message and where the chunk begins: the latest attempt, infinite where the chunk is there, and whose."""

    def begins(self, chunk: Descriptor, owner: Any) -> tuple[bool, Any]:
        """A chunk's bytes follow. Returns whether to take them in, and which connection is to be closed before, since
        its sender has given it up.
        """
        if self.has(chunk.number):
            return False, None
        chunks = self._chunks.setdefault(chunk.number, {})
        attempt, before = chunks.get(chunk.offset, (-1, None))
        if attempt >= chunk.attempt:
            return False, None
        chunks[chunk.offset] = chunk.attempt, owner
        self._lacks.setdefault(chunk.number, chunk.body_bytes)
        return True, before

    def has(self, number: int) -> bool:
        """Whether a message is there, whole."""
        return number <= self._whole_up_to or number in self._whole

    def ended(self, chunk: Descriptor) -> bool:
        """A chunk that was taken in is there; returns whether its message is, whole."""
        number = chunk.number
        self._chunks[number][chunk.offset] = sys.float_info.max, None
        self._lacks[number] -= chunk.capacity
        if self._lacks[number]:
            return False
        del self._lacks[number], self._chunks[number]
        self._whole.add(number)
        while self._whole_up_to + 1 in self._whole:
            self._whole_up_to += 1
            self._whole.discard(self._whole_up_to)
        return True

    def dropped(self, chunk: Descriptor, owner: Any) -> None:
        """The connection of a chunk that was coming in is gone."""
        attempt, whose = self._chunks.get(chunk.number, {}).get(chunk.offset, (0.0, None))
        if whose is owner:
            self._chunks[chunk.number][chunk.offset] = attempt, None


REST, LONGEST_REST = 50 * MS, 2_000 * MS
HOLD, LONGEST_HOLD = 1_000 * MS, 60_000 * MS
WELCOME, LONGEST_WELCOME = 2_000 * MS, 16_000 * MS


def patience(first: int, failures: int, longest: int) -> int:
    """How long to wait after so many failures: twice as long with each, up to the longest."""
    return min(longest, first << min(failures, 10))


class Paths:
    """The paths from a rank to another, the preferred one first. Path 1 joins the second interfaces of both, or the
    second of one and the last of the other.

    A path that failed rests, longer each time. Lanes go back to a better path when it has not failed for a while,
    which is longer with each standing connection that it lost.
    """

    def __init__(self, num: int) -> None:
        self._failures, self._losses = [0] * num, [0] * num  # in a row; of standing connections, ever
        self._failed = [-LONGEST_HOLD] * num  # when, the last time

    def choose(self, now: int) -> int | None:
        """The best path that need not rest; None while all do."""
        return self._first(now, len(self._failed), REST, self._failures, LONGEST_REST)

    def better(self, current: int, now: int) -> int | None:
        """A path that is better than the current one, and has not failed for a while."""
        return self._first(now, current, HOLD, self._losses, LONGEST_HOLD)

    def _first(self, now: int, num: int, wait: int, failures: Sequence[int], longest: int) -> int | None:
        ready = (self._failed[path] + patience(wait, failures[path], longest) for path in range(num))
        return next((path for path, when in enumerate(ready) if now >= when), None)

    def failed(self, path: int, now: int, stood: bool) -> None:
        """No connection came about, or one that stood was lost."""
        self._failures[path] += 1
        self._losses[path] += stood
        self._failed[path] = now

    def stands(self, path: int) -> None:
        """A connection over it stands."""
        self._failures[path] = 0

    def welcome_within(self, path: int) -> int:
        """How long a new connection may take until it is answered."""
        return patience(WELCOME, self._failures[path], LONGEST_WELCOME)


class OutLane:
    """A connection to another rank: it connects, greets, and carries chunks once the other end has answered."""

    def __init__(self, link: OutLink, place: int, path: int, now: int) -> None:
        self._link, self.place, self.path = link, place, path
        (ours, _), (host, port) = link.ends(path)
        made = begin_connect(ours, (host, port))
        self._stream = SocketStream(link.process.loop, made, self._on_ready, partial(link.cut, self))
        self._came = bytearray()
        self._chunk: Descriptor | None = None  # that is being written
        self._written = 0  # bytes of it
        self._unanswered: deque[Descriptor] = deque()
        self._num_answered = 0
        self.is_live = self._is_full = False
        self._heard = self._asked = now
        self._num_late = 0  # times in a row that it was asked and the network had acknowledged nothing
        self._deadline = now + link.paths.welcome_within(path)

    def say(self, kind: DescriptorKind) -> None:
        """Sends a frame between chunks."""
        orders = self._link.process.orders
        self._stream.put(Descriptor(kind, orders.rank, self._link.target, self.place, tag=orders.key).to_bytes())

    def turn(self, now: int) -> None:
        """Asks the other end whether it lives; gives up where the network carries nothing."""
        if not self.is_live:
            if now >= self._deadline:
                self._link.cut(self, errno.ETIMEDOUT)
        elif now - self._asked >= BEAT:
            self._asked = now
            self._num_late = self._num_late + 1 if is_unacknowledged(self._stream.socket) else 0
            if self._num_late > 1 or (self._is_full and now - self._heard >= SILENCE):
                self._link.cut(self, errno.ETIMEDOUT)
            elif self._chunk is None and self._stream.is_sent:
                self.say(DescriptorKind.PING)

    def close(self) -> list[Descriptor]:
        """Ends it; returns the chunks that were not answered."""
        self._stream.close()
        return list(self._unanswered)

    def write(self) -> None:
        """Writes chunks that are due, as much as the socket takes and the rank has filled in."""
        for _ in range(CHUNKS_A_TURN):  # where there are more, the answers to these let it go on
            if not self._stream.is_sent or not self._write_more():
                break

    def _write_more(self) -> bool:
        """Writes more of a chunk, or begins the next one; returns whether there was anything to write."""
        stream, head = self._link.stream, b""
        if self._chunk is None:
            chunk = stream.next
            if chunk is None or not self.is_live or stream.filled(chunk) <= 0:
                return False
            self._chunk, self._written = stream.take(), 0
            self._unanswered.append(chunk)
            head = chunk._replace(kind=DescriptorKind.CHUNK).to_bytes()
        chunk, filled = self._chunk, stream.filled(self._chunk)
        if filled <= self._written:
            return False
        start = stream.messages[chunk.number].offset + chunk.offset
        part = self._link.process.out_memory[start + self._written : start + filled]
        self._written = filled
        if filled == chunk.capacity:
            self._chunk = None
        self._stream.put(head, part)
        return True

    def _on_ready(self, mask: int) -> None:
        self._stream.guard(self._read)
        self.write()

    def _read(self) -> None:
        self._came += self._stream.receive()
        self._heard = time.perf_counter_ns()
        for frame in frames(self._came):
            if not self._stream.is_open:
                return
            self._is_full = frame.kind is DescriptorKind.FULL
            if self._is_full:
                continue
            if frame.kind is not DescriptorKind.ANSWER or frame.number > self._num_answered + len(self._unanswered):
                raise OSError(errno.EPROTO, f"a {frame.kind.name} from a receiver")
            if not self.is_live:
                self.is_live = True
                self._link.welcomed(self)
            while self._num_answered < frame.number:
                self._num_answered += 1
                self._link.answered(self._unanswered.popleft())


class OutLink:
    """All messages to one rank, over as many lanes as the orders say."""

    def __init__(self, process: Delegate, target: int) -> None:
        self.process, self.target = process, target
        self._ends = process.orders.peers[process.orders.rank], process.orders.peers[target]
        self.paths = Paths(max(map(len, self._ends)))
        self.stream = OutStream()
        self.lanes: list[OutLane] = []

    def ends(self, path: int) -> list[tuple[str, int]]:
        """The addresses and ports at the two ends of a path."""
        return [end[min(path, len(end) - 1)] for end in self._ends]

    def push(self) -> None:
        """Writes to all lanes, as a rank or an answer may have made chunks due."""
        for lane in list(self.lanes):
            lane.write()

    def turn(self, now: int) -> None:
        """Sees to the lanes, to one that is missing, and to one that should go over a better path."""
        for lane in list(self.lanes):
            lane.turn(now)
        if not all(lane.is_live for lane in self.lanes):
            return
        paths = {lane.place: lane.path for lane in self.lanes}
        if free := set(range(self.process.orders.num_lanes)) - set(paths):
            place, path = min(free), self.paths.choose(now)
        else:
            place = max(paths, key=paths.__getitem__)
            path = self.paths.better(paths[place], now)
        if path is not None:
            try:
                lane = OutLane(self, place, path, now)
            except OSError as error:
                self._missed(place, path, error.errno or errno.ECONNRESET)
            else:
                self.lanes.append(lane)
                lane.say(DescriptorKind.HELLO)

    def _missed(self, place: int, path: int, error: int) -> None:
        """No connection came about."""
        self.paths.failed(path, time.perf_counter_ns(), stood=False)
        if not any(lane.is_live for lane in self.lanes):
            self._tell(DescriptorKind.LOST, place, path, error)
        self.process.hurry()

    def welcomed(self, made: OutLane) -> None:
        """A lane may carry chunks, in the place of one over a worse path perhaps."""
        for lane in list(self.lanes):
            if lane is not made and lane.place == made.place:
                self.cut(lane, 0)
        self.paths.stands(made.path)
        self._tell(DescriptorKind.CONNECTED, made.place, made.path)
        self.process.hurry()

    def cut(self, lane: OutLane, error: int) -> None:
        """A connection is of no more use. If that is the network's fault, nor are the others on its path."""
        if lane not in self.lanes:
            return
        gone = [lane]
        if lane.is_live and error not in (0, errno.EPROTO, *RESETS):
            gone = [each for each in self.lanes if each.path == lane.path]
            self.paths.failed(lane.path, time.perf_counter_ns(), stood=True)
        for each in gone:
            self.lanes.remove(each)
            chunks = each.close()
            self.stream.again(chunks)
            if each.is_live:
                self._tell(DescriptorKind.LOST, each.place, each.path, error, len(chunks))
            else:
                self._missed(each.place, each.path, error)
        self.push()
        self.process.hurry()

    def answered(self, chunk: Descriptor) -> None:
        """Tells the rank when the last chunk of a message was answered."""
        if self.stream.answered(chunk):
            answer = Descriptor(DescriptorKind.ANSWERED, chunk.source, self.target, number=chunk.number)
            self.process.tell(answer)

    def _tell(self, kind: DescriptorKind, place: int, path: int, error: int = 0, num_again: int = 0) -> None:
        rank = self.process.orders.rank
        self.process.tell(Descriptor(kind, rank, self.target, place, error, path, offset=num_again))


SCRATCH = memoryview(bytearray(CHUNK))
"""Where chunks go that are dropped."""


class InLane:
    """A connection over which chunks come in. Its source is known once the other end has greeted."""

    def __init__(self, process: Delegate, made: socket.socket) -> None:
        self._process = process
        self._stream = SocketStream(process.loop, made, self._on_ready, self.close)
        self._source: int | None = None
        self._ahead = bytearray()  # was read, and not looked at
        self._chunk: Descriptor | None = None  # whose bytes come in
        self._view: memoryview | None = None  # the part that is yet to come; None: there is no room for its message
        self._is_taken = False
        self._num_whole = 0

    def turn(self, now: int) -> None:
        """Tells the sender, again and again, if this connection waits for room."""
        if self._is_starved:
            self._say(DescriptorKind.FULL)

    def close(self, error: int = 0) -> None:
        """Ends it; the part of a chunk that came is dropped."""
        self._stream.close()
        self._process.closed(self)
        if self._chunk is not None:
            self._process.streams[self._chunk.source].dropped(self._chunk, self)

    def fed(self) -> None:
        """There may be room for the message that waits for it."""
        if self._stream.is_open and self._is_starved:
            self._make_room(has_waited=True)
            if not self._is_starved:
                self._say(DescriptorKind.ANSWER)
                self._stream.read(True)
                self._stream.guard(self._look)

    @property
    def _is_starved(self) -> bool:
        return self._chunk is not None and self._view is None

    def _on_ready(self, mask: int) -> None:
        if not self._is_starved:
            self._read()
        elif mask & GONE:
            self.close()  # nobody reads from it now, who would see

    def _read(self) -> None:
        for _ in range(CHUNKS_A_TURN):
            if self._view is None:
                self._ahead += self._stream.receive()
            elif count := self._stream.socket.recv_into(self._view):
                self._view = self._view[count:]
            else:
                self.close()
            self._look()
            if self._is_starved or not self._stream.is_open:
                break

    def _look(self) -> None:
        """Looks at what came: frames, and the bytes of chunks."""
        ahead = self._ahead
        while self._stream.is_open and not self._is_starved:
            if self._view is not None:
                count = min(len(self._view), len(ahead))
                self._view[:count] = ahead[:count]
                del ahead[:count]
                self._view = self._view[count:]
                if self._view:
                    return
                self._whole()
            elif len(ahead) < FRAME_BYTES:
                return
            else:
                self._take(next(frames(ahead)))

    def _take(self, frame: Descriptor) -> None:
        orders = self._process.orders
        if frame.kind is DescriptorKind.HELLO and frame.tag == orders.key and frame.target == orders.rank:
            self._source = frame.source
            self._process.link(frame.source)  # by connecting back it is known whether the other process is there
            self._say(DescriptorKind.ANSWER)
        elif self._source is None or frame.source != self._source:
            raise OSError(errno.EPROTO, "a connection of another run, or for another rank")
        elif frame.kind is DescriptorKind.PING:
            self._say(DescriptorKind.ANSWER)
        elif frame.kind is DescriptorKind.CHUNK and 0 < frame.capacity <= min(CHUNK, frame.body_bytes - frame.offset):
            self._is_taken, other = self._process.streams[frame.source].begins(frame, self)
            if other is not None:
                other.close()
            self._chunk, self._view = frame, SCRATCH[: frame.capacity]
            if self._is_taken:
                self._make_room()
        else:
            raise OSError(errno.EPROTO, f"a {frame.kind.name} from a sender")

    def _make_room(self, has_waited: bool = False) -> None:
        """Finds the chunk's place in its message's slot; without one, the connection waits."""
        assert self._chunk is not None
        self._view = self._process.place(self._chunk, has_waited)
        if self._view is None:
            self._stream.read(False)
            self._process.starve(self, self._chunk.body_bytes)
            self._say(DescriptorKind.FULL)

    def _whole(self) -> None:
        """A chunk has come in to its last byte."""
        chunk, self._chunk, self._view = self._chunk, None, None
        assert chunk is not None
        self._num_whole += 1
        if self._is_taken and self._process.streams[chunk.source].ended(chunk):
            self._process.deliver(chunk)
        self._say(DescriptorKind.ANSWER)

    def _say(self, kind: DescriptorKind) -> None:
        self._stream.put(Descriptor(kind, number=self._num_whole).to_bytes())
