"""The ways by which two ranks may connect: an interface of ours and one of theirs, the best first, with patience.

our interface 0 -- theirs 0    preferred         a path that failed rests, longer each time;
our interface 1 -- theirs 1    next              the best of those that rest least is tried;
0 -- 1, 1 -- 0                 last              back to a better one only when it was well for a while
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

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
    """The paths from a rank to another. Moments are nanoseconds.

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
