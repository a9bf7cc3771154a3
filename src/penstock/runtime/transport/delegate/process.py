"""One delegate as its rank sees it: a process of its own, two rings, and what to do when it dies."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from mmap import MAP_SHARED, mmap
from pathlib import Path

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transport.delegate.carrier.delegate_io import DelegateOrders
from penstock.runtime.transport.delegate.carrier.ring import DEPTH, RING_BYTES, Descriptor, DescriptorRing

_CODE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from carrier.main import main; main()"
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
        shared = os.memfd_create("penstock-rings")
        stack.callback(os.close, shared)
        os.ftruncate(shared, 2 * RING_BYTES)
        memory = mmap(shared, 2 * RING_BYTES, flags=MAP_SHARED)
        self._commands, self._notes = DescriptorRing(memory, 0), DescriptorRing(memory, RING_BYTES)
        for ring in (self._commands, self._notes):
            stack.callback(ring.close)
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._wake, self.notes_ready = os.eventfd(0, flags), -1
        stack.callback(os.close, self._wake)
        self.notes_ready = os.eventfd(0, flags)
        stack.callback(os.close, self.notes_ready)
        lifeline, self._line = os.pipe()
        self._patience = 0.0
        stack.callback(self._let_go)
        with contextlib.ExitStack() as brief:
            brief.callback(os.close, lifeline)
            orders = DelegateOrders(
                **{
                    **vars(self.orders),
                    "parent": os.getpid(),
                    "lifeline": lifeline,
                    "rings": shared,
                    "commands": self._wake,
                    "notes": self.notes_ready,
                }
            )
            written = orders.write()
            brief.callback(os.close, written)
            passed = [written, lifeline, shared, self._wake, self.notes_ready, orders.memory, *orders.listeners]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(written)],
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
        self._let_go()

    def _let_go(self) -> None:
        line, self._line = self._line, -1
        if line >= 0:
            os.close(line)
            self._patience = time.monotonic() + STOP_GRACE

    def _reap(self) -> None:
        self._let_go()
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
    if error.errno == errno.EAGAIN:
        return RuntimeFailure("delegates need more processes than may run here; raise the limit (ulimit -u)")
    return RuntimeFailure(f"a delegate cannot be started: {error.strerror}")
