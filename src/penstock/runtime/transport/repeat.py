"""After a lost link all processes begin anew what was under way: a step, or a sum between steps.

    rank 0 | attempt 0: F0 F1 F2    X lost ->|                 | attempt 1: F0 F1 F2 B0 ...
    rank 1 | attempt 0: F0 F1 B0 B1   told ->|   vote: lost    | attempt 1: F0 F1 B0 B1 ...
    rank 2 | attempt 0: F0 F1 B0 B1 ...      |                 | attempt 1: ...

The process that notices a lost link tells all others, and raises LinkLost, which unwinds its attempt. Every wait of
the others looks for this news. All processes then vote. The vote and all other small values go by heartbeats over
every interface, so they are never lost: either all processes have the whole attempt, or all begin another one. Each
value carries the number of its attempt, so no value of one attempt is taken for a value of another.

Between attempts small values go by heartbeats too. The exchange of a large value is an attempt of its own, see
`GuardedGroup.repeated`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.errors import DeadlineExceeded, LinkLost, PeerLost, RuntimeFailure
from penstock.runtime.mesh.collective import explained, is_late, is_of_a_group
from penstock.runtime.mesh.interfaces import listen, local_addresses, named
from penstock.runtime.mesh.peers import GroupPeers, MeshPeers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, Transport
from penstock.runtime.transport.failover import LOOK, Failover

R = TypeVar("R")
MOST_ATTEMPTS = 16
"""After so many attempts a step ends with an error: its links come and go too often to train."""
KEPT = 16
"""So many gathers of a group are remembered with their values: more than are ever under way."""


class Attempts:
    """The attempts of this process and others at a step, or at another exchange, until one attempt loses no link.

    Attributes:
        failover: what changes over. number: of the groups by which the attempt goes.
        groups: these, by name. num_repeats: attempts that were given up.
        name: of the attempt that is under way; empty between attempts.
    """

    def __init__(self, failover: Failover) -> None:
        self.failover = failover
        self.number = self.num_repeats = 0
        self.groups: dict[str, Any] = {}
        self.name = ""
        self._members: Sequence[int] = ()
        self._is_voting = self._is_lost = False
        self._num_attempts: Counter[str] = Counter()
        self._num_gathers: Counter[str] = Counter()
        failover.looks.append(self._look)

    def repeated(self, group: GuardedGroup, once: Callable[[], R], most: int = MOST_ATTEMPTS) -> R:
        """Does something until no process of a group has lost a link meanwhile.

        Args:
            once: raises LinkLost in every process or in none, and then leaves nothing of what it did.

        Raises:
            PeerLost: links were lost in as many attempts as there may be.
        """
        if self.name:
            return once()
        for _ in range(most):
            self._begin(group)
            try:
                return once()
            except LinkLost as error:
                lost = error
                self.num_repeats += 1
            finally:
                self.name = ""
        tried = "it can't be repeated" if most == 1 else f"so it was in each of {most} attempts"
        raise PeerLost(f"{lost}, and {tried}; go on from the newest checkpoint") from None

    def _begin(self, group: GuardedGroup) -> None:
        self.failover.await_newest()
        self._num_attempts[group.name] += 1
        number = self._num_attempts[group.name]
        # Who begins this attempt has heard the vote of the one before, so that all have ended the one before that.
        self.failover.beats.forget(f"{group.name}#{number - 2} ")
        self._num_gathers = Counter({key: num for key, num in self._num_gathers.items() if "#" not in key})
        with self.failover.changed:
            self.number, self.groups = self.failover.number, self.failover.groups
            self._members, self.name = group.members, f"{group.name}#{number}"
            self._is_voting = self._is_lost = False
        self._look()

    def vote(self) -> None:
        """This process has ended its part of an attempt, or given it up, and tells the others."""
        self._is_voting = True

    def next_gather(self, group: GuardedGroup) -> tuple[str, int]:
        """The name of a gather that begins, and its number among those of that name."""
        stage = f"{self.name}{' vote' if self._is_voting else ''} " if self.name else ""
        name = f"{stage}{group.name}|"
        self._num_gathers[name] += 1
        return name, self._num_gathers[name]

    def _look(self) -> None:
        """Whether another process has given up the attempt."""
        with self.failover.changed:
            if self.name and not self._is_lost:
                known = self.failover.beats.known
                self._is_lost = any(known(f"{self.name} lost {process}") is not None for process in self._members)

    def is_broken(self, by_group: bool) -> bool:
        """Whether a wait in the attempt is in vain.

        Args:
            by_group: whether it is for what goes by the groups, which ranks may be about to leave.
        """
        if not self.name or self._is_voting:
            return False
        return self._is_lost or (by_group and self.failover.wanted > self.number)

    def require_links(self, by_group: bool) -> None:
        """Raises LinkLost if a wait in the attempt is in vain."""
        if self.is_broken(by_group):
            raise self.lost("another rank said so")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around an op of a group. If it fails since a link was lost, raises LinkLost or PeerLost."""
        self.require_links(by_group=True)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RuntimeFailure) or is_late(error) or not is_of_a_group(error):
                raise
            raise self.lost(error) from None

    def lost(self, error: object) -> PeerLost:
        """The error to raise where a link was lost. In an attempt, all others then raise LinkLost too."""
        why, failover = str(error).partition("\n")[0], self.failover
        me = failover.me
        if not self.name or self._is_voting:
            failover.want(failover.number + 1, why)
            return PeerLost(f"rank {me} lost a link between two steps ({why}); go on from the newest checkpoint")
        if not self._is_lost:
            self._is_lost = True
            failover.beats.tell(f"{self.name} lost {me}", True, self._members)
        failover.want(self.number + 1, "connections ended" if "/gloo/" in why else why)
        return LinkLost(f"rank {me} lost a link ({why})")


class GuardedGroup:
    """A group of processes, by which `GroupPeers` go if there is another interface. Its ops are part of an attempt.

    Args:
        members: its processes, by their numbers in the mesh.
    """

    def __init__(self, attempts: Attempts, name: str, members: Sequence[int]) -> None:
        self.attempts, self.name, self.members = attempts, name, tuple(members)

    @property
    def group(self) -> Any:
        """The group by which the attempt goes; between attempts the newest."""
        return (self.attempts if self.attempts.name else self.attempts.failover).groups[self.name]

    def start(self, op: Callable[..., Any], *given: Any) -> GuardedWork:
        """Begins `op(group, *given)` on the group that there is now; returns what to wait for."""
        with self.attempts.guarded():
            return GuardedWork(self.attempts, op(self.group, *given))

    def begin_gather(self, data: bytes) -> Callable[[float], list[bytes]]:
        """Tells the others a few bytes, which no lost link holds up; returns what waits, so many seconds, for all."""
        beats = self.attempts.failover.beats
        name, number = self.attempts.next_gather(self)
        beats.forget(f"{name}{number - KEPT} ")
        beats.tell(f"{name}{number} {self.attempts.failover.me}", data.hex(), self.members)

        def told(timeout: float) -> list[bytes]:
            end = time.monotonic() + timeout
            return [bytes.fromhex(self._told(f"{name}{number} {each}", each, end)) for each in self.members]

        return told

    def _told(self, key: str, process: int, end: float) -> str:
        """Waits for what a process tells in the attempt."""
        failover = self.attempts.failover

        def find() -> Any:
            told = failover.beats.known(key)
            return False if told is None and self.attempts.is_broken(by_group=False) else told

        found = failover.wait_for(find, lambda: failover.require_alive([process]), end)
        self.attempts.require_links(by_group=False)
        if found is None:
            raise RuntimeError(f"timed out as process {process} told nothing")
        return str(found)

    def repeated(self, once: Callable[[], R]) -> R:
        """Does something together, from its start if a link was lost, until no process has lost one."""
        if self.attempts.name:
            return once()

        def attempt() -> R:
            found: R
            try:
                found, is_whole = once(), True
            except LinkLost:
                is_whole = False
            self.attempts.vote()
            failover = self.attempts.failover
            with explained(failover.me, None, "what all ranks vote", failover.timeout) as limit:
                told = self.begin_gather(bytes([is_whole]))(limit.total_seconds())
            if not all(each[0] for each in told):
                raise LinkLost("a link between ranks was lost")
            return found

        return self.attempts.repeated(self, attempt)

    def send(self, tensor: Tensor, target: int, limit: timedelta) -> None:
        """Sends a tensor."""
        self._watched(lambda group: group.send([tensor], target, 0).wait(limit))

    def receive(self, tensor: Tensor, source: int, limit: timedelta) -> None:
        """Fills a tensor with what another rank sends."""
        self._watched(lambda group: group.recv([tensor], source, 0).wait(limit))

    def _watched(self, once: Callable[[Any], object]) -> None:
        """Does something with the group until it is done or a link is lost: gloo does not end a wait for a message
        whose connection ended in its middle.
        """
        errors, group = list[RuntimeError](), self.group

        def run() -> None:
            try:
                once(group)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="penstock-shares", daemon=True)
        with self.attempts.guarded():
            thread.start()
            while thread.is_alive():
                thread.join(LOOK)
                self.attempts.require_links(by_group=True)
            for error in errors:
                raise error


class GuardedWork:
    """An op of a group that is under way."""

    def __init__(self, attempts: Attempts, work: Any) -> None:
        self._attempts, self._work = attempts, work

    def wait(self, limit: timedelta) -> None:
        """Waits until it is done here. Raises LinkLost; RuntimeError if it was not for so long."""
        end = time.monotonic() + limit.total_seconds()
        while True:
            left = end - time.monotonic()
            with self._attempts.guarded():
                try:
                    self._work.wait(timedelta(seconds=max(0.001, min(LOOK, left))))
                    return
                except RuntimeError as error:
                    if not is_late(error) or left <= LOOK:
                        raise


class GuardedTransport:
    """A transport whose waits end as soon as the attempt is given up. Arrivals are reported as they come.

    Args:
        inner: the transport that carries. by_group: whether it does so by the group.
    """

    def __init__(self, inner: Transport, attempts: Attempts, by_group: bool) -> None:
        self.inner, self._attempts, self._by_group = inner, attempts, by_group
        self.rank = inner.rank
        self._number = attempts.number if attempts.name else attempts.failover.number
        self.take, self.wake, self.crossings = inner.take, inner.wake, inner.crossings
        attempts.failover.looks.append(self._look)

    @property
    def is_stale(self) -> bool:
        """Whether the attempt goes by another group than this."""
        return self._by_group and self._attempts.number != self._number

    def begin(self, step: StepMessages) -> None:
        with self._guarded():
            self.inner.begin(replace(step, threaded=True))

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        with self._guarded():
            return self.inner.send(edge, target, payload)

    def arrivals(self) -> list[Edge]:
        with self._guarded():
            return self.inner.arrivals()

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        with self._guarded():
            came = self.inner.wait(awaited, who, until)
        self._attempts.require_links(self._by_group)
        return came

    def end(self) -> None:
        with self._guarded():
            self.inner.end()

    def close(self) -> None:
        if self._look in self._attempts.failover.looks:
            self._attempts.failover.looks.remove(self._look)
        self.inner.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        self._attempts.require_links(self._by_group)
        try:
            yield
        except (PeerLost, DeadlineExceeded) as error:
            is_link = isinstance(error, PeerLost) and self._by_group
            if not is_link and not self._attempts.is_broken(self._by_group):
                raise
            raise self._attempts.lost(error) from None

    def _look(self) -> None:
        """Ends the rank's wait if it is in vain; any thread."""
        if self._attempts.is_broken(self._by_group):
            self.inner.wake()


def guard(mesh: ProcessMesh, interfaces: Sequence[str] | None, timeout: float) -> Attempts | None:
    """Has a step outlive the loss of an interface, if every process is told of at least two (see `local_addresses`).
    Every process must call it.

    Returns:
        None if some process knows of one interface alone.

    Raises:
        RuntimeFailure, PeerFailed: a process can't use an interface that it was told of.
    """
    everyone = mesh.everyone
    if not isinstance(everyone, GroupPeers):
        return None
    with ExitStack() as made:

        def begin() -> tuple[str, list[tuple[str, int]]]:
            addresses = local_addresses(interfaces) if len(named(interfaces)) > 1 else ()
            listeners.extend(made.enter_context(listen(0, address)) for address in addresses)
            return secrets.token_hex(16), [one.getsockname()[:2] for one in listeners]

        listeners: list[Any] = []
        told = everyone.together(begin, "use the interfaces that it was told of")
        num = min(len(ends) for _, ends in told)
        if num < 2:
            return None
        made.pop_all()
    for one in listeners[num:]:
        one.close()
    sets = [mesh.pipeline, mesh.replicas, everyone, *(everyone.along if isinstance(everyone, MeshPeers) else ())]
    guarded = list({id(peers): peers for peers in sets if isinstance(peers, GroupPeers)}.values())
    numbers = {process: number for number, process in enumerate(dist.get_process_group_ranks(everyone.group))}
    members = {}
    for place, peers in enumerate(guarded):  # the same places in every process
        inside = [numbers[process] for process in dist.get_process_group_ranks(peers.group)]
        members[f"group {place} of {' '.join(map(str, inside))}"] = inside
    ends = [each[:num] for _, each in told]
    attempts = Attempts(Failover(everyone.here[0], listeners[:num], ends, told[0][0], members, timeout))
    for peers, (name, inside) in zip(guarded, members.items(), strict=True):
        peers.guard = GuardedGroup(attempts, name, inside)
    return attempts
