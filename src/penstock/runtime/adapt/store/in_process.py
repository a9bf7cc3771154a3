"""Queues for ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections import defaultdict
from queue import Empty, SimpleQueue


class InProcessStore:
    """A store that is this process's memory; it is never gone."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[bytes]] = defaultdict(SimpleQueue)
        self._lock = threading.Lock()

    def push(self, queue: str, value: bytes) -> None:
        self._queue(queue).put(value)

    def pop(self, queue: str, timeout: float) -> bytes | None:
        try:
            return self._queue(queue).get(timeout=timeout)
        except Empty:
            return None

    def another(self) -> InProcessStore:
        return self

    def close(self) -> None:
        pass

    def _queue(self, name: str) -> SimpleQueue[bytes]:
        with self._lock:
            return self._queues[name]
