"""One group's collective ops, done again on the next group where one group broke: each counts once.

    op          0     1     2     3
    rank 0    done  done  begun          rank 0 is done with 1 and waits for 2; rank 1 waits for 1: the group broke.
    rank 1    done  begun                On the next group: 0 is done everywhere, 1 is done again for rank 1 (rank 0
                                         keeps what it had), 2 begins anew, and rank 1 begins it when it gets there.

Ops of a group are begun in one order on all ranks, so that a number names the same op everywhere. What an op was
given is kept until some later op, which nobody is done with before all have begun it, shows that everyone is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.collective import Collective, is_late, is_of_a_group


class GroupChangeover(Protocol):
    """What changes over when a group broke."""

    def run_hooks(self) -> None:
        """In the rank's own thread: does what is to be done first after a change."""

    def lost(self, number: int, error: Exception) -> None:
        """Group `number` broke: returns when there is a newer one. Raises RuntimeFailure where there will be none."""


REGROUP_CHECK_S = 0.25
"""Seconds after which a wait looks whether the group is another: an op whose connection ends while gloo writes to it
may never be told so."""
MOST_FAILURES = 16
"""Groups on which one op may fail: links that come and go all the time are no links."""
TAGS = 1 << 20
"""Numbers of tensors from one rank to another; acknowledgements have those above."""


@dataclass
class StartedCollective:
    """An op that was begun here, on a group.

    Attributes:
        before: all ops below this number were done here when it began.
        work: what to wait for; None where it could not begin, for `error`.
        failed: how often it did.
    """

    group: RetriedGroup
    op: Collective
    before: int
    work: Any = None
    error: RuntimeError | None = None
    done: bool = False
    failed: int = 0

    def wait(self, limit: timedelta) -> None:
        """Waits until it is done here. Raises as `RetriedGroup.wait_for`."""
        self.group.wait_for(self, limit)


class RetriedGroup:
    """A process group whose collectives are retried on another group when a network fails.

    Args:
        members: the processes of the group, by their numbers in the service; rank: this one's place among them.

    Attributes:
        group: the group that there is now. number: how often it was changed.
    """

    def __init__(self, service: GroupChangeover, members: Sequence[int], rank: int) -> None:
        self._service, self.members, self.rank = service, tuple(members), rank
        self.group: Any = None
        self.number = -1
        self._changed = threading.Condition()
        self._frozen = False
        self._begun: dict[int, StartedCollective] = {}
        self._num, self._first = 0, 0
        self._helping: list[Any] = []
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        """By rank: tensors sent there; taken from there; sent there and taken, as told when the group was changed."""

    # The rank's own thread.

    def start(self, op: Collective) -> StartedCollective:
        """Begins an op; every rank of the group begins the same."""
        while True:
            self._service.run_hooks()
            with self._changed:
                if not self._frozen:
                    before = next((n for n in sorted(self._begun) if not self._begun[n].done), self._num)
                    one = self._begun[self._num] = StartedCollective(self, op, before)
                    self._num += 1
                    self._begin(one)
                    return one
                number = self.number
            self._service.lost(number, _being_changed())

    def _begin(self, one: StartedCollective) -> None:
        try:
            one.work, one.error = one.op.start(self.group), None
        except RuntimeError as error:
            one.work, one.error = None, error

    def wait_for(self, one: StartedCollective, limit: timedelta) -> None:
        """Waits until an op is done here.

        Raises:
            RuntimeError: nothing came for so long. RuntimeFailure: there is no other group any more.
        """
        end = time.monotonic() + limit.total_seconds()
        while True:
            self._service.run_hooks()
            with self._changed:
                number, work, error = self.number, one.work, one.error
            if error is None:
                left = end - time.monotonic()
                try:
                    work.wait(timedelta(seconds=max(0.001, min(REGROUP_CHECK_S, left))))
                except RuntimeError as failed:
                    if is_late(failed):
                        if left <= REGROUP_CHECK_S and not self._is_changing(number):
                            raise
                        continue
                    error = failed
            if error is not None:
                one.failed += 1
                if not is_of_a_group(error) or one.failed > MOST_FAILURES:
                    raise error
                self._service.lost(number, error)
                end = time.monotonic() + limit.total_seconds()
                continue
            with self._changed:
                if not self._frozen and work is one.work:
                    one.done = True
                    if one.op.is_meeting:
                        self._drop(one.before)
                    return
            self._service.lost(number, _being_changed())

    def send(self, tensor: Tensor, target: int, limit: timedelta) -> None:
        """Returns when the target has a tensor, which must not change until then.

        Raises:
            RuntimeError: it was not taken for so long. RuntimeFailure: there is no other group any more.
        """
        place = self._sent[target] = self._sent.get(target, 0) + 1
        taken = torch.zeros(1, device="cpu")

        def once(group: Any) -> None:
            if self._taken.get(target, 0) < place:
                group.send([tensor], target, place % TAGS).wait(limit)
                group.recv([taken], target, TAGS + place % TAGS).wait(limit)

        self._until_done(once)

    def receive(self, tensor: Tensor, source: int, limit: timedelta) -> None:
        """Fills a tensor with what the source sends; raises as `send`."""
        place = self._received.get(source, 0) + 1
        self._until_done(lambda group: group.recv([tensor], source, place % TAGS).wait(limit), source)

    def _until_done(self, once: Callable[[Any], None], source: int | None = None) -> None:
        """Does something with one group, or with the next; where it was a receive, says that it was taken."""
        for _ in range(MOST_FAILURES):
            self._service.run_hooks()
            with self._changed:
                number, group, frozen = self.number, self.group, self._frozen
            error = _being_changed()
            if not frozen:
                try:
                    self._watched(once, group, number)
                except RuntimeError as failed:
                    if (is_late(failed) or not is_of_a_group(failed)) and not self._is_changing(number):
                        raise
                    error = failed
                else:
                    if source is None:
                        return
                    with self._changed:
                        if not self._frozen and number == self.number:
                            place = self._received[source] = self._received.get(source, 0) + 1
                            self._helping.append(self._acknowledge(group, source, place))
                            return
            self._service.lost(number, error)
        raise error

    def _watched(self, once: Callable[[Any], None], group: Any, number: int) -> None:
        """Does something with a group, for as long as there is no other: gloo does not end a wait for a message whose
        connection ended in its middle.
        """
        ended: list[RuntimeError | None] = []

        def run() -> None:
            try:
                once(group)
                ended.append(None)
            except RuntimeError as error:
                ended.append(error)

        thread = threading.Thread(target=run, name="penstock-shares", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(REGROUP_CHECK_S)
            if self._is_changing(number):
                thread.join(REGROUP_CHECK_S)
                break
        error = ended[0] if ended else _being_changed()
        if error is not None:
            raise error

    def _acknowledge(self, group: Any, source: int, place: int) -> Any:
        note = torch.zeros(1, device="cpu")
        try:
            return group.send([note], source, TAGS + place % TAGS), note
        except RuntimeError:  # what was taken here is told when the group is changed
            return None

    def _is_changing(self, number: int) -> bool:
        with self._changed:
            return self._frozen or number != self.number

    def _drop(self, before: int) -> None:
        """All ops below this number are done everywhere."""
        for number in [number for number in self._begun if number < before]:
            del self._begun[number]
        self._first = max(self._first, before)
        self._helping.clear()

    # The service's thread.

    def _require_kept(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """An op that is not done here is kept by all: another rank, which begins others, would take it for those."""
        for rank, said in states.items():
            for place, one in self._begun.items():
                if place < said["before"] and not one.done:
                    raise RuntimeFailure(
                        f"process {self.members[self.rank]} is not done with op {place} "
                        f"({type(one.op).__name__}) of processes {', '.join(map(str, self.members))}, and process "
                        f"{self.members[rank]} has forgotten it as done by all: they wait for their ops in different "
                        f"orders, so nothing can be done again; start again from the newest checkpoint"
                    )

    def freeze(self) -> dict[str, Any]:
        """Nothing begins or gets done any more; returns what is done here."""
        with self._changed:
            self._frozen = True
            return {
                "before": self._first,
                "done": [n for n, one in self._begun.items() if one.done],
                "received": {str(source): count for source, count in self._received.items()},
            }

    def adopt(self, number: int, group: Any, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Goes on with another group, on which what is not done everywhere begins anew.

        Args:
            states: of each rank, what `freeze` said there.

        Raises:
            RuntimeFailure: another rank has forgotten what is not done here.
        """
        with self._changed:
            self._require_kept(states)
            self.group, self.number = group, number
            self._taken = {rank: said["received"].get(str(self.rank), 0) for rank, said in states.items()}
            for place in sorted(self._begun):
                one = self._begun[place]
                done = {rank for rank, said in states.items() if place < said["before"] or place in said["done"]}
                work, error = None, None
                try:
                    work = one.op.again(group, done) if len(done) < len(self.members) else None
                except RuntimeError as failed:
                    error = failed
                if one.done:
                    self._helping.append(work)
                elif work is None and error is None:
                    one.work = _CompletedWork()  # nobody needs it
                else:
                    one.work, one.error = work, error
            self._frozen = False
            self._changed.notify_all()


def _being_changed() -> RuntimeError:
    return RuntimeError("the group is being changed")


class _CompletedWork:
    def wait(self, limit: timedelta) -> None: ...
