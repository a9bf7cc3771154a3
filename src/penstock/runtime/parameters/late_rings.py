"""Link conditions injected into the rings that add up gradients: a sum ends when it would over such links.

sum of a bucket   |=== really ===|.......| due: `Ring.all_reduce_ms` of its bytes over the links around
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.cost import LinkCondition, Links, Ring
from penstock.cost.conditions import Queue
from penstock.runtime.transport.conditioned import Conditions


class LateRing:
    """The ring of one rank's replicas.

    Args:
        ring: how it moves bytes. around: the condition of each link, from each replica to the next.
        conditions: in whose time they are.
    """

    def __init__(self, ring: Ring, around: Sequence[LinkCondition | None], conditions: Conditions) -> None:
        self._ring, self._around, self._conditions = ring, tuple(around), conditions
        self._free = 0

    def due(self, num_bytes: float) -> int:
        """When a sum that begins now, or after the one before, ends (nanoseconds of the monotonic clock)."""
        begin = max(time.perf_counter_ns(), self._free)
        ms = self._ring.all_reduce_ms(num_bytes, self._around, 0.0, (begin - self._conditions.origin) / 1e6)
        self._free = begin + round(ms * 1e6)
        return self._free


def sleep_until(due: int) -> None:
    """Returns at a moment of the monotonic clock (ns)."""
    while (left := due - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9)


def probed_besides(links: Links, conditions: Conditions) -> dict[tuple[int, int], float]:
    """What injected conditions add to a probe now (ms), by two nodes, the lower one first."""
    at = (time.perf_counter_ns() - conditions.origin) / 1e6
    pairs = {(min(pair), max(pair)) for pair in links.conditions}
    return {(a, b): links.delay_of(a, b, 0.0, at, Queue(at, at)).arrived - at for a, b in pairs}
