"""The thread that starts delegates again when they die, while its rank computes or waits for something else.

It sleeps until the kernel says that a delegate is dead, that somebody wants to connect to one not started yet, or
that another rank has news of its interfaces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transport.delegate.fleet import Fleet, Post

LOOK = 0.5
"""Seconds between two looks on kernels that tell no deaths."""
ENDS = 10.0
"""Seconds that a delegate's start, in which `stop` may find the thread, is waited for."""


class Supervisor:
    """Args:
    lock: held while a delegate is started.
    restart: starts a dead delegate again; called with the lock held.
    """

    def __init__(self, fleet: Fleet, lock: threading.RLock, restart: Callable[[Post], None]) -> None:
        self._fleet, self._lock, self._restart = fleet, lock, restart
        self.error: RuntimeFailure | None = None
        self._thread = threading.Thread(target=self._work, name="penstock-delegates", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (posts := self._fleet.watch(LOOK if self._fleet.blind else -1.0)) is not None:
            with self._lock:
                try:
                    self._tend(posts)
                except RuntimeFailure as error:
                    self.error = error
                    return
                except Exception as error:
                    self.error = RuntimeFailure(f"the delegates cannot be kept running: {error!r}")
                    self.error.__cause__ = error
                    return

    def _tend(self, posts: list[Post]) -> None:
        self._fleet.pass_on()
        for post in posts:
            if self._fleet.dead(post):
                self._restart(post)
            else:
                self._fleet.get(post)

    def stop(self) -> None:
        """Ends the thread; one that still starts a delegate after `ENDS` seconds is left to end by itself."""
        self._fleet.stop_watching()
        self._thread.join(ENDS)
