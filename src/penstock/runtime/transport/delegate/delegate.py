"""A rank's delegate as the rank has it: the process, and the memory, rings and listeners that it shares with it.

The process is started before the ranks meet, so that a host without descriptors or processes for it says so before
anyone waits; its orders follow when they have met. It ends when the rank ends, however that ends. If the delegate
ends first, the rank sees the end of their pair of sockets.
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.interfaces import listen
from penstock.runtime.transport.delegate.carrier.descriptor import DEPTH, RING_BYTES, Descriptor, DescriptorRing
from penstock.runtime.transport.delegate.carrier.process import DelegateOrders
from penstock.runtime.transport.mapped_memory import MappedMemory

_MAIN = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    "from carrier.process import Delegate; Delegate.main()"
)
STOP_GRACE = 2.0
"""Seconds that a delegate gets to end."""
MOST_GRANTED = 8
"""How many times its rank's host memory a delegate may be granted for what comes in: unused memory takes no pages."""
MOST_PINNED = 2
"""The same where memory is pinned, and takes its pages at once."""


class DelegateProcess:
    """Starts at once, and carries messages once `meet` was called.

    Args:
        interfaces: local addresses, the preferred one first.
        num_lanes: connections to each other rank.
        host_memory: bytes that messages on their way out may take, and as many those that came in.
        pinned: whether CUDA is to know the memory.

    Raises:
        RuntimeFailure: an address that is not of this host; too few descriptors, processes or memory.
    """

    def __init__(
        self, rank: int, interfaces: Sequence[str], num_lanes: int, host_memory: int, pinned: bool = False
    ) -> None:
        self.rank, self.host_memory, self._pinned = rank, host_memory, pinned
        self._interfaces, self._num_lanes = list(interfaces), num_lanes
        self._stack = contextlib.ExitStack()
        self._late: deque[Descriptor] = deque()
        self._others: set[int] = set()
        self.key = 0
        try:
            self._begin()
        except OSError as error:
            self._stack.close()
            raise cannot(error) from None
        except BaseException:
            self._stack.close()
            raise

    def _begin(self) -> None:
        stack, flags = self._stack, os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._listeners = [stack.enter_context(_listener(address)) for address in self._interfaces]
        self.out_memory = self._memory("penstock-messages", self.host_memory)
        spans = MOST_PINNED if self._pinned else MOST_GRANTED
        self.in_memory = self._memory("penstock-messages", spans * self.host_memory)
        self._rings = self._memory("penstock-rings", 2 * RING_BYTES)
        self._orders, self._notes = DescriptorRing(self._rings.map, 0), DescriptorRing(self._rings.map, RING_BYTES)
        self._words = memoryview(self.out_memory.map).cast("Q")
        for one in (self._orders, self._notes):
            stack.callback(one.close)
        stack.callback(self._words.release)
        self._wake, self._told = os.eventfd(0, flags), os.eventfd(0, flags)
        for number in (self._wake, self._told):
            stack.callback(os.close, number)
        self._line, theirs = socket.socketpair()
        stack.callback(self._line.close)
        self._poll = select.epoll()
        stack.callback(self._poll.close)
        self._poll.register(self._told, select.EPOLLIN)
        self._poll.register(self._line, select.EPOLLIN)
        with theirs:
            memories = [each.descriptor for each in (self.out_memory, self.in_memory, self._rings)]
            listeners = [each.fileno() for each in self._listeners]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *memories, self._wake, self._told, *listeners],
                stdin=subprocess.DEVNULL,
                # A group of its own: a signal to the rank's group is not meant for it, and a stopped one is woken and
                # ended by the kernel when its rank goes.
                process_group=0,
            )
        stack.callback(self._reap)

    def _memory(self, name: str, span: int) -> MappedMemory:
        memory = MappedMemory.make(name, span)
        self._stack.callback(memory.close)
        return memory

    def meet(self, gather: Callable[[Any], list[Any]], num_ranks: int) -> None:
        """Tells every rank where this delegate listens, and the delegate where the others do. All have started then.

        Raises:
            RuntimeFailure: ranks that differ in how many lanes they want, or are not all there; it did not start.
        """
        if not self._line.recv(1):
            raise self._ended()
        ports = [each.getsockname()[1] for each in self._listeners]
        ends = list(zip(self._interfaces, ports, strict=True))
        gathered = gather((self.rank, self._num_lanes, secrets.randbits(62), ends))
        if [each[0] for each in gathered] != list(range(num_ranks)):
            raise RuntimeFailure(
                f"{len(gathered)} ranks told where their delegates are, of {num_ranks}, or out of order"
            )
        if len({each[1] for each in gathered}) > 1:
            counts = ", ".join(str(each[1]) for each in gathered)
            raise RuntimeFailure(f"ranks with different numbers of lanes ({counts}): give all the same")
        self.key = gathered[0][2]
        self._peers = [[(host, port) for host, port in each[3]] for each in gathered]
        orders = DelegateOrders(
            self.rank,
            os.getpid(),
            self.key,
            self._interfaces,
            [each.fileno() for each in self._listeners],
            self._peers,
            self._num_lanes,
            self._rings.descriptor,
            self._wake,
            self._told,
            self.out_memory.descriptor,
            self.out_memory.span,
            self.in_memory.descriptor,
            self.in_memory.span,
            self.host_memory,
        )
        with contextlib.suppress(OSError):  # it is dead already: the first wait says so
            self._line.sendall(orders.write())
        for each in self._listeners:
            each.close()  # now the delegate alone has them: where it is not, nobody listens

    def pin(self) -> None:
        """Lets CUDA know the memory, where it is to."""
        if self._pinned:
            for memory in (self.out_memory, self.in_memory):
                memory.pin()
            self._pinned = False

    @property
    def name(self) -> str:
        return f"the delegate of rank {self.rank}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def addresses(self, rank: int) -> list[str]:
        """The interfaces of a rank."""
        return [host for host, _ in self._peers[rank]]

    # Orders and notes.

    def order(self, descriptor: Descriptor) -> None:
        """Gives it an order, now or when the ring has room again."""
        self._late.append(descriptor)
        self.flush()

    def flush(self) -> None:
        """Gives it the orders that found no room before."""
        while self._late and self._orders.put(self._late[0]):
            self._late.popleft()
        os.eventfd_write(self._wake, 1)

    def fill(self, offset: int, num_bytes: int) -> None:
        """Says how much of an outgoing message is in its slot; it is woken to send that by `order` or `flush`."""
        self._words[offset // 8] = num_bytes

    def notes(self) -> Iterator[Descriptor]:
        """What it told since the last call."""
        if self._late:
            self.flush()
        waiting = len(self._notes)
        if waiting:
            self.reset_wakeup()
            while (note := self._notes.take()) is not None:
                yield note
            if waiting >= DEPTH:
                os.eventfd_write(self._wake, 1)  # it may have more to say than the ring held

    def reset_wakeup(self) -> None:
        """Resets the wake-up, before the ring is read."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told)

    def also_watch(self, descriptor: int) -> None:
        """Lets `wait` end, too, when this descriptor is ready to be read."""
        self._poll.register(descriptor, select.EPOLLIN)
        self._others.add(descriptor)

    def wait(self, seconds: float) -> bool:
        """Waits until it says something, at most so long; returns whether another descriptor is ready.

        Raises:
            RuntimeFailure: the process has ended.
        """
        ready = {number for number, _ in self._poll.poll(max(0.0, seconds))}
        if self._line.fileno() in ready:
            raise self._ended()
        return bool(ready & self._others)

    def _ended(self) -> RuntimeFailure:
        code = self._process.wait()
        return RuntimeFailure(
            f"{self.name} ended with exit code {code}, and with it the messages on their way; what it wrote to "
            "stderr says why, or somebody killed it: start again, from the latest checkpoint"
        )

    def close(self) -> None:
        """Ends the process, and lets go of all that it used."""
        self._stack.close()

    def _reap(self) -> None:
        self._line.close()
        try:
            self._process.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _listener(address: str) -> socket.socket:
    try:
        made = listen(0, address)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise RuntimeFailure(
            f"interface {address!r}: {error.strerror}; give addresses of this host, as `ip address` lists them"
        ) from None
    made.setblocking(False)
    return made


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
