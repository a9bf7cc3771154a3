"""Threads that search at once, and how they are stopped when the time is over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import ModuleType, TracebackType

import numpy as np

from penstock.engine.compiled import is_compiled
from penstock.engine.network import Array

MOST_THREADS = 16
"""Above this what threads find is what others found."""

MOST_UNCOMPILED = 30_000
"""Ops above which nothing is done without machine code: a single order takes longer than the compiling."""

LOOK = 0.02
"""Seconds between looks for machine code that another process makes."""


def num_cores() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system says
        return os.cpu_count() or 1


def is_quick(module: ModuleType, num_ops: int) -> bool:
    """Whether what `module` does may begin: its machine code is there, or the problem is small."""
    return num_ops <= MOST_UNCOMPILED or is_compiled(module)


def awaited(module: ModuleType, num_ops: int, seconds: float) -> bool:
    """Whether a step may begin: at once where the machine code of `module` is there, or the problem is small; else as
    soon as it is there, if it comes within `seconds`."""
    ends = time.perf_counter() + seconds
    while not is_quick(module, num_ops):
        if time.perf_counter() + LOOK >= ends:
            return False
        time.sleep(LOOK)
    return True


class Threads:
    """Threads that run calls side by side, each of them until it ends or `stop` is no longer 0.

    Compiled functions look at `stop` and let other threads run meanwhile, this one among them, which looks at the
    clock. Uncompiled ones share one processor, and draw from numpy's own random numbers: they get one thread, and the
    numbers are put back.
    """

    def __init__(self, num_threads: int | None, compiled: bool) -> None:
        self.num = (num_threads or min(MOST_THREADS, num_cores())) if compiled else 1
        self.stop: Array = np.zeros(1, np.int64)
        self._pool = ThreadPoolExecutor(self.num)
        self._compiled = compiled

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
        with random_numbers_kept(not self._compiled):
            under_way = [self._pool.submit(call) for call in calls]
            try:
                wait(under_way, timeout=max(0.0, seconds))
            finally:
                self.stop[0] = 1
                for each in under_way:
                    each.result()


@contextmanager
def random_numbers_kept(wanted: bool) -> Iterator[None]:
    """Leaves numpy's random numbers, which may be the user's, as they were."""
    state = np.random.get_state() if wanted else None
    try:
        yield
    finally:
        if state is not None:
            np.random.set_state(state)
