"""What every search has: the best found so far, its bound and its time; threads; and simulated annealing on them.

Each thread anneals for a slice of time. Then all of them bring back what they found.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.network import Array
from penstock.engine.tolerance import EPSILON
from penstock.host_process import num_cores
from penstock.planning.metropolis import Cooling
from penstock.planning.result import Progress, certain

MOST_THREADS = 16
"""Above this what threads find is what others found."""

MOST_UNCOMPILED = 30_000
"""Ops above which nothing is searched where functions run as Python: a single order takes longer than most limits."""


def is_quick(num_ops: int) -> bool:
    """Whether a step of the search may begin: its functions run as C, or the problem is small."""
    return num_ops <= MOST_UNCOMPILED or is_compiled()


class Threads:
    """Threads that run calls side by side, each of them until it ends or `stop` is no longer 0.

    Compiled functions look at `stop` and let other threads run meanwhile, this one among them, which looks at the
    clock. Uncompiled ones share one processor, and draw from numpy's own random numbers: they get one thread, and the
    numbers are put back.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num = (num_threads or min(MOST_THREADS, num_cores())) if is_compiled() else 1
        self.stop: Array = np.zeros(1, np.int64)
        self._pool = ThreadPoolExecutor(self.num)

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop[0] = 1
        self._pool.shutdown()

    def run(self, calls: Sequence[Callable[[], None]], seconds: float) -> None:
        """Runs all calls to their ends; those that run after `seconds` are told to stop."""
        self.stop[0] = 0
        with random_numbers_kept():
            under_way = [self._pool.submit(call) for call in calls]
            try:
                wait(under_way, timeout=max(0.0, seconds))
            finally:
                self.stop[0] = 1
                for each in under_way:
                    each.result()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Leaves numpy's random numbers, which may be the user's, as they were: what runs as Python draws them."""
    state = None if is_compiled() else np.random.get_state()
    try:
        yield
    finally:
        if state is not None:
            np.random.set_state(state)


P = TypeVar("P")
"""A problem."""


@dataclass
class Incumbent(Generic[P]):
    """The best that a search has found, what it has proved, and its time.

    Attributes:
        problem: what to plan.
        lower_bound: ms; `improve_bound` raises it.
        seed: of the random numbers.
        stop_at_gap: the gap that is good enough.
        on_progress: is called with every report.
        began: when the search began, by `clock`.
        until: seconds, since the search began, at which it must have come to its end.
        clock: what says the time, in seconds.
        value: of the best so far (ms); how: the step that found it.
    """

    problem: P
    lower_bound: float
    seed: int = 0
    stop_at_gap: float = 0.0
    on_progress: Callable[[Progress], None] | None = None
    began: float = field(default_factory=time.perf_counter)
    until: float = math.inf
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)
    value: float = math.inf
    how: str = ""

    @property
    def seconds(self) -> float:
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Seconds till the search must have come to its end; below 0 where it should have."""
        return self.until - self.seconds

    @property
    def shift(self) -> float:
        """ms that value and bound are above those of the objective."""
        return 0.0

    @property
    def target(self) -> float:
        """The value (ms) at which the search may stop."""
        return self.shift + (self.lower_bound - self.shift) * (1 + max(self.stop_at_gap, EPSILON))

    @property
    def closed(self) -> bool:
        """Whether the best is proved good enough."""
        return self.value <= self.target

    def improves(self, value: float, how: str) -> bool:
        """Whether a value (ms) is the best so far, which then counts.

        Raises:
            ScheduleError: it is below the bound, so one of the two is wrong.
        """
        if not 0 <= value < self.value * (1 - 1e-12):
            return False
        self.lower_bound = certain(self.lower_bound, value, self.shift)
        self.value, self.how = float(value), how
        return True

    def report(self, how: str) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(how, self.seconds, self.value - self.shift, self.lower_bound - self.shift))

    def improve_bound(self, bound: float) -> None:
        """Takes a bound if it is the best so far.

        Raises:
            ScheduleError: it is above the value of the best so far.
        """
        self.lower_bound = certain(max(self.lower_bound, bound), self.value, self.shift)


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


def annealed(search: S, kind: type[Annealer[S]], until: float, how: str = "local search", again: bool = True) -> None:
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
    with Threads() as threads:
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
