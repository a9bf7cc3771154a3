"""Gives each link its own transport: the base for most, delegates for a few. The choice may change between steps.

                    .--> base (host or gloo) ------> rank 0, rank 2
    rank 1 --send--<
                    `--> delegates ----------------> rank 3            {(1, 3)} is delegated

Both ends of a link switch at the same step. A rank that waits sleeps in the delegates' wait, and the base's inbox
wakes it there, so it continues with whatever happens first.

If connections of the base break, all links use delegates from the middle of that step on:

    rank 0   sends F0, F1, F2 by the base    X    F1, F2 once more by delegates (F0 was answered), then F3
    rank 1   has F0, F1                      X    waits for F2, F3; F1 is there already and is dropped

A message is identified by its step and edge, so it counts once, whichever way it arrived first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages, TransferRecord
from penstock.runtime.transport.delegate.transport import DelegateTransport
from penstock.runtime.transport.failover import Failover
from penstock.runtime.transport.gloo import GlooTransport

T = TypeVar("T")


class RoutedTransport:
    """One rank's end of all its channels, by two transports.

    Args:
        base: of all links but the delegated ones, see `route`.
        delegates: of those.
        guard: where links of the base that fail are to go by delegates.

    Threads receive, so that it is known of all messages when they came, and since a wait of gloo's own for a message
    whose connection ends in its middle does not end.
    """

    def __init__(
        self,
        base: GlooTransport,
        delegates: DelegateTransport,
        guard: Failover | None = None,
    ) -> None:
        self.rank = base.rank
        self._base, self.delegates, self._guard = base, delegates, guard
        self._source: dict[Edge, GlooTransport | DelegateTransport] = {}
        self._both = self._watches = self._left = False
        self._came: list[Edge] = []
        self._step = StepMessages()
        self._delegated: set[int] = set()
        if guard is not None:
            guard.at_change(self._go_over, self._base.end_waits)

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links, by their two ranks in either order, go by delegates from now on.
        Every rank says the same.
        """
        self._delegated = {a + b - self.rank for a, b in delegated if self.rank in (a, b)}

    def begin(self, step: StepMessages) -> None:
        """Starts a step on both, or on the only one that carries anything."""
        if self._failed_elsewhere:
            self._go_over()  # with what is left of the step before
        self._step = step = replace(step, threaded=True)
        self._source = {edge: self._carrier(peer) for _, peer, messages in step.expected for edge, _ in messages}
        self._both = not self._left and (self._guard is None or bool(self._delegated))
        if self._left:
            self.delegates.begin(step)
            return
        if not self._both:
            self.delegates.skip()
            self._retried(lambda: self._base.begin(step))
            return
        self._watch()
        by_delegates = [channel for channel in step.expected if channel.peer in self._delegated]
        by_base = [channel for channel in step.expected if channel.peer not in self._delegated]
        self.delegates.begin(replace(step, expected=by_delegates))
        self._retried(lambda: self._base.begin(replace(step, expected=by_base)))

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        if self._left or target in self._delegated:
            return self.delegates.send(edge, target, payload)
        sent = self._guarded(lambda: self._base.send(edge, target, payload))
        return self.delegates.send(edge, target, payload) if sent is None else sent

    def arrivals(self) -> list[Edge]:
        came, self._came = self._came, []
        if not self._left:
            came += self._guarded(self._base.arrivals) or []
        if self._left or self._both:
            came += self._came + self.delegates.arrivals()
            self._came = []
        return came

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        """Waits until something happened on either.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for what from whom.
        """
        if self._came:
            return self.arrivals()
        if not (self._both or self._left):
            came = self._guarded(lambda: self._base.wait(awaited, who, until))
            return self.arrivals() if came is None else came
        if self._left:
            return self.delegates.wait(awaited, who, until)
        if (came := self._happened()) is not None:
            return came
        found = self.delegates.wait(awaited, who, until)
        return found + (self._happened() or [])

    def _happened(self) -> list[Edge] | None:
        """What the base brought since the last look, perhaps nothing: a call of `wake`, room in a channel. None where
        nothing happened there.
        """
        found = self._guarded(lambda: (self._base.inbox.poll(),))
        return self.arrivals() if found is None else found[0]

    def wake(self) -> None:
        """Ends this rank's wait, or the next one; any thread may call it."""
        self._base.wake()
        if self._left:
            self.delegates.wake()

    def take(self, edge: Edge) -> Payload:
        return self._source[edge].take(edge)

    def end(self) -> None:
        if not self._left:
            self._guarded(self._base.end)
        if self._left or self._both:
            self.delegates.end()

    # Links that fail.

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """What the base gives; None where its links failed, and all goes by delegates now."""
        if self._failed_elsewhere:
            self._go_over()
            return None
        return self._retried(call)

    @property
    def _failed_elsewhere(self) -> bool:
        """Whether ranks go another way, and this one does not yet."""
        return self._guard is not None and self._guard.number > 0 and not self._left

    def _retried(self, call: Callable[[], T]) -> T | None:
        """As `_guarded`, for what the base must be told first, whatever happened: that a step begins."""
        if self._guard is None:
            return call()
        number = self._guard.number
        try:
            return call()
        except (PeerLost, DeadlineExceeded) as error:
            if isinstance(error, DeadlineExceeded) and number == self._guard.number:
                raise
            self._guard.lost(number, error)
            self._go_over()
            return None

    def _go_over(self) -> None:
        """Sends what is left of the step, and all that follows, by delegates."""
        if self._left:
            return
        self._left = True
        left = self._base.leave()
        rest = [
            channel._replace(messages=tuple(each for each in channel.messages if each[0] not in left.received))
            for channel in self._step.expected
            if channel.peer not in self._delegated
        ]
        self._source |= {edge: self.delegates for one in rest for edge, _ in one.messages}
        self._came += left.came
        self.delegates.begin_within(replace(self._step, expected=[one for one in rest if one.messages]))
        for edge, target, payload in left.sent:
            who = f"rank {self.rank} sends the message of {edge} to rank {target} once more"
            while not self.delegates.send(edge, target, payload):
                self._came += self.delegates.wait((), partial(str, who))

    def _watch(self) -> None:
        """Lets a wait for delegates end when something happens on the base."""
        if not self._watches:
            self.delegates.also_watch(self._base.inbox.fileno())
            self._watches = True

    def crossings(self) -> list[TransferRecord]:
        """The messages that came in by either since the last call."""
        return self._base.crossings() + self.delegates.crossings()

    def close(self) -> None:
        self.delegates.close()
        self._base.close()

    def _carrier(self, peer: int) -> GlooTransport | DelegateTransport:
        return self.delegates if self._left or peer in self._delegated else self._base
