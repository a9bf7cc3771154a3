"""The times of a message from one rank to another, as the receiver knows them. Links are measured by these.

    sender     ......|sent- - - - - - - - - - - - .
    receiver   . . . . . . |posted========arrived|....      this receiver was late: its link took `=`
                            |<- duration ->|

Time spent waiting for a late sender, or for a receiver without room, says nothing about the link. So a transfer
begins when both are ready (ByteDance's what-if analysis, OSDI'25: end minus the later of both starts).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class TransferRecord(NamedTuple):
    """One message that came in.

    Moments are nanoseconds of the monotonic clock (`time.perf_counter_ns`), which all processes of a host share.
    Two hosts share none: what crosses between them is late by the difference of their clocks as well, always the
    same, so only changes of it mean anything there.

    Attributes:
        source, target: ranks.
        num_bytes: of what the message carries.
        sent: when the sender handed it to its transport.
        posted: when the receiver was ready for it: had a buffer where the transport fills one ahead of time,
            else the same as `sent`.
        arrived: when its last byte was there.
    """

    source: int
    target: int
    num_bytes: int
    sent: int
    posted: int
    arrived: int

    @property
    def duration(self) -> int:
        """Nanoseconds from when both sides were ready to the message's arrival."""
        return self.arrived - max(self.sent, self.posted)


SHORTEST_WAIT = 100_000
"""Nanoseconds; a wait that took less found its message there already, and nobody knows since when."""

KEPT = 10_000
"""Crossings that a rank keeps where nobody asks for them: the latest."""


class CrossingLog:
    """The crossings of one rank since they were last taken. `add` may be called from any thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, ...]] = deque(maxlen=KEPT)

    def add(self, *crossing: int) -> None:
        """Takes note of one, given as the fields of its record; that is made when it is asked for."""
        self._kept.append(crossing)

    def take(self) -> list[TransferRecord]:
        """All that were added since the last call, oldest first."""
        taken = []
        while self._kept:
            taken.append(TransferRecord._make(self._kept.popleft()))
        return taken
