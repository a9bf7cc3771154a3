"""The rank's end of what it shares with its delegate: the process, slots of messages, and how the links stand.

rank --copies--> slot --SEND 7--> delegate          take <-- slot <--MESSAGE 7-- delegate     by the edge that it
free <-----ANSWERED 7-----'                         free -----FREE------------>               is about

Ranks tell each other first where their delegates listen. The sockets that listen are the ranks' own until then, so a
process may be started long after that, when a link is to be delegated for the first time. It ends when the rank ends,
however that ends. If the delegate ends first, the rank sees the end of their pair of sockets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.control.events import LinkDown, LinkUp
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import listen
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.delegate.carrier.frames import RESETS, Descriptor, DescriptorKind, Slots, frames
from penstock.runtime.transport.delegate.carrier.process import DelegateOrders
from penstock.runtime.transport.inbox import StepInbox
from penstock.runtime.transport.rank_memory import MappedMemory
from penstock.runtime.transport.wire_format import ALIGN

_MAIN = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    "from carrier.process import Delegate; Delegate.main()"
)
STOP_GRACE = 2.0
"""Seconds that a delegate gets to end."""
MOST_GRANTED, MOST_PINNED = 8, 2
"""How many times its rank's host memory is mapped, each way. A delegate may be granted as much for messages that come
in, and a message that goes out may be as large. Memory that is not used takes no pages, unless it is pinned."""


class DelegateProcess:
    """A rank's delegate. It carries messages once ranks have met and `start` was called.

    Args:
        interfaces: local addresses, the preferred one first.
        num_lanes: connections to each other rank.
        host_memory: bytes that messages on their way out may take together; a larger message goes alone.
        pinned: whether CUDA is to know the memory.

    Attributes:
        process: once it was started. is_running: whether it carries messages.
        span: bytes that are mapped for messages, each way.
        woken: whether `wake` was called; whoever waits takes that back.

    Raises:
        RuntimeFailure: an address that is not of this host; too few descriptors.
    """

    def __init__(
        self, rank: int, interfaces: Sequence[str], num_lanes: int, host_memory: int, pinned: bool = False
    ) -> None:
        self.rank, self.host_memory, self._pinned = rank, host_memory, pinned
        self.span = (MOST_PINNED if pinned else MOST_GRANTED) * host_memory
        self._interfaces, self._num_lanes = list(interfaces), num_lanes
        self._stack = contextlib.ExitStack()
        self._late = bytearray()  # orders for which the line had no room
        self._came = bytearray()
        self.is_running = self.woken = False
        self._failure: RuntimeFailure | None = None
        try:
            self._listeners = [self._stack.enter_context(listen(0, address)) for address in self._interfaces]
        except OSError as error:
            self.close()
            raise cannot(error, interfaces) from None

    def meet(self, gather: Callable[[Any], list[Any]]) -> None:
        """Tells every rank where this delegate listens, and finds out where the others do."""
        ports = [each.getsockname()[1] for each in self._listeners]
        ends = list(zip(self._interfaces, ports, strict=True))
        gathered = gather((self.rank, secrets.randbits(62), ends))
        self.key, self.peers = gathered[0][1], [each[2] for each in gathered]

    def start(self) -> None:
        """Starts the process. If it can't, nobody listens any more, so that others who connect learn of it.

        Raises:
            RuntimeFailure: too few descriptors, processes or memory, now or in an earlier call; CUDA refuses the
                memory; or the process ended at once.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._begin()
        except OSError as error:
            self.close()
            self._failure = cannot(error, self._interfaces)
            raise self._failure from None
        if not self._line.recv(1):
            raise self._ended()
        self._line.setblocking(False)
        orders = DelegateOrders(
            self.rank,
            os.getpid(),
            self.key,
            [each.fileno() for each in self._listeners],
            self.peers,
            self._num_lanes,
            (self.out_memory.descriptor, self.out_memory.span),
            (self.in_memory.descriptor, self.in_memory.span),
            self.host_memory if self._pinned else 2 * self.host_memory,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as line:  # if it is dead, the first wait says so
            line.write(orders.to_bytes())
        for each in self._listeners:
            each.close()  # now the delegate alone has them: where it is not, nobody listens
        self.is_running = True

    def _begin(self) -> None:
        stack = self._stack
        self.out_memory, self.in_memory = self._memory(), self._memory()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        stack.callback(os.close, self._waker)
        self._poll = stack.enter_context(select.epoll())
        self._line, theirs = socket.socketpair()
        stack.callback(self._line.close)
        with theirs:
            self._poll.register(self._line, select.EPOLLIN)
            self.also_watch(self._waker)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[each.fileno() for each in (theirs, *self._listeners)]
                + [self.out_memory.descriptor, self.in_memory.descriptor],
                stdin=subprocess.PIPE,
                # A group of its own: a signal to the rank's group is not meant for it, and a stopped one is woken and
                # ended by the kernel when its rank goes.
                process_group=0,
            )
        stack.callback(self._reap)

    def _memory(self) -> MappedMemory:
        memory = MappedMemory.make("penstock-messages", self.span)
        self._stack.callback(memory.close)
        if self._pinned:
            memory.pin()
        return memory

    def order(self, descriptor: Descriptor) -> None:
        """Gives it an order, now or when the line has room again."""
        self._late += descriptor.to_bytes()
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # no room; or it has ended, which `notes` says
            while self._late:
                del self._late[: self._line.send(self._late)]

    def notes(self) -> Iterator[Descriptor]:
        """What it told since the last call.

        Raises:
            RuntimeFailure: the process has ended.
        """
        self._flush()
        try:
            yield from frames(self._came)  # whoever heard the last ones may have ended with an error
            while data := self._line.recv(1 << 16):
                self._came += data
                yield from frames(self._came)
        except BlockingIOError:
            return
        except OSError:
            pass  # it was killed before it read its orders
        raise self._ended()

    def also_watch(self, descriptor: int) -> None:
        """Lets `wait` end, too, when this descriptor is ready to be read. Doing it again does nothing."""
        with contextlib.suppress(FileExistsError):
            self._poll.register(descriptor, select.EPOLLIN)

    def wait(self, seconds: float) -> None:
        """Sleeps until it says something, `wake` is called, or another descriptor is ready; at most so long."""
        self._poll.modify(self._line, select.EPOLLIN | (select.EPOLLOUT if self._late else 0))
        if self._waker in (number for number, _ in self._poll.poll(max(0.0, seconds))):
            os.eventfd_read(self._waker)

    def wake(self) -> None:
        """Ends a wait, or the next one; any thread may call it."""
        self.woken = True
        os.eventfd_write(self._waker, 1)

    def _ended(self) -> RuntimeFailure:
        code = self.process.wait()
        return RuntimeFailure(
            f"the delegate of rank {self.rank} ended with exit code {code}, and with it the messages on their way; "
            "what it wrote to stderr says why, or somebody killed it: start again, from the latest checkpoint"
        )

    def close(self) -> None:
        """Ends the process, and lets go of all that it used."""
        self._stack.close()

    def _reap(self) -> None:
        self._line.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_WAYS_OUT = {
    errno.EMFILE: "delegates need more file descriptors: raise the limit (ulimit -n)",
    errno.EFBIG: "delegates need more shared memory, which counts as a file: raise the limit (ulimit -f)",
    errno.EAGAIN: "delegates need more processes: raise the limit (ulimit -u)",
    errno.EADDRNOTAVAIL: "give addresses of this host, as `ip address` lists them",
}


def cannot(error: OSError, interfaces: Sequence[str]) -> RuntimeFailure:
    """What it means that a listener, memory or a process could not be had."""
    way_out = f"; {_WAYS_OUT[error.errno]}" if error.errno in _WAYS_OUT else ""
    return RuntimeFailure(f"a delegate cannot be started for {', '.join(interfaces)}: {error.strerror}{way_out}")


class Outbox:
    """The messages that a rank has sent and that are not answered: their slots, and their numbers."""

    def __init__(self, delegate: DelegateProcess) -> None:
        self._delegate = delegate
        self._slots = Slots(delegate.host_memory, delegate.span)
        self._given: dict[int, int] = {}
        self._waiting: dict[int, dict[int, Descriptor]] = {}

    def take(self, target: int, num_bytes: int) -> tuple[int, int] | None:
        """A slot for a message; None where there is no room now. A message above host memory has room once no other
        is on its way.

        Raises:
            RuntimeFailure: a message that there will never be room for.
        """
        if num_bytes > self._delegate.span:
            raise RuntimeFailure(
                f"a message of {num_bytes} bytes to rank {target} is more than the {self._delegate.span} bytes of "
                f"host memory that delegates map for host_memory={self._delegate.host_memory}; give host_memory= more"
            )
        return self._slots.take(num_bytes)

    def post(self, message: Descriptor) -> Descriptor:
        """Hands over as much of a message as is in its slot by now; returns it with its number."""
        target, number = message.target, message.number
        if not number:
            number = self._given[target] = self._given.get(target, 0) + 1
            message = message._replace(number=number)
            self._waiting.setdefault(target, {})[number] = message
        self._delegate.order(message)
        return message

    def answered(self, note: Descriptor) -> None:
        """Frees what was answered."""
        message = self._waiting[note.target].pop(note.number)
        self._slots.free(message.offset, message.capacity)

    def targets(self) -> set[int]:
        """Ranks to which messages are on their way."""
        return {target for target, waiting in self._waiting.items() if waiting}


LENT = 64 << 10
"""Bytes from which a message is used where it lies; smaller ones are copied out."""


class DelegateInbox(StepInbox[Descriptor]):
    """The messages that came in for a rank and were not taken. The slot of one that was taken is the rank's until
    `free`.
    """

    def __init__(self, delegate: DelegateProcess) -> None:
        super().__init__(delegate.rank)
        self._delegate = delegate
        self._lent = 0
        self._returned: deque[Descriptor] = deque()

    def begin(self, step: StepMessages) -> None:
        for one in step.expected:
            self.connect(one.peer)
        super().begin(step)

    def connect(self, peer: int) -> None:
        """Has the delegate connect to a rank before anything is to be sent there. By that it is known whether the
        other's process is there.
        """
        self._delegate.order(Descriptor(DescriptorKind.CONNECT, self._delegate.rank, peer))

    def heard(self, note: Descriptor) -> None:
        """Takes a message in.

        Raises:
            RuntimeFailure: it is not expected.
        """
        size = max(0, note.payload_bytes - ALIGN)
        self.came(note.source, note.tag, note.stamp, note, size, note.sent, note.start, note.arrived)

    def free(self, note: Descriptor) -> None:
        """Gives a slot back."""
        self._delegate.order(Descriptor(DescriptorKind.FREE, offset=note.offset, capacity=note.capacity))

    def lend(self, note: Descriptor) -> Callable[[], None] | None:
        """Lets a slot be used as it is; what it returns gives it back, from any thread. None: copy it out instead.

        As much as host memory is lent: messages that come in have as much again.
        """
        if note.capacity < LENT or self._lent + note.capacity > self._delegate.host_memory:
            return None
        self._lent += note.capacity
        return partial(self._returned.append, note)

    def take_back(self) -> None:
        """Frees the slots that were given back."""
        while self._returned:
            note = self._returned.popleft()
            self._lent -= note.capacity
            self.free(note)


@dataclass
class Counters:
    """What a rank's delegate went through.

    Attributes:
        messages: that came in.
        failovers: connections that went on over another interface; failbacks: that went back to a better one;
            reconnects: over the same.
        resent: chunks of messages given to a connection for a second time.
        starved: messages that waited for room in host memory.
    """

    messages: int = 0
    failovers: int = 0
    failbacks: int = 0
    reconnects: int = 0
    resent: int = 0
    starved: int = 0


@dataclass
class LinkHealth:
    """How a rank's links stand, as its delegate reports their lanes.

    Args:
        peers: of every rank, the addresses and ports at which its delegate listens.

    Attributes:
        gone: ranks whose delegate, and so most likely whose process, has ended.
        events: links that died or came back since these were last taken; notices: for a person.
    """

    rank: int
    peers: Sequence[Sequence[tuple[str, int]]]
    counters: Counters
    gone: set[int] = field(default_factory=set)
    events: list[LinkDown | LinkUp] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    _down: set[int] = field(default_factory=set)
    _paths: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and lane, also of a connection that went."""
    _lost: dict[tuple[int, int], int] = field(default_factory=dict)
    """The error of lanes without a connection."""

    def learn(self, note: Descriptor) -> None:
        """Takes in a note about a lane."""
        lane, target = (note.target, note.place), note.target
        if note.kind is DescriptorKind.LOST:
            self._lost[lane] = note.number
            self.counters.resent += note.offset
            if note.number == errno.ECONNREFUSED:
                self.gone.add(target)
            elif note.number not in (0, errno.EPROTO, *RESETS):
                self._mark(target, is_up=False)
            return
        path, before, error = note.tag, self._paths.get(lane), self._lost.pop(lane, None)
        if before == path:
            self.counters.reconnects += 1
        elif before is not None and error == 0:
            self.counters.failbacks += 1
        elif before is not None:
            self.counters.failovers += 1
        self._paths[lane] = path
        self.gone.discard(target)
        self._mark(target, is_up=path == 0)
        ours, theirs = self.peers[self.rank], self.peers[target]
        ends = f"{ours[min(path, len(ours) - 1)][0]} to {theirs[min(path, len(theirs) - 1)][0]}"
        notice = f"messages of rank {self.rank} to rank {target} go from {ends}: nothing was lost"
        if path and notice not in self.notices:
            self.notices.append(notice)

    def _mark(self, target: int, is_up: bool) -> None:
        """Notes whether the link's preferred interfaces carry it."""
        if is_up == (target in self._down):
            self._down ^= {target}
            self.events.append((LinkUp if is_up else LinkDown)((self.rank, target)))

    def words(self) -> str:
        """Which links have no connection, and why, in words; nothing where all have one."""
        lost = sorted((target, error) for (target, _), error in self._lost.items() if error)
        found = [f"no connection {self.rank}->{target}: {os.strerror(error)}" for target, error in lost]
        return f" ({'; '.join(dict.fromkeys(found))})" if found else ""
