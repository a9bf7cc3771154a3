"""A delegate process: where it starts, and its ties to its rank.

The ties are what it was started with, the rings, the shared memory and the wake-ups. `Delegate` is what both kinds of
delegate are: those ties, the event loop, and the kernel's word on interfaces.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from mmap import MAP_SHARED, mmap

from .descriptor import Descriptor, Lane
from .monitor import InterfaceMonitor
from .shared import RING_BYTES, DescriptorRing
from .sockets import READ, EventLoop, watch_parent


@dataclass(frozen=True)
class DelegateOrders:
    """What a delegate is started with.

    Attributes:
        outgoing: whether it sends; rank, kind, place: whose delegate, of which kind, the how-manieth.
        key: of the run; connections of another run are refused.
        interfaces: our addresses; peers: rank -> its addresses and ports for delegates of this kind and place;
            presence: rank -> addresses and ports that its process itself listens on.
        parent: the rank's process; lifeline: whose end is the delegate's end.
        rings: memory with the ring of commands, then that of notes; commands, notes: their wake-ups.
        memory: where messages lie; span: how much of it is mapped; limit: what a receiver may use.
        listeners: one an interface, for a receiver.
        generation: how often this delegate was started before.
        lanes: (source, target, last message delivered), for a receiver.
        taken: (offset, capacity) of slots that the rank still holds, for a receiver.
    """

    outgoing: bool
    rank: int
    kind: int
    place: int
    key: int
    interfaces: list[str]
    peers: dict[int, list[tuple[str, int]]]
    presence: dict[int, list[tuple[str, int]]]
    parent: int
    lifeline: int
    rings: int
    commands: int
    notes: int
    memory: int
    span: int
    limit: int
    listeners: list[int] = field(default_factory=list)
    generation: int = 0
    lanes: list[tuple[int, int, int]] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)

    def write(self) -> int:
        """Puts them into memory without a name; returns its descriptor, for the delegate to inherit.

        A command line is for every user of the machine to read, and the key is among the orders.
        """
        descriptor = os.memfd_create("penstock-orders")
        try:
            with open(descriptor, "wb", closefd=False) as memory:
                memory.write(json.dumps(asdict(self)).encode())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> DelegateOrders:
        """What `write` left; closes the descriptor."""
        with open(descriptor, "rb") as memory:
            memory.seek(0)
            found = json.loads(memory.read())
        peers, presence = (
            {int(rank): [(host, port) for host, port in ends] for rank, ends in found.pop(name).items()}
            for name in ("peers", "presence")
        )
        lanes = [(source, target, last) for source, target, last in found.pop("lanes")]
        taken = [(offset, capacity) for offset, capacity in found.pop("taken")]
        return cls(**found, peers=peers, presence=presence, lanes=lanes, taken=taken)

    def lane(self, source: int, target: int) -> Lane:
        return Lane(source, target, self.kind, self.place)


class DelegateIO:
    """The rings and the memory, from the delegate's side."""

    def __init__(self, orders: DelegateOrders) -> None:
        rings = mmap(orders.rings, 2 * RING_BYTES, flags=MAP_SHARED)
        self._commands, self._notes = DescriptorRing(rings, 0), DescriptorRing(rings, RING_BYTES)
        self.wake = orders.commands
        self._told = orders.notes
        self._backlog: deque[tuple[Descriptor, Callable[[], None] | None]] = deque()
        self.memory = memoryview(mmap(orders.memory, orders.span, flags=MAP_SHARED))

    @property
    def behind(self) -> bool:
        """Whether the rank has yet to be told something, for lack of room in the ring."""
        return bool(self._backlog)

    def commands(self) -> Iterator[Descriptor]:
        """What the rank ordered since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        if self._backlog:
            self._empty_backlog()
        while (descriptor := self._commands.take()) is not None:
            yield descriptor

    def tell(self, descriptor: Descriptor, then: Callable[[], None] | None = None) -> None:
        """Tells the rank, now or when the ring has room again; `then` is called once the rank can read it."""
        if self._backlog or not self._notes.put(descriptor):
            self._backlog.append((descriptor, then))
            return
        os.eventfd_write(self._told, 1)
        if then is not None:
            then()

    def _empty_backlog(self) -> None:
        while self._backlog and self._notes.put(self._backlog[0][0]):
            _, then = self._backlog.popleft()
            if then is not None:
                then()
        os.eventfd_write(self._told, 1)


class Delegate(ABC):
    """What one process does, for all of its lanes: `Sender` or `Receiver`."""

    def __init__(self, orders: DelegateOrders) -> None:
        self.orders = orders
        self.loop = EventLoop()
        watch_parent(self.loop, orders.parent, orders.lifeline)
        self.io = DelegateIO(orders)
        self.monitor = InterfaceMonitor(orders.interfaces)

    @classmethod
    def main(cls) -> None:
        """Runs the delegate whose orders the descriptor in the first argument holds, until its rank ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
        orders = DelegateOrders.read(int(sys.argv[1]))
        gc.freeze()
        cls(orders).run()

    def run(self) -> None:
        """Runs forever."""
        self.loop.watch(self.io.wake, READ, self._on_commands)
        if self.monitor.socket is not None:
            self.loop.watch(self.monitor.socket.fileno(), READ, self._on_news)
        self._on_commands(READ)
        self.loop.run(self.turn)

    @abstractmethod
    def turn(self, now: int) -> int:
        """Does what is due; returns when to be called again."""

    @abstractmethod
    def command(self, descriptor: Descriptor) -> None:
        """Does what the rank orders."""

    @abstractmethod
    def interface(self, place: int, up: bool) -> None:
        """One of our interfaces went down, or is up again."""

    def _on_commands(self, mask: int) -> None:
        for descriptor in self.io.commands():
            self.command(descriptor)

    def _on_news(self, mask: int) -> None:
        for place, up in self.monitor.changes():
            self.interface(place, up)
