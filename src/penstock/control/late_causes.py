"""What is late now: links and stages whose rise was verified and has not ended, and what was done about them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.control.compute import ComputeChange
from penstock.control.events import Link, undirected
from penstock.control.link import LinkChange
from penstock.control.measured import JobMonitor


class LateCauses:
    """A link is named by its two ends, a stage by its number twice.

    Args:
        monitor: what is measured of links and stages.
        fall: iterations after which a cause that is late no more is forgotten.

    Attributes:
        since: the iteration in which the newest came.
        answered: whether something was changed for it, or it was said why nothing is.
    """

    def __init__(self, monitor: JobMonitor, fall: int) -> None:
        self.since = 0
        self.answered = False
        self._monitor, self._fall = monitor, fall
        self._late: dict[Link, tuple[float, float]] = {}
        """How late each is (ms), and the bound above which it still counts as late."""
        self._seen: dict[Link, int] = {}

    @property
    def ms(self) -> dict[Link, float]:
        """How late each is."""
        return {key: ms for key, (ms, _) in self._late.items()}

    def note(self, iteration: int, news: Sequence[LinkChange | ComputeChange]) -> set[Link]:
        """Takes verified changes in; returns the causes that are new."""
        known = set(self._late)
        for change in news:
            level = (change.change.before + change.change.after) / 2
            if isinstance(change, ComputeChange):
                key, ms = (change.stage, change.stage), change.change.after
            else:
                key = undirected(change.link)
                ms = change.after.mean if change.of_share else change.after.delay
                level = (change.before.mean + change.after.mean) / 2 if change.of_share else level
            if change.change.rose:
                self._late[key] = max((ms, level), self._late.get(key, (0.0, 0.0)))
            else:
                self._late.pop(key, None)
                self._seen.pop(key, None)
        new = set(self._late) - known
        if new:
            self.since, self.answered = iteration, False
        return new

    def are_there(self, keys: Collection[Link]) -> bool:
        """Whether one of these is late in the latest iterations."""
        return any(self._monitor.is_late(key, bound) for key, (_, bound) in self._late.items() if key in keys)

    def forget(self, iteration: int) -> None:
        """Forgets those that have not been late for as long as a fall needs to be verified."""
        for key, (_, bound) in list(self._late.items()):
            if self._monitor.is_late(key, bound):
                self._seen[key] = iteration
            elif iteration - self._seen.setdefault(key, iteration) >= self._fall:
                del self._late[key], self._seen[key]

    def forget_links(self) -> None:
        """Nodes changed places: links join others now."""
        self._late = {key: each for key, each in self._late.items() if key[0] == key[1]}
        self._seen = {key: each for key, each in self._seen.items() if key[0] == key[1]}
