"""One connection that a receiving delegate took in: its frames, and the message that is coming in."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from . import sockets, timing
from .event_loop import GONE, WRITE
from .frame import HEADER_BYTES, Frame, FrameError, FrameKind, Lane, pack, unpack
from .lane import LaneError
from .ring import CloseReason, Descriptor, Note
from .stream import SocketStream

if TYPE_CHECKING:
    from .incoming import Receiver

BUDGET = 8 << 20
"""Bytes read before other connections have their turn."""
SCRATCH = bytearray(1 << 20)
"""Where what is dropped goes."""


class InConnection:
    """Args:
    place: of our interface that it came in on.
    """

    def __init__(self, receiver: Receiver, made: socket.socket, place: int, now: int) -> None:
        self._receiver, self.place = receiver, place
        self._stream, self._socket = SocketStream(receiver.loop, made, self._on_ready), made
        self.lane: Lane | None = None
        self._epoch = 0
        self._header = bytearray(HEADER_BYTES)
        self._head_view = memoryview(self._header)
        self._got = 0
        self._frame: Frame | None = None  # of the body that is coming in
        self._slot: tuple[int, int] | None = None
        self._view: memoryview | None = None  # what is still to be filled; None: dropped
        self._left = 0
        self._starved = False
        self._posted = self._said = 0
        self._heard = self._begun = now
        self._silent = False
        self._open = True

    def turn(self, now: int) -> int:
        """Says where nothing is heard; returns when to look again."""
        if self.lane is None:
            if now - self._begun > timing.LONGEST:
                self.close(CloseReason.NO_WELCOME)
            return self._begun + timing.LONGEST + 1
        if self._starved:
            if now - self._said >= timing.BEAT:
                self._say_full()
            return self._said + timing.BEAT
        if self._silent:
            return now + timing.LONGEST
        if now - self._heard >= timing.SILENCE:
            self._silent = True
            self._receiver.home.tell(Descriptor(Note.SILENT, self.lane))
        return self._heard + timing.SILENCE

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._put()
        if self._starved and mask & GONE:
            self.close(CloseReason.RESET)  # nobody reads from it now, who would see
        elif mask & ~WRITE and self._open and not self._starved:
            try:
                self._read()
            except BlockingIOError:
                pass
            except OSError as error:
                self.close(sockets.meaning(error.errno))
            except (FrameError, LaneError):
                self.close(CloseReason.BROKEN)

    def close(self, why: CloseReason, lost: bool = True) -> None:
        """Ends it; what came of a message is dropped. `lost`: its lane has no connection then."""
        if not self._open:
            return
        self._open = False
        self._stream.close()
        if self._slot is not None:
            self._view = None
            self._receiver.slots.free(*self._slot)
            self._slot = None
        self._receiver.gone(self)
        if self.lane is not None and lost:
            self._receiver.home.tell(Descriptor(Note.CUT, self.lane, int(why), self.place))
            self._receiver.cut(self.lane)

    def fed(self) -> None:
        """There may be room for the message that waits for it."""
        if self._open and self._starved:
            self._starved = False
            self._make_room()
            if not self._starved:
                self._heard = time.perf_counter_ns()
                if self.lane is not None:
                    self._put(pack(Frame(FrameKind.ROOM, self.lane)))
                self._stream.read(True)

    # Reading.

    def _read(self) -> None:
        budget = BUDGET
        while budget > 0 and self._open and not self._starved:
            if self._frame is None:
                count = self._socket.recv_into(self._head_view[self._got :])
                self._got += count
            elif self._view is not None:
                count = self._socket.recv_into(self._view)
                self._view = self._view[count:]
                self._left -= count
            else:
                count = self._socket.recv_into(SCRATCH, min(self._left, len(SCRATCH)))
                self._left -= count
            if not count:
                self.close(CloseReason.CLOSED)
                return
            budget -= count
            self._hear()
            if self._frame is None:
                if self._got == HEADER_BYTES:
                    self._got = 0
                    self._take(unpack(self._header))
            elif not self._left:
                self._whole(self._frame)

    def _hear(self) -> None:
        self._heard = time.perf_counter_ns()
        if self._silent and self.lane is not None:
            self._silent = False
            self._receiver.home.tell(Descriptor(Note.HEARD, self.lane))

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.HELLO:
            self._greet(frame)
        elif self.lane is None or frame.lane != self.lane:
            raise FrameError("a frame before its connection said which lane it carries")
        elif frame.kind is FrameKind.PING:
            self._put(pack(Frame(FrameKind.PONG, self.lane)))
        elif frame.kind is FrameKind.DATA and frame.body_bytes > 0:
            new = self._receiver.lanes[self.lane].begins(self._epoch, frame.number)
            self._frame, self._left, self._view = frame, frame.body_bytes, None
            if new:
                self._posted = frame.sent
                self._make_room()
            else:
                self._receiver.home.tell(Descriptor(Note.DOUBLED, self.lane))
        else:
            raise FrameError(f"a {frame.kind.name} from a sender")

    def _greet(self, frame: Frame) -> None:
        orders = self._receiver.orders
        lane = frame.lane
        mine = orders.rank, orders.kind, orders.place
        if frame.tag != orders.key or (lane.target, lane.kind, lane.place) != mine or self.lane is not None:
            raise FrameError("a connection of another run, or for another delegate")
        if self._receiver.home.behind:
            # A message that the rank can't read yet is not to be answered, and a welcome answers all: try again.
            self.close(CloseReason.NO_WELCOME)
            return
        last = self._receiver.greeted(self, lane, frame.number)
        self.lane, self._epoch = lane, frame.number
        self._put(pack(Frame(FrameKind.WELCOME, lane, last)))
        sockets.trust(self._socket)
        self._receiver.home.tell(Descriptor(Note.CONNECTED, lane, 0, self.place))

    def _make_room(self) -> None:
        """Finds a slot for the message whose header came; without one, the connection waits."""
        assert self._frame is not None
        size = self._frame.body_bytes
        slot = self._receiver.slots.take(size)
        if slot is None:
            self._starved = True
            self._posted = 0
            self._stream.read(False)
            self._receiver.starve(self, size)
            self._say_full()
            return
        if self._posted == 0:
            self._posted = time.perf_counter_ns()
        self._slot = slot
        self._view = self._receiver.home.memory[slot[0] : slot[0] + size]

    def _whole(self, frame: Frame) -> None:
        """A message has come in to its last byte."""
        assert self.lane is not None
        slot, self._slot, self._frame, self._view = self._slot, None, None, None
        receiver, lane = self._receiver, self.lane
        if slot is None:
            self._put(pack(Frame(FrameKind.ANSWER, lane, receiver.lanes[lane].last)))
            return
        receiver.lanes[lane] = receiver.lanes[lane].whole(self._epoch, frame.number)
        note = Descriptor(
            Note.MESSAGE,
            lane,
            frame.number,
            frame.tag,
            frame.step,
            frame.digest,
            frame.sent,
            self._posted,
            self._heard,
            *slot,
            frame.spec_bytes,
            frame.payload_bytes,
        )
        receiver.home.tell(note, lambda: self._put(pack(Frame(FrameKind.ANSWER, lane, frame.number))))

    # Writing.

    def _say_full(self) -> None:
        self._said = time.perf_counter_ns()
        if self.lane is not None:
            self._put(pack(Frame(FrameKind.FULL, self.lane)))

    def _put(self, *parts: bytes) -> None:
        if self._open:
            try:
                self._stream.put(*parts)
            except OSError as error:
                self.close(sockets.meaning(error.errno))
