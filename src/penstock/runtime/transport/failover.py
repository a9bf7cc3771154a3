"""When the network dies by which gloo's messages and sums travel, they go on over another one.

    rank 0   eth0 ====== gloo, number 0 ====== eth0   rank 1      heartbeats tell within a second that a link is dead
             eth1 - - - - heartbeats - - - - - eth1               (the kernel of its own host at once)

             eth0            X                 eth0               every rank leaves the groups of number 0,
             eth1 ====== gloo, number 1 ====== eth1               says what it had done, makes number 1 by the next
                                                                    interface, and does again what was not done

Where a rank stands in its program when that happens does not matter: the changing over is done by a thread, for all
of a process's groups at once. What waits for an op goes on waiting for the same op on another group
(`mesh/retried_group.py`). Messages from stage to stage then go by delegates (`routed.py`), which have interfaces of
their own to choose from.

    heartbeats, or an op that failed --> want number 1 --> say so with every beat: everyone wants number 1
      |
      v   freeze the groups (what waits for their ops waits for number 1)
      |   tell what was done; wait until everyone did
      v   make the groups of number 1 by interface 1; where that fails, want number 2, by the next one
    go on

Number n goes by the n-th interface, in turn, from the one that gloo began with, so that a number is all that has to
be agreed on: the largest that anyone wants.

The groups are gloo's, made without a store that could be gone. gloo never gives up a connection whose network went
silent, does not end a wait for a message whose connection ended in its middle, and may end the process where its
sockets are shut down from outside. So a group that broke is left alone, and what waits for it is let wait.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.mesh.interfaces import listen, local_addresses, named
from penstock.runtime.mesh.peers import GroupPeers, MeshPeers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.mesh.retried_group import RetriedGroup
from penstock.runtime.transport.heartbeats import Heartbeats

MAKING = 5.0
"""Seconds that the ranks of a group get to connect."""


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


AGAIN = 0.05
"""Seconds before another number is tried where one could not be had."""
PARTING = 3.0
"""Seconds that who closes waits for others to do so."""
MARGIN = 5.0
"""Seconds beyond its deadline that the changing over may take to say that it failed."""


def guard(mesh: ProcessMesh, interfaces: Sequence[str] | None, timeout: float) -> Failover | None:
    """Has what the ranks of a mesh sum and agree on outlive the loss of an interface, where every process is told of
    at least two (see `local_addresses`). Every process must call it.

    Returns:
        None where some process knows of one interface alone.

    Raises:
        RuntimeFailure: an interface that is not there; on all processes alike.
    """
    everyone = mesh.everyone
    if not isinstance(everyone, GroupPeers):
        return None
    listeners: list[socket.socket] = []
    refused = ""
    try:
        for address in local_addresses(interfaces) if len(named(interfaces)) > 1 else ():
            listeners.append(listen(0, address))
    except (RuntimeFailure, OSError) as error:
        refused = f"rank {everyone.here[0]} can't use the interfaces it was told of: {error}"
    gathered = everyone.gather((len(listeners), refused))
    num = min(count for count, _ in gathered)
    errors = [error for _, error in gathered if error]
    for one in listeners if errors or num < 2 else listeners[num:]:
        one.close()
    if errors:
        raise RuntimeFailure(errors[0])
    return Failover(mesh, everyone, listeners[:num], timeout) if num > 1 else None


class Failover:
    """The groups of this process that are changed over together.

    Args:
        listeners: one an interface, for those who call by it.

    Attributes:
        notices: what a person should know.
        number: of the groups that there are; the 0th go by the interface that gloo was told, or the last of them.
    """

    def __init__(
        self, mesh: ProcessMesh, everyone: GroupPeers, listeners: Sequence[socket.socket], timeout: float
    ) -> None:
        self._timeout, self._me = timeout, everyone.here[0]
        self._notes = mesh.pipeline.here[0] == 0
        self.notices: list[str] = []
        self._hooks: list[Callable[[], None]] = []
        self._wakes: list[Callable[[], None]] = []
        self._lines: list[Callable[[], None]] = []
        self._lines_by: set[int] = set()
        self.number = self._wanted = -1
        self._owner, self._hooks_ran = threading.get_ident(), 0
        self._error: RuntimeFailure | None = None
        self._why = ""
        self._closed = False
        self._changed = threading.Condition()
        self._old: list[Any] = []
        ends = [one.getsockname()[:2] for one in listeners]
        first = _begins_with([address for address, _ in ends])
        gathered = everyone.gather((ends, secrets.token_hex(16), first))
        self._ends: list[list[tuple[str, int]]] = [each for each, _, _ in gathered]
        self._first = gathered[0][2]
        self._groups = self._read(mesh, dist.get_process_group_ranks(everyone.group))
        self._beats = Heartbeats(self._me, listeners, self._ends, gathered[0][1], self._look)
        self._thread = threading.Thread(target=self._run, name="penstock-failover", daemon=True)
        self._thread.start()
        _open.add(self)
        self._beats.begin()
        try:
            self._want(0, "")
            self._await(0)
        except BaseException:
            self.close()
            raise

    def _read(self, mesh: ProcessMesh, processes: Sequence[int]) -> dict[str, RetriedGroup]:
        """A group for each set of processes that sum or agree on something."""
        place = {process: number for number, process in enumerate(processes)}
        found: dict[str, RetriedGroup] = {}
        along = mesh.everyone.along if isinstance(mesh.everyone, MeshPeers) else ()
        kinds = {
            "pipeline": [mesh.pipeline],
            "replicas": [mesh.replicas],
            "everyone": [mesh.everyone],
            "along": along,
        }
        for kind, several in kinds.items():
            for peers in several:
                if isinstance(peers, GroupPeers) and peers.retried is None:
                    members = [place[process] for process in dist.get_process_group_ranks(peers.group)]
                    name = f"{kind} {' '.join(map(str, members))}"
                    peers.retried = found[name] = RetriedGroup(self, members, peers.here[0])
        return found

    def at_change(self, hook: Callable[[], None], wake: Callable[[], None]) -> None:
        """Has `hook` called after each change, those before included, in the rank's own thread, before it waits for
        anything else; `wake`, by the service's, ends the wait in which that is.
        """
        self._hooks.append(hook)
        self._wakes.append(wake)
        if self._hooks_ran > 0:
            hook()

    def guard_lines(self, give_up: Callable[[], None], may_use: Callable[[str], bool]) -> None:
        """Has ranks change over, too, where an interface dies by which lines between GPUs may go.

        Args:
            give_up: gives the lines up; called by the service's thread before it changes anything, as a rank may be
                waiting for a GPU that they hold up.
            may_use: whether lines may go by the interface that has an address.
        """
        self._lines.append(give_up)
        self._lines_by |= {place for place, (address, _) in enumerate(self._ends[self._me]) if may_use(address)}
        if self.number > 0 or self._wanted > 0:
            give_up()
        self._look()

    def group(self, peers: GroupPeers) -> Any:
        """The group that there is now, for messages."""
        assert peers.retried is not None
        return peers.retried.group

    # The rank's own thread.

    def run_hooks(self) -> None:
        while self._hooks_ran < self.number and threading.get_ident() == self._owner:
            self._hooks_ran = self.number
            for hook in self._hooks:
                hook()

    def lost(self, number: int, error: Exception) -> None:
        """Group `number` broke: returns when there is a newer one.

        Raises:
            PeerLost, DeadlineExceeded: a process has ended, or there is no interface by which all are reached.
        """
        said = str(error).partition("\n")[0]
        self._want(number + 1, "connections ended" if "/gloo/" in said else said)
        self._await(number + 1)

    def _await(self, number: int) -> None:
        end = time.monotonic() + self._timeout + MARGIN
        with self._changed:
            while self.number < number or self.number < self._wanted:
                if self._error is not None:
                    raise type(self._error)(str(self._error))
                if self._closed or time.monotonic() > end:
                    raise PeerLost(
                        f"rank {self._me} lost its connections, and this pipeline was closed ({self._why})"
                    )
                self._changed.wait(0.25)

    # Any thread.

    def _want(self, number: int, why: str) -> None:
        with self._changed:
            if number > self._wanted:
                self._wanted, self._why = number, why or self._why
                self._changed.notify_all()
        self._beats.say(self._wanted)

    def _look(self) -> None:
        """A link changed, or something was heard."""
        beats = self._beats
        if beats.heard > self._wanted:
            self._want(beats.heard, "another rank said so")
        number = self.number
        if number >= 0 and number == self._wanted and (down := beats.down()):
            if self._place(number) in down:
                self._want(number + 1, f"{self._interface(number)} reaches not everyone any more")
            elif number == 0 and (places := sorted(self._lines_by & down)):
                address, _ = self._ends[self._me][places[0]]
                self._want(1, f"interface {address}, by which NCCL may go, reaches not everyone any more")
        with self._changed:
            self._changed.notify_all()

    def _place(self, number: int) -> int:
        return (self._first + number) % len(self._ends[self._me])

    def _interface(self, number: int) -> str:
        return f"interface {self._ends[self._me][self._place(number)][0]}"

    def close(self, parts: bool = False) -> None:
        """Ends the groups and the heartbeats.

        Args:
            parts: whether to wait, not for long, until all others are about to: one may need this one's part of the
                last op once more.
        """
        if self._closed:
            return
        if parts and self._error is None:
            self._part()
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        self._beats.close()
        for group in self._groups.values():
            group.group = None
        _open.discard(self)
        # The end of a group waits for its ops, one of which may not know that its connection has ended.
        ending = threading.Thread(target=self._old.clear, name="penstock-groups-end", daemon=True)
        ending.start()
        ending.join(PARTING)

    def _part(self) -> None:
        """Waits, not for long, until every process closes, has ended, or can't go on."""
        self._beats.tell(f"parts {self._me}", True)
        end = time.monotonic() + min(PARTING, self._timeout)
        others = set(range(len(self._ends))) - {self._me}
        with self._changed:
            while (left := end - time.monotonic()) > 0 and self._error is None:
                gone = self._beats.gone()
                if all(each in gone or self._beats.known(f"parts {each}") for each in others):
                    break
                self._changed.wait(min(left, 0.25))

    # The thread that changes over.

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._wanted <= self.number and not self._closed:
                    self._changed.wait()
            if self._closed:
                return
            try:
                self._change()
            except Exception as error:
                with self._changed:
                    if isinstance(error, RuntimeFailure):
                        self._error = error
                    else:
                        self._error = RuntimeFailure(f"no other interface could be used: {error!r}")
                    self._changed.notify_all()
                return

    def _change(self) -> None:
        before, begun = self.number, time.monotonic()
        for give_up in self._lines if before >= 0 else ():
            give_up()
        states = {name: group.freeze() for name, group in self._groups.items()}
        while not self._closed:
            number = self._wanted
            try:
                self._make(number, states, begun + self._timeout)
            except _NewerGroupWanted:
                continue
            except RuntimeError as error:
                if isinstance(error, RuntimeFailure):
                    raise
                if time.monotonic() > begun + self._timeout:
                    raise self._late(range(len(self._ends))) from None
                self._want(number + 1, "")  # what broke first is told, not this
                time.sleep(AGAIN)
                continue
            break
        else:
            return
        if before >= 0 and self._notes:
            ours, now = self._interface(before), self._interface(number)
            broke = f"connections by {ours} of rank 0" if now != ours else "a link"
            self.notices.append(
                f"{broke} broke ({self._why}); what ranks sum and agree on goes by {now} now, and messages by "
                "delegates: nothing was lost"
            )
        with self._changed:
            self.number = number
            self._changed.notify_all()
        for wake in self._wakes if before >= 0 else ():
            wake()

    def _make(self, number: int, states: dict[str, Any], end: float) -> None:
        """Makes the groups of a number, and has everything go on there.

        Raises:
            _NewerGroupWanted, RuntimeError: it can't be; another number may.
            PeerLost, DeadlineExceeded: none can.
        """
        place, beats = self._place(number), self._beats
        beats.forget(number)
        if place in beats.down():
            raise RuntimeError(f"{self._interface(number)} reaches not everyone")
        device = GlooDevice(self._ends[self._me][place][0])
        beats.tell(f"{number}/state {self._me}", states)
        said: dict[int, Any] = {}
        for process in range(len(self._ends)):
            said[process] = self._told(f"{number}/state {process}", number, end)
        made: dict[str, Any] = {}
        for name in sorted(self._groups):
            group = self._groups[name]
            store = self._store(f"{number}/{name}/", number, end)
            made[name] = device.group(store, group.rank, len(group.members), self._timeout)
        for name, group in self._groups.items():
            those = {rank: said[process][name] for rank, process in enumerate(group.members)}
            self._old.append(made[name])
            group.adopt(number, made[name], those)

    def _store(self, prefix: str, number: int, end: float) -> RelayedStore:
        """By which the ranks of a group find each other; waits for them as `_told` does."""
        return RelayedStore(
            lambda key, value: self._beats.tell(prefix + key, value),
            lambda key: self._told(prefix + key, number, end),
        )

    def _told(self, key: str, number: int, end: float) -> Any:
        """Waits for what some process tells. Raises as `_make`."""
        with self._changed:
            while (found := self._beats.known(key)) is None:
                if self._wanted > number or self._closed:
                    raise _NewerGroupWanted
                everyone = range(len(self._ends))
                # Who has said how far it is, and tells nothing of the group that is made then, may have ended since.
                missing = [p for p in everyone if self._beats.known(f"{number}/state {p}") is None] or [*everyone]
                if gone := sorted(self._beats.gone().intersection(missing)):
                    raise PeerLost(
                        f"rank {self._me} lost its connection to rank {gone[0]}, whose process has ended "
                        f"({self._why})"
                    )
                if self._place(number) in self._beats.down():
                    raise RuntimeError(f"{self._interface(number)} reaches not everyone")
                if time.monotonic() > end:
                    raise self._late(missing)
                self._changed.wait(0.25)
        return found

    def _late(self, missing: Sequence[int]) -> DeadlineExceeded:
        others = ", ".join(str(process) for process in missing if process != self._me)
        down = ", ".join(self._ends[self._me][place][0] for place in sorted(self._beats.down())) or "none"
        return DeadlineExceeded(
            f"rank {self._me} lost its connections ({self._why}) and waited {self._timeout:g} s for rank {others} to "
            f"go on by another interface; of its own, some rank can't be reached by: {down}"
        )


class _NewerGroupWanted(RuntimeError):
    """Some process wants another number."""


def _begins_with(addresses: Sequence[str]) -> int:
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
