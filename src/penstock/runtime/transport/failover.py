"""All processes change over to another interface when a network dies: new gloo groups, by the same one everywhere.

    process 0   eth0 ====== gloo, number 0 ====== eth0   process 1     heartbeats tell within a second that a link is
                eth1 - - - - heartbeats - - - - - eth1                 dead

                eth0            X                 eth0                 every process makes groups of number 1, by the
                eth1 ====== gloo, number 1 ====== eth1                 next interface

What was under way in a group that broke is not saved: the step is repeated (`repeat.py`). So where a rank stands in
its program does not matter here, and a thread changes over for all of a process's groups at once.

    heartbeats, or an op that failed --> want number 1 --> tell everyone: all want number 1
      |
      v   wait until every process is there
      v   make the groups of number 1 by interface 1; where that fails, want number 2, by the next one
    number 1 it is

Number n goes by the n-th interface, in turn, and number 0 by the last, so that a number is all that has to
be agreed on: the largest that anyone wants.

The groups are gloo's, made without a store that could be gone. gloo never gives up a connection whose network went
silent, does not end a wait for a message whose connection ended in its middle, and may end the process where its
sockets are shut down from outside. So a group that broke is left alone, and what waits for it is let wait.
"""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.transport.heartbeats import Heartbeats

T = TypeVar("T")
MAKING = 5.0
"""Seconds that the ranks of a group get to connect."""
LOOK = 0.25
"""Seconds after which a wait looks whether a link was lost: an op whose connection ends while gloo writes to it may
never be told so."""
AGAIN = 0.05
"""Seconds before another number is tried where one could not be had."""
PARTING = 3.0
"""Seconds that the end of the groups may take."""
MARGIN = 5.0
"""Seconds beyond its deadline that the changing over may take to say that it failed."""


class RelayedStore(dist.Store):
    """What gloo needs to know to connect, told by other means.

    Args:
        tell: tells everyone a value under a key.
        heard: waits for a key; raises RuntimeError where that has no use any more.
    """

    def __init__(self, tell: Callable[[str, str], None], heard: Callable[[str], str]) -> None:
        super().__init__()
        self._tell, self._heard = tell, heard

    def set(self, key: str, value: bytes | str) -> None:
        self._tell(key, (value.encode() if isinstance(value, str) else bytes(value)).hex())

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._heard(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns at once: `get` waits."""

    def has_extended_api(self) -> bool:
        return False


def gloo_group(address: str, store: dist.Store, rank: int, num_ranks: int, timeout: float) -> Any:
    """A group of gloo that listens on an address. Raises RuntimeError if its ranks can't connect."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=MAKING)
    made = dist.ProcessGroupGloo(store, rank, num_ranks, options)
    made.set_timeout(timedelta(seconds=timeout))
    return made


class Failover:
    """The groups of this process that are changed over together.

    Args:
        me: this process's number. listeners: one an interface, for those who call by it.
        ends: of every process, where it listens, by interface. key: known to the processes of this run alone.
        members: by name the processes of each group that has this one.

    Attributes:
        timeout: seconds that any wait may last.
        number: of the groups that there are. wanted: the largest number that any process wants.
        groups: by name, of that number.
        beats: what processes tell each other, which no lost link holds up.
        changed: notified at whatever happens. looks: called then, by any thread.
        left: what a group that broke may still write to, kept until the end.
        notices: what a person should know.
    """

    def __init__(
        self,
        me: int,
        listeners: Sequence[socket.socket],
        ends: Sequence[Sequence[tuple[str, int]]],
        key: str,
        members: Mapping[str, Sequence[int]],
        timeout: float,
    ) -> None:
        self.me, self._members, self.timeout = me, members, timeout
        self._everyone = range(len(ends))
        self._addresses = [address for address, _ in ends[me]]
        self.notices: list[str] = []
        self._lines: list[Callable[[], None]] = []
        self.number = self.wanted = -1
        self.groups: dict[str, Any] = {}
        self.looks: list[Callable[[], None]] = []
        self.changed = threading.Condition()
        self.left: list[Any] = []
        self._error: Exception | None = None
        self._why, self._closed = "", False
        self.beats = Heartbeats(me, listeners, ends, key, self._look)
        self._thread = threading.Thread(target=self._run, name="penstock-failover", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a group whose threads run on while Python shuts down may end it by a signal
        self.beats.begin()
        try:
            self.want(0, "")
            self.await_newest()
        except BaseException:
            self.close()
            raise

    def guard_lines(self, give_up: Callable[[], None]) -> None:
        """Has ranks change over, too, if any interface dies, since lines between GPUs may go by it.

        Args:
            give_up: gives the lines up; called by the thread that changes over before anything else, as a rank may be
                waiting for a GPU that they hold up.
        """
        self._lines.append(give_up)
        if self.wanted > 0:
            give_up()
        self._look()

    def await_newest(self) -> None:
        """Waits until there are groups of the number that is wanted.

        Raises:
            PeerLost, DeadlineExceeded: a process has ended, or there is no interface by which all are reached.
        """
        end = time.monotonic() + self.timeout + MARGIN
        if not self.wait_for(lambda: self.number >= self.wanted or None, lambda: self.require_alive(()), end):
            raise self._late()

    def wait_for(self, find: Callable[[], T | None], check: Callable[[], object], end: float) -> T | None:
        """Waits until `find` finds something, and returns that; None if it does not until a moment.

        Args:
            check: called whenever something has changed; raises where the wait is in vain.
        """
        with self.changed:
            while (found := find()) is None and time.monotonic() <= end:
                check()
                self.changed.wait(LOOK)
        return found

    def require_alive(self, missing: Sequence[int]) -> None:
        """Raises PeerLost if one of some processes has ended, or no interface is left by which all are reached."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise PeerLost(f"rank {self.me} lost its connections, and this pipeline was closed ({self._why})")
        if gone := sorted(self.beats.gone().intersection(missing)):
            why = f" ({self._why})" if self._why else ""
            raise PeerLost(f"rank {self.me} lost its connection to rank {gone[0]}, whose process has ended{why}")

    # Any thread.

    def want(self, number: int, why: str) -> None:
        """Leaves the groups of smaller numbers."""
        with self.changed:
            if number > self.wanted:
                self.wanted, self._why = number, why or self._why
                self.beats.tell(f"wanted {self.me}", number)
        self._tell_here()

    def _look(self) -> None:
        """A link changed, or something was heard."""
        number, wanted = self.number, [self.beats.known(f"wanted {each}") for each in self._everyone]
        if (heard := max(each or 0 for each in wanted)) > self.wanted:
            self.want(heard, "another rank said so")
        if 0 <= number == self.wanted and (down := self._down()):
            if self._address(number) in down:
                self.want(number + 1, f"interface {self._address(number)} reaches not everyone any more")
            elif number == 0 and self._lines:
                self.want(1, f"interface {down[0]}, by which NCCL may go, reaches not everyone any more")
        self._tell_here()

    def _tell_here(self) -> None:
        for look in list(self.looks):
            look()
        with self.changed:
            self.changed.notify_all()

    def _address(self, number: int) -> str:
        return self._addresses[(number - 1) % len(self._addresses)]  # the last is the first

    def _down(self) -> list[str]:
        """The addresses of interfaces by which some process can't be reached."""
        return [self._addresses[place] for place in sorted(self.beats.down())]

    def close(self) -> None:
        """Ends the groups and the heartbeats."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._tell_here()
        self._thread.join()
        self.beats.close()
        self.groups.clear()
        # The end of a group waits for its ops, one of which may not know that its connection has ended.
        ending = threading.Thread(target=self.left.clear, name="penstock-groups-end", daemon=True)
        ending.start()
        ending.join(PARTING)

    # The thread that changes over.

    def _run(self) -> None:
        try:
            while not self._closed:
                if self.wanted > self.number:
                    self._change()
                else:
                    with self.changed:
                        self.changed.wait_for(lambda: self.wanted > self.number or self._closed)
        except Exception as error:
            self._error = error
            self._tell_here()

    def _change(self) -> None:
        """Makes the newest groups, unless this is closed meanwhile. Raises PeerLost, DeadlineExceeded."""
        before, end = self.number, time.monotonic() + self.timeout
        for give_up in self._lines if before >= 0 else ():
            give_up()
        while not self._closed:
            number = self.wanted
            try:
                made = self._make(number, end)
            except RuntimeFailure:
                raise
            except RuntimeError:  # this number can't be had, or is too small
                if time.monotonic() > end:
                    raise self._late() from None
                if not self._closed:
                    self.want(number + 1, "")  # the reason stays what broke first
                time.sleep(AGAIN)
                continue
            if before >= 0 and self.me == 0:
                self.notices.append(
                    f"connections by interface {self._address(before)} of rank 0 broke ({self._why}); what ranks "
                    f"send and sum by gloo goes by interface {self._address(number)} now, and what was under way is "
                    "repeated: nothing was lost"
                )
            with self.changed:
                self.number, self.groups = number, made
            self.left += made.values()
            self._tell_here()
            return

    def _make(self, number: int, end: float) -> dict[str, Any]:
        """Makes the groups of a number.

        Raises:
            RuntimeError: it can't be; another number may.
            PeerLost, DeadlineExceeded: none can.
        """
        for older in range(number):
            self.beats.forget(f"{older}/")
        self._require_use(number)

        def check() -> None:
            self.require_alive(self._everyone)
            self._require_use(number)

        def heard(key: str) -> Any:
            if (found := self.wait_for(lambda: self.beats.known(f"{number}/{key}"), check, end)) is None:
                raise self._late()
            return found

        store = RelayedStore(lambda key, value: self.beats.tell(f"{number}/{key}", value), heard)
        store.set(f"here {self.me}", "")
        for process in self._everyone:
            store.get(f"here {process}")
        made = {}
        for name, members in sorted(self._members.items()):
            inside = dist.PrefixStore(name, store)
            where = self._address(number)
            made[name] = gloo_group(where, inside, members.index(self.me), len(members), self.timeout)
        return made

    def _require_use(self, number: int) -> None:
        """Raises RuntimeError if groups of a number would be of no use."""
        if self.wanted > number or self._closed:
            raise RuntimeError(f"groups of number {number} are wanted no more")
        if self._address(number) in self._down():
            raise RuntimeError(f"interface {self._address(number)} reaches not everyone")

    def _late(self) -> DeadlineExceeded:
        here = [self.beats.known(f"{self.wanted}/here {process}") for process in self._everyone]
        missing = ", ".join(str(process) for process, each in enumerate(here) if each is None)
        who = f"rank {missing}" if missing else "the others"
        return DeadlineExceeded(
            f"rank {self.me} lost its connections ({self._why}) and waited {self.timeout:g} s for {who} to go on by "
            f"another interface; of its own, some rank can't be reached by: {', '.join(self._down()) or 'none'}"
        )
