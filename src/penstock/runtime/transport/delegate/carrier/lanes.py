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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from .frames import (
    BEAT,
    FRAME_BYTES,
    GONE,
    MS,
    RESETS,
    WRITE,
    Descriptor,
    DescriptorKind,
    SocketStream,
    begin_connect,
    frames,
    is_unacknowledged,
    tune,
)

if TYPE_CHECKING:
    from .process import Delegate

CHUNK = 2 << 20
"""Bytes of a message that one connection carries in a row."""
CHUNKS_A_TURN = 8
"""Chunks that a lane writes, and reads that it makes, before others have their turn."""
AHEAD = 16 << 10
"""Bytes read at once where a frame is to come: a small chunk is most often among them."""
SILENCE = 2_000 * MS
"""A receiver without room that says nothing for so long is gone."""
LONGEST = 16_000 * MS
"""A connection over which nothing has come in for so long was given up by its sender."""
Owner = TypeVar("Owner")


class OutStream:
    """The messages to one rank that are not answered: the chunks that are due, and how many each message lacks."""

    def __init__(self) -> None:
        self._due: deque[Descriptor] = deque()
        self._lacks: dict[int, int] = {}
        self.messages: dict[int, Descriptor] = {}

    def give(self, message: Descriptor) -> None:
        """One more message."""
        size = message.body_bytes
        starts = range(0, size, CHUNK)
        self._lacks[message.number], self.messages[message.number] = len(starts), message
        self._due += [message._replace(offset=at, capacity=min(CHUNK, size - at)) for at in starts]

    def fill(self, number: int, filled: int) -> None:
        """So many bytes of a message are in its slot."""
        self.messages[number] = self.messages[number]._replace(filled=filled)

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


class InStream(Generic[Owner]):
    """The chunks of messages from one rank."""

    def __init__(self) -> None:
        self._whole_up_to = 0
        self._whole: set[int] = set()  # of later messages
        self._lacks: dict[int, int] = {}  # bytes of messages that are not whole
        self._chunks: dict[int, dict[int, tuple[float, Owner | None]]] = {}
        """By message and where the chunk begins: the latest attempt, infinite where the chunk is there, and whose."""

    def begins(self, chunk: Descriptor, owner: Owner) -> tuple[bool, Owner | None]:
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

    def dropped(self, chunk: Descriptor, owner: Owner) -> None:
        """The connection of a chunk that was coming in is gone."""
        attempt, whose = self._chunks.get(chunk.number, {}).get(chunk.offset, (0.0, None))
        if whose is owner:
            self._chunks[chunk.number][chunk.offset] = attempt, None


FIRST_REST, LONGEST_REST = 100 * MS, 2_000 * MS
FIRST_HOLD, LONGEST_HOLD = 2_000 * MS, 60_000 * MS
WELCOME, LONGEST_WELCOME = 2_000 * MS, 16_000 * MS


def patience(first: int, failures: int, longest: int) -> int:
    """How long to wait after so many failures: twice as long with each, up to the longest."""
    return min(longest, first << min(failures, 10))


class Path(NamedTuple):
    """The numbers of an interface here and of one there."""

    ours: int
    theirs: int


class Paths:
    """The paths from a rank to another: like interfaces first, in order, then the crossed ones.

    A path that failed rests, longer each time. Lanes go back to a better path when it has not failed for a while,
    which is longer with each standing connection that it lost.
    """

    def __init__(self, num_ours: int, num_theirs: int) -> None:
        paths = [Path(ours, theirs) for ours in range(num_ours) for theirs in range(num_theirs)]
        self.order = sorted(paths, key=lambda path: (path.ours != path.theirs, path))
        self._failures = dict.fromkeys(self.order, 0)  # in a row
        self._losses = dict.fromkeys(self.order, 0)
        self._failed = dict.fromkeys(self.order, -LONGEST_HOLD)  # when, the last time

    def choose(self, now: int) -> Path | None:
        """The best path that need not rest; None while all do."""
        for path in self.order:
            failures = self._failures[path]
            if not failures or now >= self._failed[path] + patience(FIRST_REST, failures - 1, LONGEST_REST):
                return path
        return None

    def better(self, current: Path, now: int) -> Path | None:
        """A path that is better than the current one, and has not failed for a while."""
        for path in self.order[: self.order.index(current)]:
            if now >= self._failed[path] + patience(FIRST_HOLD, max(0, self._losses[path] - 1), LONGEST_HOLD):
                return path
        return None

    def failed(self, path: Path, now: int, stood: bool) -> None:
        """No connection came about, or one that stood was lost."""
        self._failures[path] += 1
        self._losses[path] += stood
        self._failed[path] = now

    def stands(self, path: Path) -> None:
        """A connection over it stands."""
        self._failures[path] = 0

    def welcome_within(self, path: Path) -> int:
        """How long a new connection may take until it is answered."""
        return patience(WELCOME, self._failures[path], LONGEST_WELCOME)


class OutLane:
    """A connection to another rank: it connects, greets, and carries chunks once the other end has answered."""

    def __init__(self, link: OutLink, place: int, path: Path, now: int) -> None:
        self._link, self.place, self.path = link, place, path
        orders = link.process.orders
        host, port = orders.peers[link.target][path.theirs]
        made = begin_connect(orders.interfaces[path.ours], (host, port))
        self._stream = SocketStream(link.process.loop, made, self._on_ready)
        self._came = bytearray()
        self._chunk: Descriptor | None = None  # that is being written
        self._written = 0  # bytes of it
        self._unanswered: deque[Descriptor] = deque()
        self._num_answered = 0
        self.is_live = self.is_leaving = self._is_full = False
        self._heard = self._asked = now
        self._num_late = 0  # times in a row that it was asked and the network had acknowledged nothing
        self._deadline = now + link.paths.welcome_within(path)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._unanswered

    def greet(self) -> None:
        """Says which rank calls, as soon as the connection stands."""
        self._say(DescriptorKind.HELLO, self._link.process.orders.key)

    def turn(self, now: int) -> None:
        """Asks the other end whether it lives; gives up where the network carries nothing."""
        if not self.is_live:
            if now >= self._deadline:
                self._link.cut(self, errno.ETIMEDOUT)
        elif now - self._asked >= BEAT:
            self._asked = now
            self._num_late = self._num_late + 1 if is_unacknowledged(self._stream.socket) else 0
            is_mute = self._is_full and now - self._heard >= SILENCE
            if is_mute or self._num_late > 1:
                self._link.cut(self, errno.ETIMEDOUT)
            elif self._chunk is None and self._stream.is_sent:
                self._say(DescriptorKind.PING)

    def close(self) -> list[Descriptor]:
        """Ends it; returns the chunks that were not answered."""
        self._stream.close()
        return list(self._unanswered)

    def _say(self, kind: DescriptorKind, tag: int = 0) -> None:
        frame = Descriptor(kind, self._link.process.orders.rank, self._link.target, self.place, tag=tag)
        try:
            self._stream.put(frame.to_bytes())
        except OSError as error:
            self._link.cut(self, error.errno or errno.ECONNRESET)

    def write(self) -> None:
        """Writes chunks that are due, as much as the socket takes and the rank has filled in."""
        try:
            left = CHUNKS_A_TURN
            self._stream.wants_write = False
            self._stream.flush()
            while left and self._stream.is_sent and self._write_more():
                left -= 1
            if not left:
                self._stream.wants_write = True
                self._stream.flush()
        except OSError as error:
            self._link.cut(self, error.errno or errno.ECONNRESET)

    def _write_more(self) -> bool:
        """Writes more of a chunk, or begins the next one; returns whether there was anything to write."""
        stream, head = self._link.stream, b""
        if self._chunk is None:
            chunk = stream.next
            if chunk is None or not self.is_live or self.is_leaving or stream.filled(chunk) <= 0:
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
        if mask & WRITE:
            self.write()
        if mask & ~WRITE and self in self._link.lanes:
            try:
                self._read()
            except BlockingIOError:
                pass
            except OSError as error:
                self._link.cut(self, error.errno or errno.ECONNRESET)
            except ValueError:
                self._link.cut(self, errno.EPROTO)

    def _read(self) -> None:
        data = self._stream.socket.recv(AHEAD)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "")
        self._heard = time.perf_counter_ns()
        self._came += data
        for frame in frames(self._came):
            if self not in self._link.lanes:
                return
            self._is_full = frame.kind is DescriptorKind.FULL
            if self._is_full:
                continue
            if frame.kind is not DescriptorKind.ANSWER or frame.number > self._num_answered + len(self._unanswered):
                raise ValueError(frame)
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
        self.paths = Paths(len(process.orders.interfaces), len(process.orders.peers[target]))
        self.stream = OutStream()
        self.lanes: list[OutLane] = []

    def push(self) -> None:
        """There may be something to write."""
        for lane in list(self.lanes):
            lane.write()

    def turn(self, now: int) -> None:
        """Does what is due."""
        for lane in list(self.lanes):
            if lane.is_leaving and lane.is_idle:
                self.lanes.remove(lane)
                lane.close()
            else:
                lane.turn(now)
        if all(lane.is_live for lane in self.lanes):
            self._seek(now)

    def _seek(self, now: int) -> None:
        """Sees to a lane that is missing, or that should go over a better path."""
        staying = {lane.place: lane.path for lane in self.lanes if not lane.is_leaving}
        free = set(range(self.process.orders.num_lanes)) - set(staying)
        if free:
            place, path = min(free), self.paths.choose(now)
        else:
            place = max(staying, key=lambda place: self.paths.order.index(staying[place]))
            path = self.paths.better(staying[place], now)
        if path is not None:
            try:
                lane = OutLane(self, place, path, now)
            except OSError as error:
                self._missed(place, path, error.errno or errno.ECONNRESET)
            else:
                self.lanes.append(lane)
                lane.greet()

    def _missed(self, place: int, path: Path, error: int) -> None:
        """No connection came about."""
        self.paths.failed(path, time.perf_counter_ns(), stood=False)
        if not any(lane.is_live for lane in self.lanes):
            self._tell(DescriptorKind.LOST, place, path, error)
        self.process.hurry()

    def welcomed(self, made: OutLane) -> None:
        """A lane may carry chunks."""
        for lane in self.lanes:
            if lane is not made and lane.place == made.place and not lane.is_leaving:
                lane.is_leaving = True
                self._tell(DescriptorKind.LOST, lane.place, lane.path, 0)
        self.paths.stands(made.path)
        self._tell(DescriptorKind.CONNECTED, made.place, made.path)
        made.write()
        self.process.hurry()

    def cut(self, lane: OutLane, error: int) -> None:
        """A connection is of no more use. If that is the network's fault, nor are the others on its path."""
        if lane not in self.lanes:
            return
        if not lane.is_live:
            self.lanes.remove(lane)
            lane.close()
            self._missed(lane.place, lane.path, error)
            return
        gone = [lane]
        if error not in RESETS and error != errno.EPROTO:
            gone = [each for each in self.lanes if each.path == lane.path]
            self.paths.failed(lane.path, time.perf_counter_ns(), stood=True)
        for each in gone:
            self.lanes.remove(each)
            chunks = each.close()
            self.stream.again(chunks)
            if each.is_live and not each.is_leaving:
                self._tell(DescriptorKind.LOST, each.place, each.path, error, len(chunks))
        self.push()
        self.process.hurry()

    def answered(self, chunk: Descriptor) -> None:
        """A chunk is there."""
        if self.stream.answered(chunk):
            answer = Descriptor(DescriptorKind.ANSWERED, chunk.source, self.target, number=chunk.number)
            self.process.tell(answer)

    def _tell(self, kind: DescriptorKind, place: int, path: Path, error: int = 0, num_again: int = 0) -> None:
        rank, (ours, theirs) = self.process.orders.rank, path
        self.process.tell(Descriptor(kind, rank, self.target, place, error, ours, theirs, offset=num_again))


SCRATCH = memoryview(bytearray(CHUNK))
"""Where chunks go that are dropped."""


class InLane:
    """A connection over which chunks come in. Its source is known once the other end has greeted."""

    def __init__(self, process: Delegate, made: socket.socket, now: int) -> None:
        tune(made)
        self._process, self._socket = process, made
        self._stream = SocketStream(process.loop, made, self._on_ready)
        self._source: int | None = None
        self._ahead = bytearray()  # was read, and not looked at
        self._chunk: Descriptor | None = None  # whose bytes come in
        self._view: memoryview | None = None  # the part that is yet to come; None: there is no room for its message
        self._is_taken = False
        self._num_whole = 0
        self._heard = now
        self.is_open = True

    def turn(self, now: int) -> None:
        """Says where it waits for room, and ends where nothing is heard."""
        if self._is_starved:
            self._say(DescriptorKind.FULL)
        elif now - self._heard > LONGEST:
            self.close()

    def close(self) -> None:
        """Ends it; the part of a chunk that came is dropped."""
        if self.is_open:
            self.is_open = False
            self._stream.close()
            self._process.closed(self)
            if self._chunk is not None:
                self._process.stream(self._chunk.source).dropped(self._chunk, self)

    def fed(self) -> None:
        """There may be room for the message that waits for it."""
        if self.is_open and self._is_starved:
            self._make_room(has_waited=True)
            if not self._is_starved:
                self._heard = time.perf_counter_ns()
                self._answer()
                self._stream.read(True)
                self._guarded(self._look)

    @property
    def _is_starved(self) -> bool:
        return self._chunk is not None and self._view is None

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._say()
        if self._is_starved and mask & GONE:
            self.close()  # nobody reads from it now, who would see
        elif mask & ~WRITE and self.is_open and not self._is_starved:
            self._guarded(self._read)

    def _guarded(self, read: Callable[[], None]) -> None:
        try:
            read()
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self.close()

    def _read(self) -> None:
        for _ in range(CHUNKS_A_TURN):
            if self._view is not None:
                count = self._socket.recv_into(self._view)
                self._view = self._view[count:]
            else:
                data = self._socket.recv(AHEAD)
                count = len(data)
                self._ahead += data
            if not count:
                self.close()
                return
            self._heard = time.perf_counter_ns()
            self._look()
            if self._is_starved or not self.is_open:
                return

    def _look(self) -> None:
        """Looks at what came: frames, and the bytes of chunks."""
        ahead = self._ahead
        while self.is_open and not self._is_starved:
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
            self._answer()
        elif self._source is None or frame.source != self._source:
            raise ValueError(frame)
        elif frame.kind is DescriptorKind.PING:
            self._answer()
        elif frame.kind is DescriptorKind.CHUNK and 0 < frame.capacity <= min(CHUNK, frame.body_bytes - frame.offset):
            self._is_taken, other = self._process.stream(frame.source).begins(frame, self)
            if other is not None:
                other.close()
            self._chunk, self._view = frame, SCRATCH[: frame.capacity]
            if self._is_taken:
                self._make_room()
        else:
            raise ValueError(frame)

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
        if self._is_taken and self._process.stream(chunk.source).ended(chunk):
            self._process.deliver(chunk, self._heard)
        self._answer()

    def _answer(self) -> None:
        self._say(DescriptorKind.ANSWER)

    def _say(self, kind: DescriptorKind | None = None) -> None:
        """Says something, or goes on with what was said before."""
        if self.is_open:
            try:
                if kind is None:
                    self._stream.flush()
                else:
                    self._stream.put(Descriptor(kind, number=self._num_whole).to_bytes())
            except OSError:
                self.close()
