"""What goes to another rank: connections over the best interfaces that work, each with the next chunk that is due.

    rank --SEND--> | OutLink to rank 1     | OutLane 0 --CHUNK 4b--> rank 1's delegate
         <-ANSWERED| due: 4c 4d 5a 5b ...  | OutLane 1 --CHUNK 4a-->
                                                       <-ANSWER---

    an OutLink seeks --> connects --> greets --welcome--> one more lane, until it has as many as it should
                 ^            fails      |
                 +---- the next path <---+       a better path is up again: its lane takes an older one's place

A chunk is written as far as the rank has filled it in, so that the rank's copying and the wire overlap.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import sockets
from .chunks import OutStream
from .descriptor import FRAME_BYTES, SLOT_HEAD, CloseReason, Descriptor, DescriptorKind, FrameError, Lane
from .paths import Path, Paths, by_preference, patience
from .sockets import BEAT, CONNECT, LONGEST, READ, SILENCE, WELCOME, WRITE, ConnectAttempt

if TYPE_CHECKING:
    from .process import Delegate

SMALL = 64 << 10
"""Bytes of a chunk up to which it goes with its frame in one call."""
BUDGET = 8 << 20
"""Bytes written before others have their turn."""


class OutLane:
    """A connection to another rank, once it stands. It greets, and carries chunks when it was welcomed.

    Args:
        place: which of the link's lanes.
    """

    def __init__(self, link: OutLink, place: int, attempt: ConnectAttempt, now: int) -> None:
        self._link, self._process = link, link.process
        self.place, self.path = place, attempt.path
        self._socket = attempt.socket
        self._mask = READ
        self.is_live = self.is_leaving = False
        self.deadline = now + patience(WELCOME, link.paths.failures(self.path), LONGEST)
        self._bytes = memoryview(b"")  # of frames, and of small chunks
        self._chunk: Descriptor | None = None  # that is being written
        self._written = 0  # bytes of it
        self._unanswered: deque[Descriptor] = deque()
        self._num_answered = 0
        self._came = bytearray()
        self._heard = self._spoke = now
        self._silent = self._full = False
        self._process.loop.watch(self._socket.fileno(), READ, self._on_ready)
        self.lane = Lane(self._process.orders.rank, link.target, place)
        self.say(DescriptorKind.HELLO, tag=self._process.orders.key)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._unanswered

    @property
    def is_writing(self) -> bool:
        """Whether a chunk is being written."""
        return self._chunk is not None

    def say(self, kind: DescriptorKind, number: int = 0, tag: int = 0) -> None:
        """Sends a frame, unless a chunk is being written: whoever reads that knows that this end lives."""
        if self._chunk is None:
            self._bytes = memoryview(bytes(self._bytes) + Descriptor(kind, self.lane, number, tag).frame())
            self.write()

    def turn(self, now: int) -> int:
        """Keeps it alive; returns when to be called again."""
        if now - self._spoke >= BEAT and self._chunk is None and not self._bytes:
            self.say(DescriptorKind.PING)
        is_quiet = now - self._heard >= SILENCE
        if is_quiet and (self._full or sockets.is_unacknowledged(self._socket)):
            self._link.cut(self, CloseReason.TIMED_OUT, now)
            return now
        if is_quiet and not self._silent:
            self._silent = True
            self._link.tell(DescriptorKind.SILENT, self)
        return now + BEAT if self._mask & WRITE or self._chunk is not None else max(self._spoke + BEAT, now + 1)

    def close(self) -> list[Descriptor]:
        """Ends it; returns the chunks that were not answered."""
        self._process.loop.forget(self._socket.fileno())
        sockets.close(self._socket)
        self._bytes = memoryview(b"")
        return list(self._unanswered)

    # Writing.

    def write(self) -> None:
        """Writes what is due, as much as the socket takes and the rank has filled in."""
        budget, mask = BUDGET, READ
        try:
            while budget > 0:
                if self._bytes:
                    sent = self._socket.send(self._bytes, socket.MSG_MORE if self._chunk is not None else 0)
                    self._bytes = self._bytes[sent:]
                elif self._chunk is not None:
                    sent = self._write_chunk(self._chunk)
                elif not self._begin_chunk():
                    break
                else:
                    continue
                if not sent:
                    break
                budget -= sent
                self._spoke = time.perf_counter_ns()
            else:
                mask = READ | WRITE  # has more
        except BlockingIOError:
            mask = READ | WRITE
        except OSError as error:
            self._link.cut(self, sockets.meaning(error.errno), time.perf_counter_ns())
            return
        if mask != self._mask:
            self._mask = mask
            self._process.loop.change(self._socket.fileno(), mask)

    def _begin_chunk(self) -> bool:
        """Takes the next chunk that is due, where its first bytes are there."""
        chunk = self._link.stream.next
        if chunk is None or not self.is_live or self.is_leaving:
            return False
        filled = self._process.io.filled(chunk.start) - chunk.offset
        if filled <= 0:
            return False
        self._link.stream.take()
        self._unanswered.append(chunk)
        frame = chunk._replace(kind=DescriptorKind.CHUNK, lane=self.lane, start=0).frame()
        if chunk.capacity <= min(SMALL, filled):
            at = chunk.start + SLOT_HEAD + chunk.offset
            self._bytes = memoryview(frame + self._process.io.out_memory[at : at + chunk.capacity])
        else:
            self._bytes, self._chunk, self._written = memoryview(frame), chunk, 0
        return True

    def _write_chunk(self, chunk: Descriptor) -> int:
        """Writes more of a chunk; returns how many bytes, none where the rank has not written further."""
        filled = min(self._process.io.filled(chunk.start) - chunk.offset, chunk.capacity)
        if filled <= self._written:
            return 0
        start = chunk.start + SLOT_HEAD + chunk.offset
        sent = self._socket.send(self._process.io.out_memory[start + self._written : start + filled])
        self._written += sent
        if self._written == chunk.capacity:
            self._chunk = None
        return sent

    # Reading.

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self.write()
        if mask & ~WRITE and self._link.carries(self):
            self._read()

    def _read(self) -> None:
        now = time.perf_counter_ns()
        try:
            data = self._socket.recv(1 << 14)
        except BlockingIOError:
            return
        except OSError as error:
            self._link.cut(self, sockets.meaning(error.errno), now)
            return
        if not data:
            self._link.cut(self, CloseReason.CLOSED, now)
            return
        self._heard = now
        if self._silent:
            self._silent = False
            self._link.tell(DescriptorKind.HEARD, self)
        self._came += data
        try:
            while len(self._came) >= FRAME_BYTES and self._link.carries(self):
                frame = Descriptor.of_frame(self._came[:FRAME_BYTES])
                del self._came[:FRAME_BYTES]
                self._take(frame, now)
        except FrameError:
            self._link.cut(self, CloseReason.BROKEN, now)

    def _take(self, frame: Descriptor, now: int) -> None:
        if frame.kind is DescriptorKind.WELCOME and not self.is_live:
            self.is_live = True
            sockets.trust(self._socket)
            self._link.welcomed(self, now)
        elif frame.kind is DescriptorKind.ANSWER and frame.number <= self._num_answered + len(self._unanswered):
            while self._num_answered < frame.number:
                self._num_answered += 1
                self._link.answered(self._unanswered.popleft())
        elif frame.kind in (DescriptorKind.FULL, DescriptorKind.ROOM):
            self._full = frame.kind is DescriptorKind.FULL
            sockets.trust(self._socket, stands_still=self._full)
        elif frame.kind is not DescriptorKind.PONG:
            raise FrameError(f"a {frame.kind.name} from a receiver")


class OutLink:
    """All that goes to one rank, over as many lanes as the orders say."""

    def __init__(self, process: Delegate, target: int) -> None:
        self.process, self.target = process, target
        self._ends = process.orders.peers[target]
        up = process.monitor.interfaces.up
        self.paths = Paths(
            by_preference(len(process.orders.interfaces), len(self._ends)),
            frozenset(place for place, is_up in enumerate(up) if not is_up),
        )
        self.stream = OutStream()
        self._lanes: list[OutLane] = []
        self._attempt: ConnectAttempt | None = None
        self._greeting: OutLane | None = None
        self._refused = self._lost = False

    def push(self) -> None:
        """Something may be due, or more of it be there."""
        for lane in list(self._lanes):
            if lane.is_writing or self.stream.next is not None:
                lane.write()

    def carries(self, lane: OutLane) -> bool:
        """Whether a lane is in use."""
        return lane is self._greeting or lane in self._lanes

    def turn(self, now: int) -> int:
        """Does what is due; returns when to be called again."""
        for lane in self._lanes:
            if lane.is_leaving and lane.is_idle:
                self._lanes.remove(lane)
                lane.close()
                break
        when = min([lane.turn(now) for lane in list(self._lanes)], default=now + LONGEST)
        return min(when, self._seek(now))

    # Connecting.

    def _seek(self, now: int) -> int:
        """Sees to a lane that is missing, or that should go over a better path."""
        if self._greeting is not None:
            if now >= self._greeting.deadline:
                self.cut(self._greeting, CloseReason.NO_WELCOME, now)
                return now
            return self._greeting.deadline
        if self._attempt is not None:
            if now >= self._attempt.deadline:
                self._attempt.close()
                self._missed(self._attempt.path, CloseReason.TIMED_OUT, now)
                return now
            return self._attempt.deadline
        path, when = self._wanted_path(now)
        if path is None:
            if not self._lanes and not self._lost and self.paths.all_failed:
                self._lose(self.paths.order[0], CloseReason.INTERFACE_DOWN)
            return when
        interfaces, deadline = (
            self.process.orders.interfaces,
            now + patience(CONNECT, self.paths.failures(path), LONGEST),
        )
        try:
            self._attempt = ConnectAttempt(self.process.loop, path, interfaces, self._ends, deadline, self._tried)
        except OSError as error:
            self._missed(path, sockets.meaning(error.errno), now)
            return now
        return deadline

    def _wanted_path(self, now: int) -> tuple[Path | None, int]:
        staying = [lane for lane in self._lanes if not lane.is_leaving]
        if len(staying) < self.process.orders.num_lanes:
            return self.paths.choose(now)
        return self.paths.better(max((lane.path for lane in staying), key=self.paths.order.index), now)

    def _tried(self, attempt: ConnectAttempt, error: int) -> None:
        now = time.perf_counter_ns()
        if error:
            self._missed(attempt.path, sockets.meaning(error), now)
            return
        self._attempt = None
        staying = {lane.place: lane for lane in self._lanes if not lane.is_leaving}
        free = [place for place in range(self.process.orders.num_lanes) if place not in staying]
        place = free[0] if free else max(staying, key=lambda place: self.paths.order.index(staying[place].path))
        self._greeting = OutLane(self, place, attempt, now)

    def _missed(self, path: Path, why: CloseReason, now: int) -> None:
        """No connection came about."""
        self._attempt = self._greeting = None
        self.paths = self.paths.failed(path, now)
        if self._lanes:
            return
        if why is CloseReason.REFUSED and not self._refused:
            self._refused = True
            self.process.io.tell(Descriptor(DescriptorKind.REFUSED, self._lane, why))
        elif not self._lost and self.paths.all_failed:
            self._lose(path, why)

    def _lose(self, path: Path, why: CloseReason) -> None:
        self._lost = True
        self.process.io.tell(Descriptor(DescriptorKind.NO_WAY, self._lane, why, path.ours, path.theirs))

    @property
    def _lane(self) -> Lane:
        return Lane(self.process.orders.rank, self.target)

    def welcomed(self, made: OutLane, now: int) -> None:
        """A lane may carry chunks."""
        self._greeting = None
        for lane in self._lanes:
            if lane.place == made.place and not lane.is_leaving:
                lane.is_leaving = True
                self.tell(DescriptorKind.CUT, lane, CloseReason.BETTER_PATH)
        self._lanes.append(made)
        self.paths = self.paths.stands(made.path)
        self._refused = self._lost = False
        self.tell(DescriptorKind.CONNECTED, made)
        for place, is_up in enumerate(self.process.monitor.interfaces.up):
            if not is_up:
                made.say(DescriptorKind.DOWN, place)
        made.write()

    def cut(self, lane: OutLane, why: CloseReason, now: int) -> None:
        """A connection is of no more use; where that is the network's fault, nor are the others on its path."""
        if lane is self._greeting:
            lane.close()
            self._missed(lane.path, why, now)
            return
        if lane not in self._lanes:
            return
        gone = [lane]
        if why not in (CloseReason.CLOSED, CloseReason.RESET, CloseReason.BROKEN):
            gone = [each for each in self._lanes if each.path == lane.path]
            self.paths = self.paths.left(lane.path, now)
        for each in gone:
            self._lanes.remove(each)
            chunks = each.close()
            self.stream.again(chunks)
            if not each.is_leaving:
                self.tell(DescriptorKind.CUT, each, why, len(chunks))
        self.push()

    # Interfaces.

    def interface(self, ours: int, up: bool, now: int) -> None:
        """The kernel's word on one of our interfaces. The other end can't know, and is told by one that works."""
        self.paths = self.paths.interface(ours, up, now)
        if up:
            return
        if self._attempt is not None and self._attempt.path.ours == ours:
            self._attempt.close()
            self._attempt = None
        self._cut_where(lambda path: path.ours == ours, now)
        for lane in self._lanes[:1]:
            lane.say(DescriptorKind.DOWN, ours)

    def theirs_down(self, theirs: int, now: int) -> None:
        """The other rank says that an interface of its own is down."""
        self._cut_where(lambda path: path.theirs == theirs, now)

    def _cut_where(self, is_dead: Callable[[Path], bool], now: int) -> None:
        for lane in [*self._lanes, self._greeting]:
            if lane is not None and is_dead(lane.path):
                self.cut(lane, CloseReason.INTERFACE_DOWN, now)

    # What is told.

    def answered(self, chunk: Descriptor) -> None:
        if self.stream.answered(chunk):
            self.process.io.tell(Descriptor(DescriptorKind.ANSWERED, self._lane, chunk.number))

    def tell(self, note: DescriptorKind, lane: OutLane, number: int = 0, num_again: int = 0) -> None:
        ours, theirs = lane.path
        self.process.io.tell(Descriptor(note, lane.lane, int(number), ours, theirs, offset=num_again))
