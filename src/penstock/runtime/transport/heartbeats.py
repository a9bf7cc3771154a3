"""Which processes can be reached by which interface, and what processes tell one another beside the training.

    process 0   by eth0 --hello, beat, beat, ...-->   process 1     each calls every other by every interface, and
                by eth1 --hello, beat, beat, ...-->                 hears what those say that call it

A connection carries lines of JSON, one way. The other host's kernel acknowledges them, however busy the process there
is; where it acknowledges nothing for a second, the link is dead. What is told goes by all links, and again by each
that comes back: hearing it twice changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.transport.delegate.carrier import sockets
from penstock.runtime.transport.delegate.carrier.monitor import InterfaceMonitor

BEAT = 0.25
"""Seconds between two signs of life."""
CONNECT = 1.0
"""Seconds that a call may take."""
UNACKNOWLEDGED_MS = 1000
"""Milliseconds after which a link that acknowledges nothing is dead."""
LONGEST = 1 << 22
"""Bytes of a line at most: whoever sends more is none of ours."""


@dataclass
class HeartbeatLine:
    """This process's connection to another by one interface.

    Attributes:
        up: it stands. made: the socket, also while it is being connected. due: when to try, or give up trying.
        out: what is to be written.
    """

    peer: int
    place: int
    up: bool = False
    made: socket.socket | None = None
    due: float = 0.0
    out: bytearray = field(default_factory=bytearray)


class Heartbeats:
    """Args:
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
        self._told: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        self._news: list[str] = []
        self._down: set[tuple[int, int]] = set()
        self._gone: set[int] = set()
        peers = [peer for peer in range(len(ends)) if peer != me]
        self._calls = [HeartbeatLine(peer, place) for peer in peers for place in range(len(listeners))]
        self._incoming: dict[socket.socket, bytearray] = {}
        self._greeted: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._monitor = InterfaceMonitor([address for address, _ in ends[me]])
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeats", daemon=True)

    def begin(self) -> None:
        """Calls the others."""
        self._thread.start()

    # Any thread.

    def tell(self, key: str, value: Any) -> None:
        """Tells everyone, this process included."""
        with self._lock:
            self._told[key] = self._known[key] = value
            self._news.append(key)
        self._wake()
        self._changed()

    def forget(self, before: int) -> None:
        """What was told under keys that begin with a smaller number, as in "3/state 1", is of no use any more."""
        with self._lock:
            for known in (self._told, self._known):
                for key in list(known):
                    number = key.partition("/")[0]
                    if number.isdecimal() and int(number) < before:
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
        self._stopped = True
        self._wake()
        self._thread.join()
        for call in self._calls:
            self._hang_up(call)
        for one in [*self._incoming, *self._listeners]:
            sockets.close(one)
        if self._monitor.socket is not None:
            self._monitor.socket.close()
        self._selector.close()
        os.close(self._waker)

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    # The thread.

    def _run(self) -> None:
        self._selector.register(self._waker, selectors.EVENT_READ, self._woken)
        for one in self._listeners:
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, self._accept)
        if self._monitor.socket is not None:
            self._selector.register(self._monitor.socket, selectors.EVENT_READ, self._interfaces_changed)
        while not self._stopped:
            now = time.monotonic()
            for call in self._calls:
                if now >= call.due:
                    self._turn(call, now)
            rest = min((call.due for call in self._calls), default=now + BEAT) - time.monotonic()
            for key, mask in self._selector.select(max(0.0, min(rest, BEAT))):
                key.data(key.fileobj, mask)

    def _woken(self, _: Any, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)
        with self._lock:
            news, self._news = self._news, []
            lines = b"".join(_line({"key": key, "value": self._told[key]}) for key in news if key in self._told)
        lines += self._beat()
        for call in self._calls:
            if call.up:
                self._write(call, lines)

    def _beat(self) -> bytes:
        return _line({"number": self.number})

    def _turn(self, call: HeartbeatLine, now: float) -> None:
        """A beat; or another try to connect."""
        if call.up and call.made is not None and sockets.is_unacknowledged(call.made, UNACKNOWLEDGED_MS):
            self._lost(call)  # its kernel does not always end it
            call.due = now + BEAT
            return
        if call.up:
            call.due = now + BEAT
            self._write(call, self._beat())
            return
        if call.made is not None:  # it took too long
            self._lost(call)
        call.due = now + CONNECT
        ours = self._ends[self._me][call.place][0]
        try:
            call.made = sockets.begin_connect(ours, self._ends[call.peer][call.place])
        except OSError as error:
            self._failed(call, error.errno or 0)
            return
        self._selector.register(call.made, selectors.EVENT_WRITE, lambda _, mask: self._ready(call, mask))

    def _ready(self, call: HeartbeatLine, mask: int) -> None:
        """A call was answered or refused, can be written to again, or ended."""
        if call.made is None:  # it ended while other news was read
            return
        if error := call.made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed(call, error)
            return
        if not call.up:
            call.up, call.due = True, 0.0
            call.made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
            with self._lock:
                self._down.discard((call.peer, call.place))
                self._gone.discard(call.peer)
                told = [_line({"key": key, "value": value}) for key, value in self._told.items()]
            call.out = bytearray()
            self._write(call, _line({"hello": self._key, "from": self._me}) + b"".join(told))
            self._changed()
            return
        if mask & selectors.EVENT_READ:
            try:
                ended = call.made.recv(1) == b""  # nothing is ever said this way
            except BlockingIOError:
                ended = False
            except OSError as failed:
                self._failed(call, failed.errno or 0)
                return
            if ended:  # the process there is gone, or goes: whoever calls again finds out
                self._hang_up(call)
                call.due = 0.0
                return
        self._write(call, b"")

    def _write(self, call: HeartbeatLine, data: bytes) -> None:
        call.out += data
        assert call.made is not None
        try:
            while call.out and (sent := call.made.send(call.out)):
                del call.out[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(call, error.errno or 0)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if call.out else 0)
        self._selector.modify(call.made, wanted, lambda _, mask: self._ready(call, mask))

    def _failed(self, call: HeartbeatLine, error: int) -> None:
        """A call ended with an error, or could not be made."""
        if sockets.meaning(error).name == "REFUSED":
            self._hang_up(call)
            with self._lock:
                self._gone.add(call.peer)
            call.due = time.monotonic() + BEAT
            self._changed()
        elif call.up and sockets.meaning(error).name == "RESET":
            self._hang_up(call)
            call.due = 0.0
        else:
            self._lost(call)
            call.due = time.monotonic() + BEAT

    def _lost(self, call: HeartbeatLine) -> None:
        self._hang_up(call)
        with self._lock:
            self._down.add((call.peer, call.place))
        self._changed()

    def _hang_up(self, call: HeartbeatLine) -> None:
        call.up = False
        if call.made is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(call.made)
            sockets.close(call.made)
            call.made = None

    def _interfaces_changed(self, _: Any, mask: int) -> None:
        """The kernel says that an interface of ours went down: nobody is reached by it any more."""
        for place, up in self._monitor.changes():
            for call in self._calls:
                if call.place == place:
                    if up:
                        call.due = 0.0
                    else:
                        self._lost(call)
                        call.due = time.monotonic() + BEAT

    def _accept(self, listener: Any, mask: int) -> None:
        with contextlib.suppress(OSError):
            made, _ = listener.accept()
            made.setblocking(False)
            self._incoming[made] = bytearray()
            self._selector.register(made, selectors.EVENT_READ, self._read)

    def _read(self, made: Any, mask: int) -> None:
        if made not in self._incoming:
            return
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
            self._selector.unregister(made)
            del self._incoming[made]
            self._greeted.discard(made)
            made.close()

    def _heard(self, made: Any, line: bytes) -> bool:
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
            with self._lock:
                self._known[said["key"]] = said["value"]
            self._changed()
        elif said["number"] > self.heard:
            self.heard = said["number"]
            self._changed()
        return True


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"
