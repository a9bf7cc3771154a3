"""Simulated annealing on several threads: each goes on for a slice of time, then all bring back what they found."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.network import Array
from penstock.planning.metropolis import Cooling
from penstock.planning.progress import Incumbent
from penstock.planning.threads import Threads, is_quick

_SLICE = 0.1
"""Seconds after which threads meet, and say where they stand."""

S = TypeVar("S", bound=Incumbent[Any])


class Annealer(ABC, Generic[S]):
    """One thread's search.

    Attributes:
        moves_a_second: how many it makes at about the pace so far; at first at a guess, better too few.
        stuck: whether it can move no more.
    """

    MODULE: ModuleType
    """Its compiled functions, with `seed` among them."""
    HOT: float
    COLD: float
    """Temperatures at which a search begins and ends, in units of the annealer's own."""
    MOVES: tuple[float, float]
    """Moves a second at first: at most so many, and so many in a problem of one op."""
    BEGINNING = 0.0
    """Seconds that taking up an order takes for each op, at most: where that leaves no time to move none is made."""

    def __init__(self, problem: Any, seed: int) -> None:
        self._module: Any = compiled(self.MODULE)
        self._random = np.random.default_rng(seed)
        most, of_one = self.MOVES
        self.moves_a_second = min(most, of_one / max(1, problem.num_ops)) * (1 if is_compiled() else 1e-3)
        self.stuck = False

    def go(self, seconds: float, done: float, part: float, target: float, stop: Array) -> None:
        """Goes on for about so long, or until `stop` is no longer 0.

        Args:
            done, part: shares of the search: what is done of it, and what this is.
            target: the makespan (ms) at which it may stop.
        """
        num_moves = max(1, int(seconds * self.moves_a_second))
        self._module.seed(int(self._random.integers(2**31)))
        hot, cold = (
            self.unit * self.HOT * (self.COLD / self.HOT) ** min(1.0, share) for share in (done, done + part)
        )
        before = time.perf_counter()
        moved = self.move(Cooling(num_moves, hot, cold, target, stop), done)
        spent = time.perf_counter() - before
        self.stuck = moved == 0 and stop[0] == 0
        if moved is not None and (moved == num_moves or stop[0] != 0):
            self.moves_a_second = min(4 * self.moves_a_second, (moved + 1) / max(spent, 1e-6))

    @abstractmethod
    def begin(self, search: S, until: float) -> None:
        """Takes up the best so far, in no more than a moment after `until` (seconds since the search began)."""

    @property
    @abstractmethod
    def unit(self) -> float:
        """ms of a temperature of 1."""

    @abstractmethod
    def move(self, cooling: Cooling, done: float) -> int | None:
        """Makes moves; returns how many it made, None where it did not count them.

        Args:
            done: the share of the search that is done.
        """

    @abstractmethod
    def bring(self, search: S) -> None:
        """Lets the search take the best that was found."""


def annealed(
    search: S,
    kind: type[Annealer[S]],
    until: float,
    how: str = "local search",
    again: bool = True,
    num_threads: int | None = None,
) -> None:
    """Anneals on several threads from the best so far, until `until` (seconds since the search began).

    Args:
        kind: of the annealers.
        how: what reports say.
        again: whether to begin again and again from the best; else temperatures fall once. Ends before where no
            annealer can move.
    """
    num_ops = search.problem.num_ops
    if num_ops == 0 or search.closed or search.seconds >= until:
        return
    if not is_quick(num_ops):
        return
    with Threads(num_threads) as threads:
        if search.seconds + kind.BEGINNING * num_ops * threads.num >= until:
            return
        each = [kind(search.problem, search.seed + k) for k in range(threads.num)]
        while not search.closed and search.seconds < until and not all(one.stuck for one in each):
            left = until - search.seconds
            for one in each:
                one.begin(search, until)
            _fallen(search, each, threads, max(1.0, 0.4 * left) if again and left >= 1.5 else left, until, how)
            if not again:
                return


def _fallen(
    search: S, annealers: Sequence[Annealer[S]], threads: Threads, length: float, until: float, how: str
) -> None:
    """Lets temperatures fall once, in `length` seconds but no longer than `until`."""
    begins = search.seconds
    while not search.closed and search.seconds < until and (done := (search.seconds - begins) / length) < 1:
        part = min(_SLICE / length, 1 - done)
        calls = [partial(each.go, part * length, done, part, search.target, threads.stop) for each in annealers]
        threads.run(calls, until - search.seconds)
        for each in annealers:
            each.bring(search)
        search.report(how)
        if all(each.stuck for each in annealers):
            return
