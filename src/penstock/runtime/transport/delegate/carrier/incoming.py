"""A delegate that receives: takes connections in on every interface, and puts messages into slots as they come.

    the sending delegate of rank 0 --DATA--> | lane 0->1: last 6 | --MESSAGE--> rank
                                   <-ANSWER- |                   | <---FREE----

An `InConnection` is one connection: its frames, and the message that is coming in. A `LinkDownNotice` tells other
ranks, over an interface that works, that one of ours is down. A `PeerWatch` looks for a rank that should connect and
does not.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator

from . import sockets
from .delegate import Delegate, DelegateOrders
from .descriptor import FRAME_BYTES, CloseReason, Descriptor, DescriptorKind, FrameError, Lane
from .lane import MS, LaneError, Path, ReceivingEnd, by_preference
from .shared import Slots
from .sockets import BEAT, CONNECT, GONE, LONGEST, PROBE, READ, SILENCE, WRITE, ConnectAttempt, SocketStream

BUDGET = 8 << 20
"""Bytes read before other connections have their turn."""
SCRATCH = bytearray(1 << 20)
"""Where what is dropped goes."""


class InConnection:
    """A connection over which messages come in to a receiving delegate.

    Args:
        place: of our interface that it came in on.
    """

    def __init__(self, receiver: Receiver, made: socket.socket, place: int, now: int) -> None:
        self._receiver, self.place = receiver, place
        self._stream, self._socket = SocketStream(receiver.loop, made, self._on_ready), made
        self.lane: Lane | None = None
        self._epoch = 0
        self._header = bytearray(FRAME_BYTES)
        self._head_view = memoryview(self._header)
        self._got = 0
        self._frame: Descriptor | None = None  # of the body that is coming in
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
            if now - self._begun > LONGEST:
                self.close(CloseReason.NO_WELCOME)
            return self._begun + LONGEST + 1
        if self._starved:
            if now - self._said >= BEAT:
                self._say_full()
            return self._said + BEAT
        if self._silent:
            return now + LONGEST
        if now - self._heard >= SILENCE:
            self._silent = True
            self._receiver.io.tell(Descriptor(DescriptorKind.SILENT, self.lane))
        return self._heard + SILENCE

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
            self._receiver.io.tell(Descriptor(DescriptorKind.CUT, self.lane, int(why), self.place))
            self._receiver.cut(self.lane)

    def fed(self) -> None:
        """There may be room for the message that waits for it."""
        if self._open and self._starved:
            self._starved = False
            self._make_room()
            if not self._starved:
                self._heard = time.perf_counter_ns()
                if self.lane is not None:
                    self._put(Descriptor(DescriptorKind.ROOM, self.lane).frame())
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
                if self._got == FRAME_BYTES:
                    self._got = 0
                    self._take(Descriptor.of_frame(self._header))
            elif not self._left:
                self._whole(self._frame)

    def _hear(self) -> None:
        self._heard = time.perf_counter_ns()
        if self._silent and self.lane is not None:
            self._silent = False
            self._receiver.io.tell(Descriptor(DescriptorKind.HEARD, self.lane))

    def _take(self, frame: Descriptor) -> None:
        if frame.kind is DescriptorKind.HELLO:
            self._greet(frame)
        elif self.lane is None or frame.lane != self.lane:
            raise FrameError("a frame before its connection said which lane it carries")
        elif frame.kind is DescriptorKind.PING:
            self._put(Descriptor(DescriptorKind.PONG, self.lane).frame())
        elif frame.kind is DescriptorKind.DATA and frame.body_bytes > 0:
            new = self._receiver.lanes[self.lane].begins(self._epoch, frame.number)
            self._frame, self._left, self._view = frame, frame.body_bytes, None
            if new:
                self._posted = frame.sent
                self._make_room()
            else:
                self._receiver.io.tell(Descriptor(DescriptorKind.DOUBLED, self.lane))
        else:
            raise FrameError(f"a {frame.kind.name} from a sender")

    def _greet(self, frame: Descriptor) -> None:
        orders = self._receiver.orders
        lane = frame.lane
        mine = orders.rank, orders.kind, orders.place
        if frame.tag != orders.key or (lane.target, lane.kind, lane.place) != mine or self.lane is not None:
            raise FrameError("a connection of another run, or for another delegate")
        if self._receiver.io.behind:
            # A message that the rank can't read yet is not to be answered, and a welcome answers all: try again.
            self.close(CloseReason.NO_WELCOME)
            return
        last = self._receiver.greeted(self, lane, frame.number)
        self.lane, self._epoch = lane, frame.number
        self._put(Descriptor(DescriptorKind.WELCOME, lane, last).frame())
        sockets.trust(self._socket)
        self._receiver.io.tell(Descriptor(DescriptorKind.CONNECTED, lane, 0, self.place))

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
        self._view = self._receiver.io.memory[slot[0] : slot[0] + size]

    def _whole(self, frame: Descriptor) -> None:
        """A message has come in to its last byte."""
        assert self.lane is not None
        slot, self._slot, self._frame, self._view = self._slot, None, None, None
        receiver, lane = self._receiver, self.lane
        if slot is None:
            self._put(Descriptor(DescriptorKind.ANSWER, lane, receiver.lanes[lane].last).frame())
            return
        receiver.lanes[lane] = receiver.lanes[lane].whole(self._epoch, frame.number)
        note = frame._replace(
            kind=DescriptorKind.MESSAGE, start=self._posted, arrived=self._heard, offset=slot[0], capacity=slot[1]
        )
        receiver.io.tell(note, lambda: self._put(Descriptor(DescriptorKind.ANSWER, lane, frame.number).frame()))

    # Writing.

    def _say_full(self) -> None:
        self._said = time.perf_counter_ns()
        if self.lane is not None:
            self._put(Descriptor(DescriptorKind.FULL, self.lane).frame())

    def _put(self, *parts: bytes) -> None:
        if self._open:
            try:
                self._stream.put(*parts)
            except OSError as error:
                self.close(sockets.meaning(error.errno))


class LinkDownNotice:
    """One message to one rank, tried over one path after the other, over interfaces of ours that work.

    A rank that sends to a dead interface of another host hears nothing, and would wait until TCP gives up. The host
    whose interface it is knows at once, and it is the receiver that can say so: to the socket that shows the sender's
    presence.

    Args:
        lane: from the rank that is told; down: the place of our interface.
    """

    def __init__(self, receiver: Receiver, lane: Lane, down: int) -> None:
        self._receiver, self._lane, self._down = receiver, lane, down
        up = receiver.monitor.interfaces.up
        paths = by_preference(len(up), len(receiver.orders.presence[lane.source]))
        self._paths: Iterator[Path] = iter([path for path in paths if up[path.ours]])
        self._attempt: ConnectAttempt | None = None
        self._try(time.perf_counter_ns())

    @property
    def done(self) -> bool:
        """Whether it was told, or there is no path left."""
        return self._attempt is None

    def turn(self, now: int) -> int:
        """Goes on to the next path where one takes too long; returns when to be called again."""
        if self._attempt is not None and now >= self._attempt.deadline:
            self._attempt.close()
            self._try(now)
        return now + LONGEST if self._attempt is None else self._attempt.deadline

    def _try(self, now: int) -> None:
        self._attempt = None
        for path in self._paths:
            with contextlib.suppress(OSError):
                self._attempt = self._receiver.call(self._lane.source, path, now + CONNECT, self._connected)
                return

    def _connected(self, attempt: ConnectAttempt, error: int) -> None:
        news = Descriptor(DescriptorKind.THEIRS_DOWN, self._lane, self._down, self._receiver.orders.key)
        try:
            if not error:
                attempt.socket.send(news.frame())
                attempt.socket.close()  # what was sent still goes
                self._attempt = None
                return
        except OSError:
            attempt.close()
        self._try(time.perf_counter_ns())


class PeerWatch:
    """Looks for a rank that should connect over a lane and does not: where nobody listens, its process has ended.

    A connection that went may be one that will come back over another interface, so its end proves nothing. That the
    other rank's host is there and refuses to connect does: its listeners last as long as its process.
    """

    def __init__(self, receiver: Receiver, lane: Lane) -> None:
        self._receiver, self._lane = receiver, lane
        self._due: int | None = None
        self._attempt: ConnectAttempt | None = None
        self._number = 0
        self._has_told = False

    def wait(self, now: int) -> None:
        """No connection from now on."""
        self._due = now + PROBE

    def connected(self) -> None:
        self._due, self._has_told = None, False
        self._end()

    def turn(self, now: int) -> int:
        """Looks, when it is time; returns when it is next."""
        if self._due is None:
            return now + LONGEST
        if now < self._due:
            return self._due
        self._end()
        self._due = now + PROBE
        orders, source = self._receiver.orders, self._lane.source
        path = Path(self._number % len(orders.interfaces), self._number % len(orders.presence[source]))
        self._number += 1
        try:
            self._attempt = self._receiver.call(source, path, self._due, self._answered)
        except OSError as error:
            self._judge(error.errno)
        return self._due

    def _answered(self, attempt: ConnectAttempt, error: int) -> None:
        self._end()
        self._judge(error)

    def _judge(self, error: int | None) -> None:
        if error and sockets.meaning(error) is CloseReason.REFUSED and not self._has_told:
            self._has_told = True
            self._receiver.io.tell(Descriptor(DescriptorKind.REFUSED, self._lane, CloseReason.REFUSED))

    def _end(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None


class Receiver(Delegate):
    """The lanes and connections of one receiving delegate."""

    def __init__(self, orders: DelegateOrders) -> None:
        super().__init__(orders)
        self.slots = Slots(orders.limit, orders.span, orders.taken)
        self.lanes = {orders.lane(s, t): ReceivingEnd(last) for s, t, last in orders.lanes}
        self.connections: set[InConnection] = set()
        self._watches: dict[Lane, PeerWatch] = {}
        self._notices: list[LinkDownNotice] = []
        self._starved: list[InConnection] = []
        self._has_room = False
        for place, number in enumerate(orders.listeners):
            listener = socket.socket(fileno=number)
            listener.setblocking(False)
            self.loop.watch(number, READ, self._acceptor(listener, place))

    def turn(self, now: int) -> int:
        when = now + LONGEST
        for connection in list(self.connections):
            when = min(when, connection.turn(now))
        for watch in self._watches.values():
            when = min(when, watch.turn(now))
        self._notices = [notice for notice in self._notices if not notice.done]
        for notice in self._notices:
            when = min(when, notice.turn(now))
        return when

    def _acceptor(self, listener: socket.socket, place: int) -> Callable[[int], None]:
        return lambda mask: self._accept(listener, place)

    def _accept(self, listener: socket.socket, place: int) -> None:
        while True:
            try:
                made, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(10 * MS / 1e9)  # the connection waits in the listener's queue meanwhile
                return
            sockets.tune(made)
            self.connections.add(InConnection(self, made, place, time.perf_counter_ns()))

    def greeted(self, connection: InConnection, lane: Lane, epoch: int) -> int:
        """A connection says which lane it carries: closes older ones; returns the last message that is there."""
        state = self.lanes.get(lane, ReceivingEnd()).hello(epoch)
        self.lanes[lane] = state
        for other in list(self.connections):
            if other is not connection and other.lane == lane:
                other.close(CloseReason.CLOSED, lost=False)
        self._watches.setdefault(lane, PeerWatch(self, lane)).connected()
        return state.last

    def call(
        self, rank: int, path: Path, deadline: int, done: Callable[[ConnectAttempt, int], None]
    ) -> ConnectAttempt:
        """Connects to the socket that shows a rank's presence. Raises OSError: it failed at once."""
        orders = self.orders
        return ConnectAttempt(self.loop, path, orders.interfaces, orders.presence[rank], deadline, done)

    def gone(self, connection: InConnection) -> None:
        """A connection was closed."""
        self.connections.discard(connection)
        if connection in self._starved:
            self._starved.remove(connection)

    def cut(self, lane: Lane) -> None:
        """The connection that carried a lane is gone."""
        self._watches[lane].wait(time.perf_counter_ns())

    def starve(self, connection: InConnection, num_bytes: int) -> None:
        """A message waits for room."""
        self._starved.append(connection)
        lane = self.orders.lane(0, self.orders.rank)  # none: the whole delegate has no room
        self.io.tell(Descriptor(DescriptorKind.STARVED, lane, num_bytes))

    def command(self, descriptor: Descriptor) -> None:
        if descriptor.kind is DescriptorKind.FREE:
            self.slots.free(descriptor.offset, descriptor.capacity)
            self.slots.grant(-descriptor.number)
            self._has_room = True
        elif descriptor.kind is DescriptorKind.GRANT:
            self.slots.grant(descriptor.number)
            self._has_room = True
        elif descriptor.kind is DescriptorKind.EXPECT and descriptor.lane not in self._watches:
            self._watches[descriptor.lane] = watch = PeerWatch(self, descriptor.lane)
            watch.wait(time.perf_counter_ns())

    def _on_commands(self, mask: int) -> None:
        self._has_room = False
        super()._on_commands(mask)
        if self._has_room:
            starved, self._starved = self._starved, []
            for connection in starved:
                connection.fed()

    def interface(self, place: int, up: bool) -> None:
        if up:
            return
        for connection in list(self.connections):
            if connection.place == place:
                connection.close(CloseReason.INTERFACE_DOWN)
        for lane in {lane.source: lane for lane in self.lanes}.values():
            self._notices.append(LinkDownNotice(self, lane, place))
