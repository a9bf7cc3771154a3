"""Threads that search at once, and how they are stopped when the time is over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType

import numpy as np

from penstock.engine.compiled import is_compiled
from penstock.engine.network import Array

MOST_THREADS = 16
"""Above this what threads find is what others found."""

MOST_UNCOMPILED = 30_000
"""Ops above which nothing is searched where functions run as Python: a single order takes longer than most limits."""


def num_cores() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system says
        return os.cpu_count() or 1


def is_quick(num_ops: int) -> bool:
    """Whether a step of the search may begin: its functions run as C, or the problem is small."""
    return num_ops <= MOST_UNCOMPILED or is_compiled()


class Threads:
    """Threads that run calls side by side, each of them until it ends or `stop` is no longer 0.

    Compiled functions look at `stop` and let other threads run meanwhile, this one among them, which looks at the
    clock. Uncompiled ones share one processor, and draw from numpy's own random numbers: they get one thread, and the
    numbers are put back.
    """

    def __init__(self, num_threads: int | None) -> None:
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
