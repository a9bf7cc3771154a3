"""A delegate that sends: for every lane a connection, over the best interface that works.

    rank --SEND--> | lane 0->1: 4 5 6 | --DATA--> the receiving delegate of rank 1
         <-ANSWERED|                  | <-ANSWER-

An `OutLane` is the sending end of one lane: it connects, sends what is due, and sends again what a dead connection
lost.

    at rest --wanted--> connecting --> greeting --welcome--> up --cut--> at rest
                            |  fails      |                   |
                            +----> the next path  <-----------+      a better path is up again: drain, then move
"""

from __future__ import annotations

import time
from collections import deque

from . import sockets
from .delegate import Delegate, DelegateOrders
from .descriptor import FRAME_BYTES, CloseReason, Descriptor, DescriptorKind, FrameError, Lane
from .lane import LaneError, Path, Paths, SendingEnd, by_preference, patience
from .sockets import BEAT, CONNECT, LONGEST, SILENCE, WELCOME, WRITE, ConnectAttempt, SocketStream

QUEUED = 256 << 10
"""Bytes queued for a connection before the next message is."""


class OutLane:
    """A lane of messages that a sending delegate writes.

    Args:
        before: the number of the last message that was answered before this delegate started.
    """

    def __init__(self, sender: Sender, lane: Lane, before: int) -> None:
        orders = sender.orders
        self._sender, self._loop, self._io = sender, sender.loop, sender.io
        self.lane = lane
        self._peers = orders.peers[lane.target]
        self._state = SendingEnd(given=before, answered=before, epoch=orders.generation << 32)
        self._paths = Paths(
            by_preference(len(orders.interfaces), len(self._peers)),
            frozenset(place for place, up in enumerate(sender.monitor.interfaces.up) if not up),
        )
        self._messages: deque[Descriptor] = deque()  # all that is not answered
        self._path: Path | None = None
        self._stream: SocketStream | None = None
        self._attempt: ConnectAttempt | None = None
        self._drained: ConnectAttempt | None = None  # a connection over a better path, waiting for this one to drain
        self._came = bytearray()
        self._heard = self._deadline = 0
        self._silent = self._refused = self._lost = self._full = False

    # What happens.

    def give(self, message: Descriptor) -> None:
        self._state = self._state.give(message.number)
        self._messages.append(message)

    def interface(self, ours: int, up: bool, now: int) -> None:
        """The kernel's word on one of our interfaces."""
        self._paths = self._paths.interface(ours, up, now)
        if not up and self._path is not None and self._path.ours == ours:
            self._cut(CloseReason.INTERFACE_DOWN, now)
        for attempt in (self._attempt, self._drained):
            if not up and attempt is not None and attempt.path.ours == ours:
                attempt.close()
                self._attempt = self._attempt if attempt is not self._attempt else None
                self._drained = self._drained if attempt is not self._drained else None

    def theirs_down(self, theirs: int, now: int) -> None:
        """The other rank says that an interface of its own is down."""
        if self._path is not None and self._path.theirs == theirs:
            self._cut(CloseReason.INTERFACE_DOWN, now)

    def turn(self, now: int) -> int:
        """Does what is due; returns when to be called again."""
        if self._stream is None:
            return self._seek(now)
        if not self._state.live:
            if now >= self._deadline:
                self._cut(CloseReason.NO_WELCOME, now)
                return now
            return self._deadline
        when = now + LONGEST
        for step in (self._look_for_better, self._send_on, self._keep_alive):
            when = min(when, step(now))
            if not self._state.live:  # a step that failed, or moved on to another connection
                return now
        return when

    # Connecting.

    def _seek(self, now: int) -> int:
        if self._attempt is None:
            path, when = self._paths.choose(now)
            if path is None:
                if not self._lost and self._paths.all_failed:
                    self._lost = True
                    self._tell(DescriptorKind.NO_WAY, self._paths.order[0], CloseReason.INTERFACE_DOWN)
                return when
            self._try(path, now)
        return now if self._attempt is None else self._await(self._attempt, now)

    def _await(self, attempt: ConnectAttempt, now: int) -> int:
        """Gives an attempt up at its deadline; returns when to be called again."""
        if now < attempt.deadline:
            return attempt.deadline
        attempt.close()
        self._attempt = None
        self._missed(attempt.path, CloseReason.TIMED_OUT, now)
        return now

    def _try(self, path: Path, now: int) -> None:
        ours, deadline = self._sender.orders.interfaces, now + patience(CONNECT, self._paths.failures(path), LONGEST)
        try:
            self._attempt = ConnectAttempt(self._loop, path, ours, self._peers, deadline, self._tried)
        except OSError as error:
            self._missed(path, sockets.meaning(error.errno), now)

    def _tried(self, attempt: ConnectAttempt, error: int) -> None:
        self._attempt, now = None, time.perf_counter_ns()
        if error:
            self._missed(attempt.path, sockets.meaning(error), now)
        elif self._stream is None:
            self._greet(attempt, now)
        else:
            self._drained = attempt

    def _missed(self, path: Path, why: CloseReason, now: int) -> None:
        self._paths = self._paths.failed(path, now)
        if self._stream is not None:
            return
        if why is CloseReason.REFUSED and not self._refused:
            self._refused = True
            self._tell(DescriptorKind.REFUSED, path, why)
        elif not self._lost and self._paths.all_failed:
            self._lost = True
            self._tell(DescriptorKind.NO_WAY, path, why)

    def _greet(self, attempt: ConnectAttempt, now: int) -> None:
        """A connection over a path stands: says which lane and epoch it is."""
        self._path = attempt.path
        self._state = self._state.connect()
        self._deadline = now + patience(WELCOME, self._paths.failures(attempt.path), LONGEST)
        self._came.clear()
        self._stream = SocketStream(self._loop, attempt.socket, self._on_ready)
        self._put(Descriptor(DescriptorKind.HELLO, self.lane, self._state.epoch, self._sender.orders.key).frame())

    def _welcomed(self, last: int, now: int) -> None:
        assert self._stream is not None
        assert self._path is not None
        self._state, again = self._state.welcome(self._state.epoch, last)
        self._release()
        self._paths = self._paths.stands(self._path)
        self._refused = self._lost = self._full = False
        sockets.trust(self._stream.socket)
        self._heard = now
        self._tell(DescriptorKind.CONNECTED, self._path, again)

    def _cut(self, why: CloseReason, now: int) -> None:
        """The connection is of no more use."""
        if self._stream is None or self._path is None:
            return
        path, lived = self._path, self._state.live
        self._stream.close()
        self._stream = self._path = None
        self._state = self._state.cut()
        if self._drained is not None:
            self._drained.close()
            self._drained = None
        if not lived:
            self._missed(path, why, now)
            return
        if why not in (CloseReason.CLOSED, CloseReason.RESET):  # that was the other end, not the way there
            self._paths = self._paths.left(path, now)
        self._tell(DescriptorKind.CUT, path, why)
        self._be_heard()

    # Going back to a better path.

    def _look_for_better(self, now: int) -> int:
        assert self._path is not None
        if self._drained is not None:
            if self._state.answered != self._state.written:
                return now + LONGEST  # woken by the answer
            self._move(self._drained, now)
            return now
        if self._attempt is not None:
            return self._await(self._attempt, now)
        path, when = self._paths.better(self._path, now)
        if path is None:
            return when
        self._try(path, now)
        return now + BEAT if self._attempt is None else self._attempt.deadline

    def _move(self, attempt: ConnectAttempt, now: int) -> None:
        assert self._stream is not None
        assert self._path is not None
        self._tell(DescriptorKind.CUT, self._path, CloseReason.BETTER_PATH)
        self._stream.close()
        self._drained = None
        self._state = self._state.cut()
        self._greet(attempt, now)

    # Sending.

    def _send_on(self, now: int) -> int:
        """Queues as many messages as the stream takes. Nothing more is to be done about them at any given time."""
        while self._drained is None and self._stream is not None and self._stream.queued < QUEUED:
            number = self._state.next()
            if number is None:
                break
            message = self._messages[number - self._state.answered - 1]
            self._state = self._state.wrote()
            body = self._io.memory[message.offset : message.offset + message.body_bytes]
            self._put(message._replace(kind=DescriptorKind.DATA).frame(), body)
            now = time.perf_counter_ns()
        return now + LONGEST

    def _keep_alive(self, now: int) -> int:
        assert self._stream is not None
        if not self._stream.queued and now - self._stream.spoke >= BEAT:
            self._put(Descriptor(DescriptorKind.PING, self.lane).frame())
            if self._stream is None:
                return now
        is_quiet = now - self._heard >= SILENCE
        if is_quiet and (self._full or sockets.is_unacknowledged(self._stream.socket)):
            self._cut(CloseReason.TIMED_OUT, now)
            return now
        if is_quiet and not self._silent and self._path is not None:
            self._silent = True
            self._tell(DescriptorKind.SILENT, self._path)
        return now + BEAT if self._stream.queued else self._stream.spoke + BEAT

    def _put(self, *parts: bytes | memoryview) -> None:
        if self._stream is not None:
            try:
                self._stream.put(*parts)
            except OSError as error:
                self._cut(sockets.meaning(error.errno), time.perf_counter_ns())

    # Receiving.

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._put()
        if mask & ~WRITE and self._stream is not None:
            self._read(self._stream)

    def _read(self, stream: SocketStream) -> None:
        now = time.perf_counter_ns()
        try:
            data = stream.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._cut(sockets.meaning(error.errno), now)
            return
        if not data:
            self._cut(CloseReason.CLOSED, now)
            return
        self._heard = now
        self._be_heard()
        self._came += data
        try:
            while len(self._came) >= FRAME_BYTES and self._stream is stream:
                frame = Descriptor.of_frame(self._came[:FRAME_BYTES])
                del self._came[:FRAME_BYTES]
                self._take(frame, now)
        except (FrameError, LaneError):
            self._cut(CloseReason.BROKEN, now)

    def _take(self, frame: Descriptor, now: int) -> None:
        if frame.kind is DescriptorKind.WELCOME:
            self._welcomed(frame.number, now)
        elif frame.kind is DescriptorKind.ANSWER:
            before = self._state.answered
            self._state = self._state.answer(frame.number)
            if self._state.answered > before:
                self._release()
        elif frame.kind in (DescriptorKind.FULL, DescriptorKind.ROOM):
            self._full = frame.kind is DescriptorKind.FULL
            if self._stream is not None:
                sockets.trust(self._stream.socket, stands_still=self._full)
        elif frame.kind is not DescriptorKind.PONG:
            raise FrameError(f"a {frame.kind.name} from a receiver")

    def _release(self) -> None:
        """Lets the rank have the slots of what was answered."""
        while self._messages and self._messages[0].number <= self._state.answered:
            self._messages.popleft()
        self._io.tell(
            Descriptor(DescriptorKind.ANSWERED, self.lane, self._state.answered, arrived=time.perf_counter_ns())
        )

    def _be_heard(self) -> None:
        if self._silent:
            self._silent = False
            self._io.tell(Descriptor(DescriptorKind.HEARD, self.lane))

    def _tell(self, note: DescriptorKind, path: Path, number: int = 0) -> None:
        self._io.tell(Descriptor(note, self.lane, int(number), path.ours, path.theirs))


class Sender(Delegate):
    """The lanes of one sending delegate."""

    def __init__(self, orders: DelegateOrders) -> None:
        super().__init__(orders)
        self._lanes: dict[Lane, OutLane] = {}

    def turn(self, now: int) -> int:
        return min((lane.turn(now) for lane in self._lanes.values()), default=now + LONGEST)

    def command(self, descriptor: Descriptor) -> None:
        if descriptor.kind is DescriptorKind.THEIRS_DOWN:
            for one in self._lanes.values():
                if one.lane.target == descriptor.lane.target:
                    one.theirs_down(descriptor.number, time.perf_counter_ns())
            return
        lane = self._lanes.get(descriptor.lane)
        if lane is None:
            before = descriptor.number - (descriptor.kind is DescriptorKind.SEND)
            lane = self._lanes[descriptor.lane] = OutLane(self, descriptor.lane, before)
        if descriptor.kind is DescriptorKind.SEND:
            lane.give(descriptor)

    def interface(self, place: int, up: bool) -> None:
        for lane in self._lanes.values():
            lane.interface(place, up, time.perf_counter_ns())
