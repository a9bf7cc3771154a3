"""The packets of one direction of a link: which are lost, when each arrives, and how many there were.
It has no clock.

    packet --> cut? lost? too many waiting? --> leaves when the packets before it have --> arrives latency later

`LinkCondition.delay_of` says when each arrives, with packets in place of messages. Times are milliseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

from penstock.cost import LinkCondition
from penstock.cost.conditions import LinkQueue
from penstock.lab.commands import BUFFER_BYTES
from penstock.lab.layout import NetworkWay
from penstock.lab.links import WayChange


class PacketQueue:
    """Packets under way from one host to another on one network.

    Attributes:
        way: the direction and network.
        held: (due, packet) in the order of arrival.
        num_packets, num_bytes: packets that were accepted; num_lost: lost by chance; num_refused: refused because the
            way was cut, or because more than 64 MiB waited for a limited bandwidth.
    """

    def __init__(self, way: NetworkWay, condition: LinkCondition | None = None) -> None:
        self.way = way
        self.held: deque[tuple[float, bytes]] = deque()
        self.cut = False
        self.num_packets = self.num_bytes = self.num_lost = self.num_refused = 0
        self.condition: LinkCondition | None = None
        self._since, self._queue = 0.0, LinkQueue()
        self._share, self._random = 0.0, Random()
        self._passes: LinkCondition | None = None
        self.change(WayChange(condition), 0.0)

    @property
    def loses(self) -> bool:
        return self._share > 0

    def change(self, change: WayChange, now: float) -> None:
        """Changes the condition from now on. Packets under way arrive as planned, and before later ones; a
        cut loses them.
        """
        if change.cut is not None:
            self.cut = change.cut
        if self.cut:
            self.num_refused += len(self.held)
            self.held.clear()
        if change.keep:
            return
        self.condition = change.condition
        free_at, last_arrival, num_sent = self._queue
        shift = self._since - now
        self._since, self._queue = now, LinkQueue(free_at + shift, last_arrival + shift, num_sent)
        loss = None if change.condition is None else change.condition.loss
        self._share = 0.0 if loss is None else loss.share
        self._random = Random(f"{0 if loss is None else loss.seed} {self.way}")
        # A condition that only loses lets what is left pass at once.
        passes = None if change.condition is None else replace(change.condition, loss=None)
        self._passes = None if passes == LinkCondition() else passes

    def take(self, num_bytes: int, now: float) -> float | None:
        """When a packet that is handed over at `now` is due; None if it is lost."""
        if self.cut:
            self.num_refused += 1
            return None
        if self._share and self._random.random() < self._share:
            self.num_lost += 1
            return None
        if self._passes is None:
            due = max(now, self._since + self._queue.last_arrival)
        else:
            passage = self._passes.delay_of(num_bytes, now - self._since, self._queue, str(self.way))
            if self._passes.bandwidth is not None and self._waiting(now) > BUFFER_BYTES:
                self.num_refused += 1
                return None
            self._queue = passage.queue
            due = self._since + passage.arrived
        self.num_packets += 1
        self.num_bytes += num_bytes
        return due

    def _waiting(self, now: float) -> float:
        """Bytes that wait for their turn at the present bandwidth."""
        assert self._passes is not None
        assert self._passes.bandwidth is not None
        since = now - self._since
        return (
            max(0.0, self._queue.free_at - since) * 1e-3 * self._passes.bandwidth.at(since, f"{self.way} bandwidth")
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.way.source,
            "target": self.way.target,
            "nic": self.way.nic,
            "condition": None if self.condition is None else str(self.condition),
            "cut": self.cut,
            "num_packets": self.num_packets,
            "num_bytes": self.num_bytes,
            "num_lost": self.num_lost,
            "num_refused": self.num_refused,
        }
