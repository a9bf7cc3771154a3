"""A lane as values, events in, what to do out: its two ends, and the ways by which they may connect.

Messages arrive exactly once, whatever connections do:

    Sending                                            Receiving
      give 1, 2, 3                                       last 0
      connect ------------- HELLO epoch 1 ------------> welcome: last 0
      write 1, 2   -------- DATA 1, DATA 2 (half) ----> whole 1: deliver, answer 1
      cut                          X                     cut: the half of 2 is dropped
      connect ------------- HELLO epoch 2 ------------> an older connection is closed
      <-------------------- WELCOME last 1 ------------
      write 2, 3   -------- DATA 2, DATA 3 -----------> whole 2, whole 3

Messages of a lane are numbered from 1 without gaps. The sender keeps each until it is answered; answers count all
up to a number. A connection carries data only after its welcome, and a receiver listens only to its newest one
(epochs rise), so nothing that lingers in an old one can come between.

`Paths` says which way to connect: pairs of one of our interfaces and one of theirs, best first, with patience.

    our interface 0 -- theirs 0    preferred         a path that failed rests, longer each time;
    our interface 1 -- theirs 1    next              the best of those that rest least is tried;
    0 -- 1, 1 -- 0                 last              back to a better one only when it was well for a while
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple


class LaneError(Exception):
    """The other end broke the rules above: its connection is to be closed."""


@dataclass(frozen=True, slots=True)
class SendingEnd:
    """The sending end.

    Attributes:
        given: the last message to send; answered: the last one known to be there, whole.
        written: the last one written wholly on this connection; furthest: on any.
        epoch: of the newest connection; live: whether it has been welcomed.
    """

    given: int = 0
    answered: int = 0
    written: int = 0
    furthest: int = 0
    epoch: int = 0
    live: bool = False

    def give(self, number: int) -> SendingEnd:
        """One more message, the next in line."""
        if number != self.given + 1:
            raise LaneError(f"message {number} given after message {self.given}")
        return replace(self, given=number)

    def connect(self) -> SendingEnd:
        """A new connection begins: greet with the epoch."""
        return replace(self, epoch=self.epoch + 1, live=False)

    def welcome(self, epoch: int, last: int) -> tuple[SendingEnd, int]:
        """The receiver has all up to `last`; returns how many messages will be sent for a second time."""
        if epoch != self.epoch or self.live:
            raise LaneError(f"a welcome to connection {epoch} in connection {self.epoch}")
        if not self.answered <= last <= self.given:
            raise LaneError(
                f"a receiver that has {last}, of {self.given} given and {self.answered} answered messages"
            )
        again = max(0, self.furthest - last)
        return replace(self, live=True, written=last, answered=last), again

    def next(self) -> int | None:
        """The message to write now; None where there is none."""
        return self.written + 1 if self.live and self.written < self.given else None

    def wrote(self) -> SendingEnd:
        """The next message has been handed to the connection, whole."""
        written = self.written + 1
        return replace(self, written=written, furthest=max(self.furthest, written))

    def answer(self, number: int) -> SendingEnd:
        """The receiver has all up to `number`."""
        if not self.live or number > self.written:
            raise LaneError(f"an answer to message {number}, of {self.written} written")
        return replace(self, answered=max(self.answered, number))

    def cut(self) -> SendingEnd:
        """The connection is gone."""
        return replace(self, live=False)

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return self.answered == self.given


@dataclass(frozen=True, slots=True)
class ReceivingEnd:
    """The receiving end.

    Attributes:
        last: the last message there, whole; epoch: of the connection that is listened to, 0 for none yet.
    """

    last: int = 0
    epoch: int = 0

    def hello(self, epoch: int) -> ReceivingEnd:
        """A connection greets; all older ones are then to be closed, and it is told `last`."""
        if epoch <= self.epoch:
            raise LaneError(f"a connection of epoch {epoch} after one of epoch {self.epoch}")
        return replace(self, epoch=epoch)

    def begins(self, epoch: int, number: int) -> bool:
        """Whether to take in the message that begins: not one that is there already."""
        if epoch != self.epoch:
            raise LaneError(f"data on connection {epoch}, the newest is {self.epoch}")
        if number > self.last + 1:
            raise LaneError(f"message {number} after message {self.last}")
        return number == self.last + 1

    def whole(self, epoch: int, number: int) -> ReceivingEnd:
        """The message is there: it is to be delivered, then answered."""
        if not self.begins(epoch, number):
            raise LaneError(f"message {number} is whole for a second time")
        return replace(self, last=number)


MS = 1_000_000


def patience(first: int, failures: int, longest: int) -> int:
    """How long to wait after so many failures in a row: twice as long with each, up to the longest."""
    return min(longest, first << min(failures, 8))


FIRST_REST = 100 * MS
LONGEST_REST = 2000 * MS
FIRST_HOLD = 2000 * MS
LONGEST_HOLD = 60_000 * MS


class Path(NamedTuple):
    """The numbers of an interface here and one there."""

    ours: int
    theirs: int


class PathBackoff(NamedTuple):
    """When a path is tried again: failures in a row, until when it rests, when it last failed, how often left."""

    failures: int = 0
    until: int = 0
    since: int = 0
    left: int = 0


_NONE: Mapping[Path, PathBackoff] = MappingProxyType({})


def by_preference(num_ours: int, num_theirs: int) -> tuple[Path, ...]:
    """Like to like first, in order, then the crossed ones."""
    pairs = [Path(i, j) for i in range(num_ours) for j in range(num_theirs)]
    return tuple(sorted(pairs, key=lambda path: (path.ours != path.theirs, path)))


@dataclass(frozen=True)
class Paths:
    """The paths of a lane. Moments are nanoseconds.

    Attributes:
        order: best first; down: our interfaces that the kernel says are down; backoffs: of those that failed.
    """

    order: tuple[Path, ...]
    down: frozenset[int] = frozenset()
    backoffs: Mapping[Path, PathBackoff] = field(default_factory=lambda: _NONE)

    def choose(self, now: int) -> tuple[Path | None, int]:
        """The path to try now, or None and when to ask again."""
        usable = [path for path in self.order if path.ours not in self.down]
        if not usable:
            return None, now + LONGEST_REST
        for path in usable:
            if self._backoff(path).until <= now:
                return path, now
        return None, min(self._backoff(path).until for path in usable)

    @property
    def all_failed(self) -> bool:
        """Whether every path failed the last time, or is down."""
        return all(path.ours in self.down or self.failures(path) for path in self.order)

    def failures(self, path: Path) -> int:
        """How often in a row it failed."""
        return self._backoff(path).failures

    def failed(self, path: Path, now: int) -> Paths:
        """It could not connect, or the connection went: it rests."""
        before = self._backoff(path)
        rest = patience(FIRST_REST, before.failures, LONGEST_REST)
        return self._with(path, before._replace(failures=before.failures + 1, until=now + rest, since=now))

    def left(self, path: Path, now: int) -> Paths:
        """A standing connection over it failed: it must be well for longer, each time, to be gone back to."""
        before = self.failed(path, now)
        backoff = before._backoff(path)
        return before._with(path, backoff._replace(left=backoff.left + 1))

    def stands(self, path: Path) -> Paths:
        """A connection over it stands."""
        if path not in self.backoffs:
            return self
        return self._with(path, self._backoff(path)._replace(failures=0, until=0))

    def interface(self, ours: int, up: bool, now: int) -> Paths:
        """The kernel's word on one of our interfaces. One that came up need not rest, but holds from now."""
        if not up:
            return replace(self, down=self.down | {ours})
        backoffs = {
            path: backoff._replace(until=0, since=now) if path.ours == ours else backoff
            for path, backoff in self.backoffs.items()
        }
        return replace(self, down=self.down - {ours}, backoffs=MappingProxyType(backoffs))

    def better(self, current: Path, now: int) -> tuple[Path | None, int]:
        """A path better than the current one that may be tried again, or None and when to ask again."""
        soonest = now + LONGEST_HOLD
        for path in self.order[: self.order.index(current)]:
            if path.ours in self.down:
                continue
            backoff = self._backoff(path)
            hold = patience(FIRST_HOLD, max(0, backoff.left - 1), LONGEST_HOLD)
            ready = max(backoff.until, backoff.since + hold)
            if ready <= now:
                return path, now
            soonest = min(soonest, ready)
        return None, soonest

    def _backoff(self, path: Path) -> PathBackoff:
        return self.backoffs.get(path, PathBackoff())

    def _with(self, path: Path, backoff: PathBackoff) -> Paths:
        return replace(self, backoffs=MappingProxyType({**self.backoffs, path: backoff}))
