"""Simulated annealing on several threads: each goes on for a slice of time, then all bring back what they found."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.engine.network import Array
from penstock.planning.progress import Incumbent
from penstock.planning.threads import Threads

_SLICE = 0.1
"""Seconds after which threads meet, and say where they stand."""

S = TypeVar("S", bound=Incumbent[Any])


class Annealer(ABC, Generic[S]):
    """One thread's search.

    Args:
        module: its compiled functions, with `seed` among them.
        moves_a_second: how many it makes at first, at a guess: better too few.

    Attributes:
        stuck: whether it can move no more.
    """

    HOT: float
    COLD: float
    """Temperatures at which a search begins and ends, in units of the annealer's own."""

    def __init__(self, module: Any, seed: int, moves_a_second: float) -> None:
        self._module = module
        self._random = np.random.default_rng(seed)
        self.moves_a_second = moves_a_second
        self.stuck = False

    def go(self, seconds: float, done: float, part: float, target: float, stop: Array) -> None:
        """Goes on for about so long, or until `stop` is no longer 0.

        Args:
            done, part: shares of the search: what is done of it, and what this is.
            target: the makespan (ms) at which it may stop.
        """
        num_moves = max(1, int(seconds * self.moves_a_second))
        self._module.seed(int(self._random.integers(2**31)))
        hot, cold = (self.HOT * (self.COLD / self.HOT) ** min(1.0, share) for share in (done, done + part))
        before = time.perf_counter()
        moved = self.move(num_moves, done, hot, cold, target, stop)
        spent = time.perf_counter() - before
        self.stuck = moved == 0 and stop[0] == 0
        if moved is not None and (moved == num_moves or stop[0] != 0):
            self.moves_a_second = min(4 * self.moves_a_second, (moved + 1) / max(spent, 1e-6))

    @abstractmethod
    def begin(self, search: S, until: float) -> None:
        """Takes up the best so far, in no more than a moment after `until` (seconds since the search began)."""

    @abstractmethod
    def move(self, num_moves: int, done: float, hot: float, cold: float, target: float, stop: Array) -> int | None:
        """Makes so many moves while the temperature falls from `hot` to `cold`; returns how many it made, None where
        it did not count them."""

    @abstractmethod
    def bring(self, search: S) -> None:
        """Lets the search take the best that was found."""


def annealed(
    search: S, annealers: Sequence[Annealer[S]], threads: Threads, length: float, until: float, how: str
) -> None:
    """Anneals once, for `length` seconds but no longer than `until` (seconds since the search began)."""
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


def annealed_again(search: S, annealers: Sequence[Annealer[S]], threads: Threads, until: float) -> None:
    """Anneals again and again from the best so far, until `until` (seconds since the search began).

    Ends before where no annealer can move.
    """
    while not search.closed and search.seconds < until and not all(each.stuck for each in annealers):
        left = until - search.seconds
        for each in annealers:
            each.begin(search, until)
        annealed(search, annealers, threads, left if left < 1.5 else max(1.0, 0.4 * left), until, "local search")
