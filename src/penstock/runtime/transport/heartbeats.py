"""Which processes can be reached by which interface, and what processes tell one another beside the training.

    process 0   by eth0 --hello, beat, beat, ...-->   process 1     each calls every other by every interface, and
                by eth1 --hello, beat, beat, ...-->                 hears what those say that call it

A connection carries lines of JSON, one way. The other host's kernel acknowledges them, however busy the process there
is; where it acknowledges nothing for a second, the link is dead. What is told goes by all links, and again by each
that comes back: hearing it twice changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.runtime.transport.delegate.carrier.frames import (
    BEAT,
    MS,
    READ,
    RESETS,
    WRITE,
    EventLoop,
    SocketStream,
    begin_connect,
    is_unacknowledged,
)

CONNECT = 1_000 * MS
"""How long a call may take until it is answered."""
UNACKNOWLEDGED_MS = 1000
"""Milliseconds after which a link that acknowledges nothing is dead."""
LONGEST = 1 << 22
"""Bytes of a line at most: whoever sends more is none of ours."""


@dataclass
class HeartbeatLine:
    """This process's connection to another by one interface.

    Attributes:
        stream: its socket. stands: whether it is connected, and not still being made.
        due: when to say something, or to try again (nanoseconds of the monotonic clock).
    """

    peer: int
    place: int
    stream: SocketStream | None = None
    stands: bool = False
    due: int = 0


class Heartbeats:
    """Connections between all processes over every interface, whose beats show which links are alive.

    Args:
        me: this process's number.
        listeners: one an interface. ends: of every process, where it listens, by interface.
        key: known to the processes of this run alone.
        changed: called, in this object's thread, when a link died or came back, or something was heard.

    Attributes:
        number: what every beat says besides.
        heard: the largest number that any process said.
    """

    def __init__(
        self,
        me: int,
        listeners: Sequence[socket.socket],
        ends: Sequence[Sequence[tuple[str, int]]],
        key: str,
        changed: Callable[[], None],
    ) -> None:
        self._me, self._listeners, self._ends, self._key = me, list(listeners), ends, key
        self._changed = changed
        self.number = self.heard = 0
        self._lock = threading.Lock()
        self._told: dict[str, bytes] = {}
        self._known: dict[str, Any] = {}
        self._news: list[str] = []
        self._down: set[tuple[int, int]] = set()
        self._gone: set[int] = set()
        peers = [peer for peer in range(len(ends)) if peer != me]
        self._calls = [HeartbeatLine(peer, place) for peer in peers for place in range(len(listeners))]
        self._incoming: dict[socket.socket, bytearray] = {}
        self._greeted: set[socket.socket] = set()
        self._loop = EventLoop()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeats", daemon=True)

    def begin(self) -> None:
        """Calls the others."""
        self._thread.start()

    # Any thread.

    def tell(self, key: str, value: Any, to: Sequence[int] | None = None) -> None:
        """Tells some processes or everyone, this process included. Nobody else keeps it, nor has to forget it."""
        with self._lock:
            self._known[key] = value
            self._told[key] = _line({"key": key, "value": value, "to": to})
            self._news.append(key)
        self._wake()
        self._changed()

    def forget(self, beginning: str) -> None:
        """What was told under keys that begin so is of no use any more."""
        with self._lock:
            for known in (self._told, self._known):
                for key in [key for key in known if key.startswith(beginning)]:
                    del known[key]

    def known(self, key: str) -> Any | None:
        """What was told under a key, by whomever; None where nothing has come yet."""
        with self._lock:
            return self._known.get(key)

    def down(self) -> set[int]:
        """Interfaces by which some process can't be reached."""
        with self._lock:
            return {place for _, place in self._down}

    def gone(self) -> set[int]:
        """Processes that have ended: their hosts answer that nobody listens."""
        with self._lock:
            return set(self._gone)

    def say(self, number: int) -> None:
        """Says a larger number with every beat from now on, and at once; several threads may at the same time."""
        with self._lock:
            self.number = max(self.number, number)
        self._wake()

    def close(self) -> None:
        self._loop.stop()
        self._wake()
        self._thread.join()
        for call in self._calls:
            self._hang_up(call)
        for one in [*self._incoming, *self._listeners]:
            one.close()
        self._loop.close()
        os.close(self._waker)

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    # The thread.

    def _run(self) -> None:
        self._loop.watch(self._waker, READ, self._woken)
        for one in self._listeners:
            one.setblocking(False)
            self._loop.watch(one.fileno(), READ, partial(self._accept, one))
        self._loop.run(self._turn_all)

    def _turn_all(self, now: int) -> int:
        for call in self._calls:
            if now >= call.due:
                self._turn(call, now)
        return min((call.due for call in self._calls), default=now + BEAT)

    def _woken(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)
        with self._lock:
            news, self._news = self._news, []
            lines = b"".join(self._told[key] for key in news if key in self._told)
        lines += _line({"number": self.number})
        for call in self._calls:
            if call.stream is not None:
                self._write(call, call.stream, lines)

    def _turn(self, call: HeartbeatLine, now: int) -> None:
        """A beat; or another try to connect."""
        if call.stream is not None and call.stands:
            call.due = now + BEAT
            if is_unacknowledged(call.stream.socket, UNACKNOWLEDGED_MS):
                self._lost(call)
            else:
                self._write(call, call.stream, _line({"number": self.number}))
            return
        if call.stream is not None:  # it took too long
            self._lost(call)
        call.due = now + CONNECT
        try:
            made = begin_connect(self._ends[self._me][call.place][0], self._ends[call.peer][call.place])
        except OSError as error:
            self._failed(call, error.errno or 0)
            return
        call.stream = SocketStream(self._loop, made, partial(self._ready, call))
        call.stream.wants_write = True
        with self._lock:
            lines = [*self._told.values()]
        self._write(call, call.stream, _line({"hello": self._key, "from": self._me}) + b"".join(lines))

    def _ready(self, call: HeartbeatLine, mask: int) -> None:
        """A call stands, can be written to again, or ended."""
        stream = call.stream
        if stream is None:
            return
        try:
            ended = stream.socket.recv(1) == b""  # nothing is ever said this way
        except BlockingIOError:
            ended = False
        except OSError as error:
            self._failed(call, error.errno or 0)
            return
        if ended:  # the process there is gone, or goes: whoever calls again finds out
            self._hang_up(call)
            call.due = 0
            return
        if not call.stands and mask & WRITE:
            call.stands, call.due, stream.wants_write = True, 0, False
            with self._lock:
                self._down.discard((call.peer, call.place))
                self._gone.discard(call.peer)
            self._changed()
        self._write(call, stream)

    def _write(self, call: HeartbeatLine, stream: SocketStream, *lines: bytes) -> None:
        try:
            stream.put(*lines)
        except OSError as error:
            self._failed(call, error.errno or 0)

    def _failed(self, call: HeartbeatLine, error: int) -> None:
        """A call ended with an error, or could not be made."""
        call.due = time.perf_counter_ns() + BEAT
        if error == errno.ECONNREFUSED:
            self._hang_up(call)
            with self._lock:
                self._gone.add(call.peer)
            self._changed()
        elif call.stands and error in RESETS:
            self._hang_up(call)
            call.due = 0
        else:
            self._lost(call)

    def _lost(self, call: HeartbeatLine) -> None:
        self._hang_up(call)
        with self._lock:
            self._down.add((call.peer, call.place))
        self._changed()

    def _hang_up(self, call: HeartbeatLine) -> None:
        if call.stream is not None:
            call.stream.close()
        call.stream, call.stands = None, False

    def _accept(self, listener: socket.socket, mask: int) -> None:
        with contextlib.suppress(OSError):
            made, _ = listener.accept()
            made.setblocking(False)
            self._incoming[made] = bytearray()
            self._loop.watch(made.fileno(), READ, partial(self._read, made))

    def _read(self, made: socket.socket, mask: int) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = made.recv(1 << 16)
        held = self._incoming[made]
        held += data
        fine = bool(data) and len(held) <= LONGEST
        while fine and (end := held.find(b"\n")) >= 0:
            line, held[: end + 1] = bytes(held[:end]), b""
            fine = self._heard(made, line)
        if not fine:
            self._loop.forget(made.fileno())
            del self._incoming[made]
            self._greeted.discard(made)
            made.close()

    def _heard(self, made: socket.socket, line: bytes) -> bool:
        """Takes a line in; returns whether it is one of ours."""
        try:
            said = json.loads(line)
        except ValueError:
            return False
        if not isinstance(said, dict):
            return False
        if made not in self._greeted:
            if said.get("hello") != self._key:
                return False
            self._greeted.add(made)
        elif "key" in said:
            if said["to"] is None or self._me in said["to"]:
                with self._lock:
                    self._known[said["key"]] = said["value"]
                self._changed()
        elif said["number"] > self.heard:
            self.heard = said["number"]
            self._changed()
        return True


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"
