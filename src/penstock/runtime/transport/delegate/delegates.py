"""All delegates of a rank: starts them when they are first needed, hears them, starts them again when they die.

              forward            backward
    out    place 0, 1, ...    place 0, 1, ...      share one memory, whose slots the rank gives out
    in     place 0, 1, ...    place 0, 1, ...      each has a memory of its own, whose slots it gives out

The sockets at which receiving delegates are reached are held by the rank (`Listeners`), so that they outlive one.
Other ranks connect to them to see whether it is there, or to report on an interface. A thread starts delegates while
the rank computes or waits for something else: it sleeps until the kernel says that a delegate is dead, that somebody
wants to connect to one not started yet, or that another rank has news of its interfaces.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import listen
from penstock.runtime.transport.delegate.carrier.delegate import DelegateOrders
from penstock.runtime.transport.delegate.carrier.descriptor import (
    FRAME_BYTES,
    Descriptor,
    DescriptorKind,
    FrameError,
    Lane,
)
from penstock.runtime.transport.delegate.carrier.shared import DEPTH, RING_BYTES, DescriptorRing
from penstock.runtime.transport.delegate.carrier.sockets import LONGEST, MS, READ, EventLoop
from penstock.runtime.transport.mapped_memory import MappedMemory

_PATH = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
_SENDING = f"{_PATH}from carrier.outgoing import Sender; Sender.main()"
_RECEIVING = f"{_PATH}from carrier.incoming import Receiver; Receiver.main()"
STOP_GRACE = 2.0
"""Seconds that a delegate gets to end."""
MOST_DEATHS = 5
"""Deaths in a row, with nothing said in between, after which a delegate is given up."""


class DelegateProcess:
    """Starts at once.

    Args:
        orders: descriptors for the memory and listeners in place; the rest is filled in here.

    Raises:
        RuntimeFailure: there are no descriptors or processes left.
    """

    def __init__(self, orders: DelegateOrders) -> None:
        self.orders = orders
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self._begin(self._stack)
        except OSError as error:
            self._stack.close()
            raise cannot(error) from None

    def _begin(self, stack: contextlib.ExitStack) -> None:
        shared = MappedMemory.make("penstock-rings", 2 * RING_BYTES)
        stack.callback(shared.close)
        self._commands, self._notes = DescriptorRing(shared.map, 0), DescriptorRing(shared.map, RING_BYTES)
        for ring in (self._commands, self._notes):
            stack.callback(ring.close)
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._wake, self.notes_ready = os.eventfd(0, flags), -1
        stack.callback(os.close, self._wake)
        self.notes_ready = os.eventfd(0, flags)
        stack.callback(os.close, self.notes_ready)
        lifeline, self._line = os.pipe()
        self._patience = 0.0
        stack.callback(self.release)
        with contextlib.ExitStack() as brief:
            brief.callback(os.close, lifeline)
            orders = replace(
                self.orders,
                parent=os.getpid(),
                lifeline=lifeline,
                rings=shared.descriptor,
                commands=self._wake,
                notes=self.notes_ready,
            )
            written = orders.write()
            brief.callback(os.close, written)
            passed = [written, lifeline, orders.rings, self._wake, self.notes_ready, orders.memory, *orders.listeners]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SENDING if orders.outgoing else _RECEIVING, str(written)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                # A group of its own: a signal to the rank's group is not meant for it, and a stopped one is woken and
                # ended by the kernel when its rank goes.
                process_group=0,
            )
        stack.callback(self._reap)
        self.end: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.end = os.pidfd_open(self._process.pid)
            stack.callback(os.close, self.end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, descriptor: Descriptor) -> bool:
        """Gives it a command; False where the ring is full."""
        if not self._commands.put(descriptor):
            return False
        os.eventfd_write(self._wake, 1)
        return True

    def notes(self) -> Iterator[Descriptor]:
        """What it told since the last call."""
        waiting = len(self._notes)
        if not waiting:
            return
        self.reset_wakeups()
        while (note := self._notes.take()) is not None:
            self.deaths = 0
            yield note
        if waiting >= DEPTH:
            os.eventfd_write(self._wake, 1)  # it may have more to say than the ring held

    def reset_wakeups(self) -> None:
        """Resets the wake-up, before the ring is read."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.notes_ready)

    def ended(self) -> bool:
        """Whether the process is dead."""
        return self._process.poll() is not None

    def restart(self, orders: DelegateOrders) -> None:
        """Starts it again after its death, with other orders. What it still told must have been read.

        Raises:
            RuntimeFailure: it died too often.
        """
        code = self._process.returncode
        self.close()
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            raise RuntimeFailure(
                f"{self.name} ended {self.deaths} times in a row, the last time with exit code {code}; what it wrote "
                "to stderr says why"
            )
        self.orders = orders
        self._start()

    @property
    def name(self) -> str:
        orders = self.orders
        way = "sending" if orders.outgoing else "receiving"
        return f"{way} delegate {orders.place} of rank {orders.rank} ({('forward', 'backward')[orders.kind]})"

    def close(self) -> None:
        """Ends the process and lets go of all that it used."""
        self._stack.close()

    def release(self) -> None:
        """Tells it to end, without waiting; it gets `STOP_GRACE` from now on."""
        line, self._line = self._line, -1
        if line >= 0:
            os.close(line)
            self._patience = time.monotonic() + STOP_GRACE

    def _reap(self) -> None:
        self.release()
        try:
            self._process.wait(max(0.01, self._patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def cannot(error: OSError) -> RuntimeFailure:
    """What it means that a descriptor, memory or process could not be had."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return RuntimeFailure(
            f"delegates need more file descriptors than the {soft} that a process may have here; raise the limit "
            "(ulimit -n), or give fewer lanes or interfaces"
        )
    if error.errno == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return RuntimeFailure(
            f"delegates need more shared memory than the {soft} bytes that a process may write to a file here, which "
            "counts for memory too; raise the limit (ulimit -f)"
        )
    if error.errno == errno.EAGAIN:
        return RuntimeFailure("delegates need more processes than may run here; raise the limit (ulimit -u)")
    return RuntimeFailure(f"a delegate cannot be started: {error.strerror}")


KINDS = 2
PRESENCE = (KINDS, 0)
"""Where, in place of a kind and place, the sockets are that show that the process is there."""


class Listeners:
    """For each kind and place one socket an interface; and one that only shows that the process is there.

    Raises:
        RuntimeFailure: an address that is not of this host, too few descriptors.
    """

    def __init__(self, interfaces: Sequence[str], num_places: int) -> None:
        self.interfaces = tuple(interfaces)
        self._sockets: dict[tuple[int, int], list[socket.socket]] = {}
        if not interfaces:
            raise RuntimeFailure("delegates without an interface: give at least one local address")
        try:
            for key in [PRESENCE, *((kind, place) for kind in range(KINDS) for place in range(num_places))]:
                made = self._sockets[key] = []
                for address in interfaces:
                    made.append(self._listen(address))
        except BaseException:
            self.close()
            raise

    def _listen(self, address: str) -> socket.socket:
        try:
            made = listen(0, address)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise cannot(error) from None
            raise RuntimeFailure(
                f"interface {address!r}: {error.strerror}; give addresses of this host, as `ip address` lists them"
            ) from None
        made.setblocking(False)
        return made

    def ports(self) -> list[tuple[int, int, list[tuple[str, int]]]]:
        """For each kind and place, the address and port on each interface: what the other ranks are told."""
        return [
            (
                kind,
                place,
                [(address, one.getsockname()[1]) for address, one in zip(self.interfaces, made, strict=True)],
            )
            for (kind, place), made in self._sockets.items()
        ]

    def of(self, kind: int, place: int) -> list[socket.socket]:
        return self._sockets[kind, place]

    def close(self) -> None:
        for made in self._sockets.values():
            for one in made:
                one.close()
        self._sockets.clear()


MOST_VISITORS = 64
"""Connections to the sockets that show presence that are open at once."""
MOST_GRANTED = 8
"""How many times its rank's host memory a receiving delegate may be granted; what is not used takes no pages."""
POLL_NS = 500 * MS
"""Nanoseconds between two looks on kernels that tell no deaths."""
THREAD_EXIT_S = 10.0
"""Seconds that a delegate's start, in which `stop` may find the thread, is waited for."""


class DelegateKey(NamedTuple):
    """Names a delegate of a rank: its direction, kind (0 forward, 1 backward) and place."""

    outgoing: bool
    kind: int
    place: int


class Delegates:
    """The delegate processes of one rank.

    Args:
        gather: everyone's value, by rank.
        num_places: most delegates of one kind and direction.
        host_memory: bytes that messages on their way out may take, and those that came in.
        pinned: whether CUDA is to know the memory.

    Raises:
        RuntimeFailure: see `Listeners`; ranks that differ in what they must share.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        gather: Callable[[Any], list[Any]],
        interfaces: Sequence[str],
        num_places: int,
        host_memory: int,
        pinned: bool = False,
    ) -> None:
        self._pinned = pinned
        self.rank, self.host_memory = rank, host_memory
        self._stack = contextlib.ExitStack()
        self._delegates: dict[DelegateKey, DelegateProcess] = {}
        self._memories: dict[DelegateKey, MappedMemory] = {}
        self._others: set[int] = set()
        self._visitors: set[socket.socket] = set()
        self._thread: threading.Thread | None = None
        self.error: RuntimeFailure | None = None
        self.restarts = 0
        self._rest = LONGEST if _tells_deaths() else POLL_NS
        try:
            self._listeners = Listeners(interfaces, num_places)
            self._stack.callback(self._listeners.close)
            gathered = gather((rank, num_places, secrets.randbits(62), self._listeners.ports()))
            self._meet(gathered, num_ranks)
            self._notes_poll, self._loop = select.epoll(), EventLoop()
            self._stack.callback(self._notes_poll.close)
            self._stack.callback(self._loop.close)
            self.out_memory = self._memory(host_memory)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            self._stack.callback(os.close, self._wake)
        except OSError as error:
            self._stack.close()
            raise cannot(error) from None
        except BaseException:
            self._stack.close()
            raise
        self._loop.watch(self._wake, READ, lambda mask: None)
        for one in self._listeners.of(*PRESENCE):
            self._loop.watch(one.fileno(), READ, partial(self._visited, one))
        for kind in range(KINDS):
            for place in range(num_places):
                for one in self._listeners.of(kind, place):
                    self._loop.watch(one.fileno(), READ, partial(self._tend, DelegateKey(False, kind, place)))

    def _meet(self, gathered: list[Any], num_ranks: int) -> None:
        if len(gathered) != num_ranks or [one[0] for one in gathered] != list(range(num_ranks)):
            raise RuntimeFailure(
                f"{len(gathered)} ranks told where their delegates are, of {num_ranks}, or out of order"
            )
        if len({one[1] for one in gathered}) > 1:
            counts = ", ".join(str(one[1]) for one in gathered)
            raise RuntimeFailure(f"ranks with different most lanes ({counts}): give all the same")
        self._key: int = gathered[0][2]
        self._ends: dict[tuple[int, int], dict[int, list[tuple[str, int]]]] = {}
        for rank, (_, _, _, ports) in enumerate(gathered):
            for kind, place, ends in ports:
                self._ends.setdefault((kind, place), {})[rank] = [(host, port) for host, port in ends]

    @property
    def share(self) -> int:
        """Bytes that a receiving delegate may use before it is granted more."""
        return self.host_memory // KINDS

    def addresses(self, rank: int) -> list[str]:
        """The interfaces of a rank."""
        return [host for host, _ in self._ends[PRESENCE][rank]]

    def get(self, key: DelegateKey) -> DelegateProcess:
        """The delegate of a key; starts it where there is none."""
        delegate = self._delegates.get(key)
        if delegate is None:
            delegate = self._delegates[key] = DelegateProcess(self._orders(key))
            self._register(key, delegate)
        return delegate

    def memory(self, key: DelegateKey) -> MappedMemory:
        """Where a delegate's messages lie."""
        return self.out_memory if key.outgoing else self._memories[key]

    def started_keys(self) -> list[DelegateKey]:
        """Of the delegates that were started."""
        return list(self._delegates)

    def _orders(self, key: DelegateKey) -> DelegateOrders:
        kind, place = key.kind, key.place
        if key.outgoing:
            memory, listeners = self.out_memory, []
        else:
            # All of it, and more where the rank waits for just that, may be granted to one. Pinned memory takes its
            # pages at once, so that there it ends sooner.
            memory = self._memories[key] = self._memory(self.host_memory * (1 if self._pinned else MOST_GRANTED))
            listeners = [one.fileno() for one in self._listeners.of(kind, place)]
            for number in listeners:
                self._loop.forget(number)
        return DelegateOrders(
            key.outgoing,
            self.rank,
            kind,
            place,
            self._key,
            list(self._listeners.interfaces),
            self._ends[kind, place],
            self._ends[PRESENCE],
            parent=0,
            lifeline=-1,
            rings=-1,
            commands=-1,
            notes=-1,
            memory=memory.descriptor,
            span=memory.span,
            limit=self.share,
            listeners=listeners,
        )

    def _memory(self, span: int) -> MappedMemory:
        memory = MappedMemory.make("penstock-messages", span)
        self._stack.callback(memory.close)
        if self._pinned:
            memory.pin()
        return memory

    # What delegates say.

    def notes(self) -> Iterator[tuple[DelegateKey, Descriptor]]:
        """What all delegates told since the last call."""
        for key, delegate in list(self._delegates.items()):
            for note in delegate.notes():
                yield key, note

    def also_watch(self, descriptor: int) -> None:
        """Lets `wait` end, too, when this descriptor is ready to be read."""
        self._notes_poll.register(descriptor, select.EPOLLIN)
        self._others.add(descriptor)

    def wait(self, seconds: float) -> bool:
        """Waits until a delegate says something, at most so long; returns whether another descriptor is ready.

        Needs no lock.
        """
        return any(number in self._others for number, _ in self._notes_poll.poll(max(0.0, seconds)))

    def reset_wakeups(self) -> None:
        """Resets the wake-ups, before the news are read."""
        for delegate in self._delegates.values():
            delegate.reset_wakeups()

    # Life and death.

    def supervise(self, lock: threading.RLock, restart: Callable[[DelegateKey], None]) -> None:
        """Has a thread start delegates that are called, and dead ones again.

        Args:
            lock: held while one is started. restart: starts a dead one again; called with the lock held.
        """
        self._lock, self._restart = lock, restart
        self._thread = threading.Thread(target=self._work, name="penstock-delegates", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._loop.run(self._look)
        except RuntimeFailure as error:
            self.error = error
        except Exception as error:
            self.error = RuntimeFailure(f"the delegates cannot be kept running: {error!r}")
            self.error.__cause__ = error

    def _look(self, now: int) -> int:
        """Looks for deaths that the kernel does not tell."""
        for key in [key for key, one in list(self._delegates.items()) if one.end is None and one.ended()]:
            self._tend(key)
        return now + self._rest

    def _tend(self, key: DelegateKey, mask: int = 0) -> None:
        """Somebody wants to connect to a delegate, or it is dead."""
        with self._lock:
            delegate = self._delegates.get(key)
            if delegate is not None and delegate.ended():
                self._restart(key)
            else:
                self.get(key)

    def _visited(self, listener: socket.socket, mask: int) -> None:
        """Another rank looks whether this one is there, or has news."""
        try:
            made, _ = listener.accept()
        except OSError:
            return
        made.setblocking(False)
        if len(self._visitors) >= MOST_VISITORS:
            made.close()
            return
        self._visitors.add(made)
        self._loop.watch(made.fileno(), READ, partial(self._hear, made))

    def _hear(self, made: socket.socket, mask: int) -> None:
        """Tells the delegates that send what another rank of this run says of its interfaces."""
        self._loop.forget(made.fileno())
        self._visitors.discard(made)
        try:
            with made:
                data = made.recv(FRAME_BYTES)
            news = Descriptor.of_frame(data) if len(data) == FRAME_BYTES else None
        except (OSError, FrameError):
            return
        if news is None or news.kind is not DescriptorKind.THEIRS_DOWN or news.tag != self._key:
            return
        with self._lock:
            for key, delegate in self._delegates.items():
                if key.outgoing:
                    delegate.order(news._replace(lane=Lane(self.rank, news.lane.target, key.kind, key.place)))

    def restart(self, key: DelegateKey, **resumed: Any) -> DelegateProcess:
        """Starts a dead delegate again. What it told must have been read.

        Args:
            resumed: what its `DelegateOrders` say now of what the one before it did.
        """
        delegate = self._delegates[key]
        self._unregister(delegate)
        generation = delegate.orders.generation + 1
        orders = replace(delegate.orders, generation=generation, **resumed)
        self.restarts += 1
        delegate.restart(orders)
        self._register(key, delegate)
        os.eventfd_write(delegate.notes_ready, 1)  # whoever waits may have been told by the one before it
        return delegate

    def _register(self, key: DelegateKey, delegate: DelegateProcess) -> None:
        self._notes_poll.register(delegate.notes_ready, select.EPOLLIN)
        if delegate.end is not None:
            self._loop.watch(delegate.end, READ, partial(self._tend, key))

    def _unregister(self, delegate: DelegateProcess) -> None:
        self._notes_poll.unregister(delegate.notes_ready)
        if delegate.end is not None:
            self._loop.forget(delegate.end)

    def stop(self) -> None:
        """Ends the thread; one that still starts a delegate after `THREAD_EXIT_S` is left to end by itself."""
        if self._thread is not None:
            self._loop.stop()
            os.eventfd_write(self._wake, 1)
            self._thread.join(THREAD_EXIT_S)
            self._thread = None

    def close(self) -> None:
        """Ends all delegates: none is left."""
        self.stop()
        for made in self._visitors:
            made.close()
        for delegate in self._delegates.values():
            delegate.release()
        for delegate in self._delegates.values():
            delegate.close()
        self._delegates.clear()
        self._stack.close()


def _tells_deaths() -> bool:
    """Whether the kernel gives descriptors of processes; where not, one must look."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True
