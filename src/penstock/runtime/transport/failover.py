"""When the network dies by which gloo's messages and sums travel, all processes change over to another one.

    process 0   eth0 ====== gloo, number 0 ====== eth0   process 1     heartbeats tell within a second that a link is
                eth1 - - - - heartbeats - - - - - eth1                 dead (the kernel of its own host at once)

                eth0            X                 eth0                 every process makes groups of number 1, by the
                eth1 ====== gloo, number 1 ====== eth1                 next interface

What was under way in a group that broke is not saved: the step is repeated (`repeat.py`). So where a rank stands in
its program does not matter here, and a thread changes over for all of a process's groups at once.

    heartbeats, or an op that failed --> want number 1 --> say so with every beat: everyone wants number 1
      |
      v   wait until every process is there
      v   make the groups of number 1 by interface 1; where that fails, want number 2, by the next one
    number 1 it is

Number n goes by the n-th interface, in turn, from the one that gloo began with, so that a number is all that has to
be agreed on: the largest that anyone wants.

The groups are gloo's, made without a store that could be gone. gloo never gives up a connection whose network went
silent, does not end a wait for a message whose connection ended in its middle, and may end the process where its
sockets are shut down from outside. So a group that broke is left alone, and what waits for it is let wait.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.mesh.interfaces import local_addresses
from penstock.runtime.transport.heartbeats import Heartbeats

MAKING = 5.0
"""Seconds that the ranks of a group get to connect."""
LOOK = 0.25
"""Seconds after which a wait looks whether a link was lost: an op whose connection ends while gloo writes to it may
never be told so."""
AGAIN = 0.05
"""Seconds before another number is tried where one could not be had."""
PARTING = 3.0
"""Seconds that who closes waits for others to do so."""
MARGIN = 5.0
"""Seconds beyond its deadline that the changing over may take to say that it failed."""


class RelayedStore(dist.Store):
    """What gloo needs to know to connect, told by other means.

    Args:
        tell: tells everyone a value under a key.
        told: waits for a key; raises RuntimeError where that has no use any more.
    """

    def __init__(self, tell: Callable[[str, str], None], told: Callable[[str], str]) -> None:
        super().__init__()
        self._tell, self._told = tell, told

    def set(self, key: str, value: bytes | str) -> None:
        self._tell(key, (value.encode() if isinstance(value, str) else bytes(value)).hex())

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._told(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._told(key)

    def has_extended_api(self) -> bool:
        return False


class GlooDevice:
    """An interface that gloo listens on."""

    def __init__(self, address: str) -> None:
        self._device = dist.ProcessGroupGloo.create_device(hostname=address)

    def group(self, store: dist.Store, rank: int, num_ranks: int, timeout: float) -> Any:
        """A group over it. Raises RuntimeError where its ranks can't connect."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [self._device], timedelta(seconds=MAKING)
        made = dist.ProcessGroupGloo(store, rank, num_ranks, options)
        made.set_timeout(timedelta(seconds=timeout))
        return made


class Failover:
    """The groups of this process that are changed over together.

    Args:
        me: this process's number. listeners: one an interface, for those who call by it.
        ends: of every process, where it listens, by interface. key: known to the processes of this run alone.
        first: the interface of number 0.
        groups: by name the processes of each group that has this one.

    Attributes:
        timeout: seconds that any wait may last.
        number: of the groups that there are. wanted: the largest number that any process wants.
        groups: by name, of that number.
        beats: what processes tell each other, which no lost link holds up.
        changed: notified at whatever happens. looks: called then, by any thread.
        notices: what a person should know.
    """

    def __init__(
        self,
        me: int,
        listeners: Sequence[socket.socket],
        ends: Sequence[Sequence[tuple[str, int]]],
        key: str,
        first: int,
        groups: Mapping[str, Sequence[int]],
        timeout: float,
    ) -> None:
        self._me, self._ends, self._first, self._members, self.timeout = me, ends, first, groups, timeout
        self.notices: list[str] = []
        self._lines: list[Callable[[], None]] = []
        self._lines_by: set[int] = set()
        self.number = self.wanted = -1
        self.groups: dict[str, Any] = {}
        self.looks: list[Callable[[], None]] = []
        self.changed = threading.Condition()
        self._error: RuntimeFailure | None = None
        self._why, self._closed = "", False
        self._left: list[Any] = []
        self.beats = Heartbeats(me, listeners, ends, key, self._look)
        self._thread = threading.Thread(target=self._run, name="penstock-failover", daemon=True)
        self._thread.start()
        _open.add(self)
        self.beats.begin()
        try:
            self.want(0, "")
            self.await_newest()
        except BaseException:
            self.close()
            raise

    def guard_lines(self, give_up: Callable[[], None], may_use: Callable[[str], bool]) -> None:
        """Has ranks change over, too, where an interface dies by which lines between GPUs may go.

        Args:
            give_up: gives the lines up; called by the service's thread before it changes anything, as a rank may be
                waiting for a GPU that they hold up.
            may_use: whether lines may go by the interface that has an address.
        """
        self._lines.append(give_up)
        self._lines_by |= {place for place, (address, _) in enumerate(self._ends[self._me]) if may_use(address)}
        if self.wanted > 0:
            give_up()
        self._look()

    def keep(self, left: Any) -> None:
        """Keeps what a group that broke may still write to, until the end."""
        self._left.append(left)

    def await_newest(self) -> None:
        """Waits until there are groups of the number that is wanted.

        Raises:
            PeerLost, DeadlineExceeded: a process has ended, or there is no interface by which all are reached.
        """
        end = time.monotonic() + self.timeout + MARGIN
        with self.changed:
            while self.number < self.wanted:
                self.require_alive(())
                if time.monotonic() > end:
                    raise self._late(range(len(self._ends)))
                self.changed.wait(LOOK)

    def require_alive(self, missing: Sequence[int]) -> None:
        """Raises PeerLost if one of some processes has ended, or no interface is left by which all are reached."""
        if self._error is not None:
            raise type(self._error)(str(self._error))
        if self._closed:
            raise PeerLost(f"rank {self._me} lost its connections, and this pipeline was closed ({self._why})")
        if gone := sorted(self.beats.gone().intersection(missing)):
            why = f" ({self._why})" if self._why else ""
            raise PeerLost(f"rank {self._me} lost its connection to rank {gone[0]}, whose process has ended{why}")

    # Any thread.

    def want(self, number: int, why: str) -> None:
        """Leaves the groups of smaller numbers."""
        with self.changed:
            if number > self.wanted:
                self.wanted, self._why = number, why or self._why
        self.beats.say(self.wanted)
        self._tell_here()

    def _look(self) -> None:
        """A link changed, or something was heard."""
        beats, number = self.beats, self.number
        if beats.heard > self.wanted:
            self.want(beats.heard, "another rank said so")
        if number >= 0 and number == self.wanted and (down := beats.down()):
            if self._place(number) in down:
                self.want(number + 1, f"{self._interface(number)} reaches not everyone any more")
            elif number == 0 and (places := sorted(self._lines_by & down)):
                address, _ = self._ends[self._me][places[0]]
                self.want(1, f"interface {address}, by which NCCL may go, reaches not everyone any more")
        self._tell_here()

    def _tell_here(self) -> None:
        for look in list(self.looks):
            look()
        with self.changed:
            self.changed.notify_all()

    def _place(self, number: int) -> int:
        return (self._first + number) % len(self._ends[self._me])

    def _interface(self, number: int) -> str:
        return f"interface {self._ends[self._me][self._place(number)][0]}"

    def close(self, parts: bool = False) -> None:
        """Ends the groups and the heartbeats.

        Args:
            parts: whether to wait, not for long, until all others are about to: one may not have heard yet what this
                one told.
        """
        if self._closed:
            return
        if parts and self._error is None:
            self._part()
        self._closed = True
        with self.changed:
            self.changed.notify_all()
        self._thread.join()
        self.beats.close()
        self.groups.clear()
        _open.discard(self)
        # The end of a group waits for its ops, one of which may not know that its connection has ended.
        ending = threading.Thread(target=self._left.clear, name="penstock-groups-end", daemon=True)
        ending.start()
        ending.join(PARTING)

    def _part(self) -> None:
        """Waits, not for long, until every process closes, has ended, or can't go on."""
        self.beats.tell(f"parts {self._me}", True)
        end = time.monotonic() + min(PARTING, self.timeout)
        others = set(range(len(self._ends))) - {self._me}
        with self.changed:
            while (left := end - time.monotonic()) > 0 and self._error is None:
                gone = self.beats.gone()
                if all(each in gone or self.beats.known(f"parts {each}") for each in others):
                    break
                self.changed.wait(min(left, LOOK))

    # The thread that changes over.

    def _run(self) -> None:
        while True:
            with self.changed:
                while self.wanted <= self.number and not self._closed:
                    self.changed.wait()
            if self._closed:
                return
            try:
                self._change()
            except Exception as error:
                unexpected = RuntimeFailure(f"no other interface could be used: {error!r}")
                with self.changed:
                    self._error = error if isinstance(error, RuntimeFailure) else unexpected
                self._tell_here()
                return

    def _change(self) -> None:
        before, begun = self.number, time.monotonic()
        for give_up in self._lines if before >= 0 else ():
            give_up()
        while not self._closed:
            number = self.wanted
            try:
                made = self._make(number, begun + self.timeout)
            except _NewerGroupWanted:
                continue
            except RuntimeError as error:
                if isinstance(error, RuntimeFailure):
                    raise
                if time.monotonic() > begun + self.timeout:
                    raise self._late(range(len(self._ends))) from None
                self.want(number + 1, "")  # what broke first is told, not this
                time.sleep(AGAIN)
                continue
            break
        else:
            return
        if before >= 0 and self._me == 0:
            ours, now = self._interface(before), self._interface(number)
            broke = f"connections by {ours} of rank 0" if now != ours else "a link"
            self.notices.append(
                f"{broke} broke ({self._why}); what ranks send and sum by gloo goes by {now} now, and what was under "
                "way is repeated: nothing was lost"
            )
        with self.changed:
            self.number, self.groups = number, made
        self._left += made.values()
        self._tell_here()

    def _make(self, number: int, end: float) -> dict[str, Any]:
        """Makes the groups of a number.

        Raises:
            _NewerGroupWanted, RuntimeError: it can't be; another number may.
            PeerLost, DeadlineExceeded: none can.
        """
        beats, everyone = self.beats, range(len(self._ends))
        for older in range(number):
            beats.forget(f"{older}/")
        if self._place(number) in beats.down():
            raise RuntimeError(f"{self._interface(number)} reaches not everyone")
        device = GlooDevice(self._ends[self._me][self._place(number)][0])
        beats.tell(f"{number}/here {self._me}", True)
        for process in everyone:
            self._told(f"{number}/here {process}", number, end)
        return {name: self._group(device, f"{number}/{name}/", name, number, end) for name in sorted(self._members)}

    def _group(self, device: GlooDevice, prefix: str, name: str, number: int, end: float) -> Any:
        store = RelayedStore(
            lambda key, value: self.beats.tell(prefix + key, value),
            lambda key: self._told(prefix + key, number, end),
        )
        members = self._members[name]
        return device.group(store, members.index(self._me), len(members), self.timeout)

    def _told(self, key: str, number: int, end: float) -> Any:
        """Waits for what some process tells. Raises as `_make`."""
        with self.changed:
            while (found := self.beats.known(key)) is None:
                if self.wanted > number or self._closed:
                    raise _NewerGroupWanted
                # Who has said that it is there, and tells nothing of the group that is made then, may have ended.
                everyone = range(len(self._ends))
                missing = [p for p in everyone if self.beats.known(f"{number}/here {p}") is None] or everyone
                self.require_alive(missing)
                if self._place(number) in self.beats.down():
                    raise RuntimeError(f"{self._interface(number)} reaches not everyone")
                if time.monotonic() > end:
                    raise self._late(missing)
                self.changed.wait(LOOK)
        return found

    def _late(self, missing: Sequence[int]) -> DeadlineExceeded:
        others = ", ".join(str(process) for process in missing if process != self._me)
        down = ", ".join(self._ends[self._me][place][0] for place in sorted(self.beats.down())) or "none"
        return DeadlineExceeded(
            f"rank {self._me} lost its connections ({self._why}) and waited {self.timeout:g} s for rank {others} to "
            f"go on by another interface; of its own, some rank can't be reached by: {down}"
        )


class _NewerGroupWanted(RuntimeError):
    """Some process wants another number."""


def begins_with(addresses: Sequence[str]) -> int:
    """Which of some addresses gloo uses by what it is told; the last where that is none of them."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        address = local_addresses(named.split(",")[:1])[0]
        if address in addresses:
            return list(addresses).index(address)
    return len(addresses) - 1


_open: weakref.WeakSet[Failover] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A group of gloo whose threads run on while Python shuts down could end the process by a signal."""
    for each in list(_open):
        each.close()
