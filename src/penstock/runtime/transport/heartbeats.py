"""Which processes can be reached by which interface, and what processes tell one another beside the training.

    process 0   by eth0 --key, told, beat, ...-->   process 1     each calls every other by every interface, and hears
                by eth1 --key, told, beat, ...-->                 what those say that call it

A connection carries lines, one way; an empty line is a beat. The other host's kernel acknowledges them, however busy
the process there is. If it acknowledges nothing for a second, the link is dead. What is told goes by all links, and
again by each that comes back: hearing it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.runtime.transport.delegate.carrier.frames import is_unacknowledged

UNACKNOWLEDGED_MS = 1000
"""Milliseconds after which a link that acknowledges nothing is dead."""
CONNECT = 1.0
"""Seconds that a connection may take to be made."""
BEAT = 0.25
"""Seconds between two beats, and between two calls that were not answered."""
PARTING = 1.0
"""Seconds that what was told last gets to leave when a process closes."""
LONGEST = 1 << 22
"""Bytes of a line at most: a process that sends more is none of ours."""


class Heartbeats:
    """Connections between all processes over every interface, whose beats show which links are alive.

    Args:
        me: this process's number.
        listeners: one an interface. ends: of every process, where it listens, by interface.
        key: known to the processes of this run alone.
        changed: called, in this object's thread, when a link died or came back, or something was heard.
    """

    def __init__(
        self,
        me: int,
        listeners: Sequence[socket.socket],
        ends: Sequence[Sequence[tuple[str, int]]],
        key: str,
        changed: Callable[[], None],
    ) -> None:
        self._me, self._listeners, self._ends, self._changed = me, listeners, ends, changed
        self._greeting = f"{key}\n".encode()
        self._lock = threading.Lock()
        self._told: dict[str, tuple[bytes, Sequence[int]]] = {}
        self._known: dict[str, Any] = {}
        self._down: set[tuple[int, int]] = set()
        self._refused: set[tuple[int, int]] = set()
        self._calls: dict[tuple[int, int], asyncio.StreamWriter] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeats", daemon=True)

    def begin(self) -> None:
        """Calls the others."""
        self._thread.start()

    # Any thread.

    def tell(self, key: str, value: Any, to: Sequence[int] | None = None) -> None:
        """Tells some processes or everyone, this process included. Nobody else keeps it, nor has to forget it."""
        line = json.dumps([key, value]).encode() + b"\n"
        members = range(len(self._ends)) if to is None else to
        with self._lock:
            self._known[key] = value
            self._told[key] = line, members
        with suppress(RuntimeError):  # it is closed: nobody hears it any more
            self._loop.call_soon_threadsafe(self._send, line, members)

    def forget(self, beginning: str) -> None:
        """Drops what was told under keys that begin so."""
        with self._lock:
            for known in (self._told, self._known):
                for key in [key for key in known if key.startswith(beginning)]:
                    del known[key]

    def known(self, key: str) -> Any | None:
        """What was told under a key, by whomever; None if nothing has come yet."""
        with self._lock:
            return self._known.get(key)

    def down(self) -> set[int]:
        """Interfaces by which some process can't be reached."""
        with self._lock:
            return {place for _, place in self._down}

    def gone(self) -> set[int]:
        """Processes that have ended: by one interface their host answers that nobody listens, and no other interface
        reaches them.
        """
        places = range(len(self._listeners))
        with self._lock:
            unreached = self._refused | self._down
            return {peer for peer, _ in self._refused if unreached.issuperset((peer, place) for place in places)}

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # at its end it cancels what still runs
            runner.run(self._serve())

    async def _serve(self) -> None:
        servers = [await asyncio.start_server(self._hear, sock=one, limit=LONGEST) for one in self._listeners]
        others = [peer for peer in range(len(self._ends)) if peer != self._me]
        places = range(len(self._listeners))
        calls = [asyncio.create_task(self._call(peer, place)) for peer in others for place in places]
        await self._closing.wait()
        end = self._loop.time() + PARTING
        while self._loop.time() < end and any(one.transport.get_write_buffer_size() for one in self._calls.values()):
            await asyncio.sleep(0.01)
        for server in servers:
            server.close()
        for call in calls:
            call.cancel()

    def _send(self, line: bytes, members: Sequence[int]) -> None:
        for (peer, _), writer in self._calls.items():
            if peer in members:
                writer.write(line)

    async def _call(self, peer: int, place: int) -> None:
        """Calls a process by an interface, again and again."""
        while True:
            try:
                await self._talk(peer, place)
            except ConnectionRefusedError:
                with self._lock:
                    self._refused.add((peer, place))
            except (ConnectionResetError, BrokenPipeError):
                pass  # the process there is gone, or goes: the next call finds out
            except OSError:
                with self._lock:
                    self._down.add((peer, place))
            self._changed()
            await asyncio.sleep(BEAT)

    async def _talk(self, peer: int, place: int) -> None:
        """Connects to a process, and beats until it hangs up. Raises OSError if the link dies, or can't be used."""
        ours, _ = self._ends[self._me][place]
        async with asyncio.timeout(CONNECT):
            reader, writer = await asyncio.open_connection(*self._ends[peer][place], local_addr=(ours, 0))
        ended = asyncio.create_task(reader.read())  # nothing is ever said this way
        try:
            made = writer.get_extra_info("socket")
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
            with self._lock:
                self._down.discard((peer, place))
                self._refused.discard((peer, place))
                lines = [line for line, members in self._told.values() if peer in members]
            writer.write(self._greeting + b"".join(lines))
            self._calls[peer, place] = writer
            self._changed()
            while not (await asyncio.wait([ended], timeout=BEAT))[0]:
                if is_unacknowledged(made, UNACKNOWLEDGED_MS):  # its kernel does not always end it
                    raise TimeoutError
                writer.write(b"\n")
            ended.result()
        finally:
            ended.cancel()
            self._calls.pop((peer, place), None)
            writer.transport.abort()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes in what a process says that has called, if it knows the key."""
        try:
            if await reader.readline() != self._greeting:
                return
            while line := await reader.readline():
                if line != b"\n":
                    key, value = json.loads(line)
                    with self._lock:
                        self._known[key] = value
                    self._changed()
        except (OSError, ValueError, asyncio.CancelledError):
            # The connection ended in the middle of a line, or its process is none of ours, or this process closes. Of
            # a cancelled handler, asyncio prints a traceback before Python 3.12.
            pass
        finally:
            writer.transport.abort()
