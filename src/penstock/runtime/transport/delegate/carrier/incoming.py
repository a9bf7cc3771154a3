"""What comes in from other ranks: a connection reads chunks right into the slots of their messages.

rank 0's delegate --CHUNK 6b--> InConnection | slot of message 6 |
                  --CHUNK 6a--> InConnection | aaaaaaaaa|bbbb    | --whole: MESSAGE 6--> rank
                  <--ANSWER---                                     <-------FREE--------
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .chunks import InStream
from .descriptor import FRAME_BYTES, Descriptor, DescriptorKind, FrameError, Lane
from .sockets import BEAT, GONE, LONGEST, WRITE, SocketStream

if TYPE_CHECKING:
    from .process import Delegate

BUDGET = 8 << 20
"""Bytes read before others have their turn."""
AHEAD = 16 << 10
"""Bytes read at once where a frame is to come: a small chunk is most often among them."""
SCRATCH = memoryview(bytearray(1 << 18))
"""Where what is dropped goes."""


class InConnection:
    """A connection over which chunks come in."""

    def __init__(self, process: Delegate, made: socket.socket, now: int) -> None:
        self._process, self._socket = process, made
        self._stream = SocketStream(process.loop, made, self._on_ready)
        self.lane: Lane | None = None
        self._ahead = memoryview(bytearray(AHEAD))
        self._begin = self._end = 0  # of what was read ahead and not looked at
        self._chunk: Descriptor | None = None  # whose bytes come in
        self._view: memoryview | None = None  # what is still to be filled; None: dropped
        self._left = self._num_whole = 0
        self._starved = False
        self._heard = self._said = now
        self._open = True

    def turn(self, now: int) -> int:
        """Says where it waits for room, and ends where nothing is heard; returns when to be called again."""
        if self._starved:
            if now - self._said >= BEAT:
                self._said = now
                self._put(DescriptorKind.FULL)
            return self._said + BEAT
        if now - self._heard > LONGEST:  # its sender went to another one long ago
            self.close()
        return self._heard + LONGEST + 1

    def close(self) -> None:
        """Ends it; what came of a chunk is dropped."""
        if self._open:
            self._open = False
            self._stream.close()
            self._process.closed(self)
            if self._chunk is not None and self.lane is not None:
                self._source.dropped(self._chunk, self)

    def fed(self) -> None:
        """There may be room for the message that waits for it."""
        if self._open and self._starved and self._chunk is not None:
            self._starved = False
            self._make_room(self._chunk, has_waited=True)
            if not self._starved:
                self._heard = time.perf_counter_ns()
                self._put(DescriptorKind.ROOM)
                self._stream.read(True)
                self._guarded(self._look)

    @property
    def _source(self) -> InStream[InConnection]:
        assert self.lane is not None
        return self._process.streams[self.lane.source]

    # Reading.

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._put()
        if self._starved and mask & GONE:
            self.close()  # nobody reads from it now, who would see
        elif mask & ~WRITE and self._open and not self._starved:
            self._guarded(self._read)

    def _guarded(self, read: Callable[[], None]) -> None:
        try:
            read()
        except BlockingIOError:
            pass
        except (OSError, FrameError):
            self.close()

    def _read(self) -> None:
        budget, is_drained = BUDGET, False
        while budget > 0 and self._open and not (self._starved or is_drained):
            if self._chunk is not None:
                into = SCRATCH[: self._left] if self._view is None else self._view
                count = self._socket.recv_into(into)
                self._took(count)
            else:
                count = self._socket.recv_into(self._ahead[self._end :])
                is_drained = self._end + count < AHEAD
                self._end += count
            if not count:
                self.close()
                return
            budget -= count
            self._heard = time.perf_counter_ns()
            self._look()

    def _took(self, count: int) -> None:
        """Bytes of the chunk have come in."""
        self._left -= count
        if self._view is not None:
            self._view = self._view[count:]

    def _look(self) -> None:
        """Looks at what is there: frames, and the bytes of chunks."""
        while self._open and not self._starved:
            if self._chunk is None:
                if self._end - self._begin < FRAME_BYTES:
                    break
                frame = Descriptor.of_frame(self._ahead[self._begin : self._begin + FRAME_BYTES])
                self._begin += FRAME_BYTES
                self._take(frame)
            elif not self._left:
                self._whole(self._chunk)
            elif self._begin < self._end:
                count = min(self._left, self._end - self._begin)
                if self._view is not None:
                    self._view[:count] = self._ahead[self._begin : self._begin + count]
                self._begin += count
                self._took(count)
            else:
                break
        left = self._end - self._begin
        self._ahead[:left] = bytes(self._ahead[self._begin : self._end])
        self._begin, self._end = 0, left

    def _take(self, frame: Descriptor) -> None:
        if frame.kind is DescriptorKind.HELLO and self.lane is None:
            orders = self._process.orders
            if frame.tag != orders.key or frame.lane.target != orders.rank:
                raise FrameError("a connection of another run, or for another rank")
            self.lane = frame.lane
            self._process.greeted(frame.lane.source)
            self._put(DescriptorKind.WELCOME)
        elif self.lane is None or frame.lane != self.lane:
            raise FrameError("a frame before its connection said which lane it carries")
        elif frame.kind is DescriptorKind.PING:
            self._put(DescriptorKind.PONG)
        elif frame.kind is DescriptorKind.DOWN:
            self._process.theirs_down(self.lane.source, frame.number)
        elif frame.kind is DescriptorKind.CHUNK and 0 < frame.capacity <= frame.body_bytes - frame.offset:
            self._begin_chunk(frame)
        else:
            raise FrameError(f"a {frame.kind.name} from a sender")

    def _begin_chunk(self, chunk: Descriptor) -> None:
        is_new, other = self._source.begins(chunk, self)
        if other is not None:
            other.close()
        self._chunk, self._left, self._view = chunk, chunk.capacity, None
        if is_new:
            self._make_room(chunk)
        else:
            self._process.io.tell(Descriptor(DescriptorKind.DOUBLED, chunk.lane))

    def _make_room(self, chunk: Descriptor, has_waited: bool = False) -> None:
        """Finds the chunk's place in its message's slot; without one, the connection waits."""
        self._view = self._process.place(chunk, has_waited)
        if self._view is None:
            self._starved = True
            self._stream.read(False)
            self._process.starve(self, chunk.body_bytes)
            self._said = time.perf_counter_ns()
            self._put(DescriptorKind.FULL)

    def _whole(self, chunk: Descriptor) -> None:
        """A chunk has come in to its last byte."""
        is_taken, self._chunk, self._view = self._view is not None, None, None
        self._num_whole += 1
        if is_taken and self._source.ended(chunk):
            self._process.deliver(chunk, self._heard)
        self._put(DescriptorKind.ANSWER, self._num_whole)

    def _put(self, kind: DescriptorKind | None = None, number: int = 0) -> None:
        """Says something, or goes on with what was said before."""
        if self._open:
            try:
                if kind is None:
                    self._stream.flush()
                else:
                    self._stream.put(Descriptor(kind, self.lane or Lane(0, 0), number).frame())
            except OSError:
                self.close()
