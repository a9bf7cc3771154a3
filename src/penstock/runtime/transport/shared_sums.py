"""Sums over all ranks of one host, through memory that all of them map. Each step ends with one.

    rank 0's memory   | ... | sum 6 | row of numbers |   | sum 7 | row of numbers |
    rank 1's memory   | ... | sum 6 | row of numbers |   | sum 5 | row of numbers |    has not come to sum 7 yet

Each rank writes its row and the sum's number into its own memory, and reads the others' rows once all are there. The
last one to come wakes those who sleep. A rank that writes sum 7 has read all of sum 6, for which all had written. So
two places per rank are enough, and nobody overwrites what another rank still reads.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.transport.rank_memory import (
    PLACE,
    ROW,
    IncomingRing,
    OwnMemory,
    PeerRing,
    fence,
    sums_start,
)

SUMMING = 2
"""What a rank that sleeps until a sum is whole says in its memory; nobody wakes it for less."""
POLL_S = 0.5
"""Seconds after which a rank that sleeps looks up, whatever was said."""


class SharedSums:
    """One rank's part in all sums.

    Args:
        own: this rank's memory, and the pipe that it sleeps on.
        senders, receivers: how other ranks are woken, and what of theirs is mapped, by rank.
        sleep: sleeps for at most so many seconds, until somebody writes to the pipe or another rank's process ends.
    """

    def __init__(
        self,
        rank: int,
        own: OwnMemory,
        senders: Mapping[int, PeerRing],
        receivers: Mapping[int, IncomingRing],
        timeout: float,
        sleep: Callable[[float], None],
    ) -> None:
        self._rank, self._own, self._senders, self._receivers = rank, own, senders, receivers
        self._timeout, self._sleep = timeout, sleep
        self._number = 0
        memories = {rank: own.memory} | {peer: receiver.memory for peer, receiver in receivers.items()}
        start = sums_start(len(memories))
        self._places = [
            [(memories[each].words[at : at + 1], memories[each].numbers(at + 8, ROW)) for each in sorted(memories)]
            for at in (start, start + PLACE)
        ]

    def sum(self, row: Sequence[float]) -> list[float]:
        """The sum of all rows, in the order of the ranks. They have the same length, at most `ROW`.

        Raises:
            DeadlineExceeded, PeerLost: with who waited for whom.
        """
        self._number += 1
        number, size = self._number, len(row)
        places = self._places[number % 2]
        word, numbers = places[self._rank]
        numbers[:size] = array("d", row)
        fence()
        word[0] = number
        fence()
        if missing := [rank for rank, (word, _) in enumerate(places) if word[0] != number]:
            self._wait(missing, places, number)
        else:
            for sender in self._senders.values():
                if sender.asleep[0] == SUMMING:
                    sender.rouse()
        return [sum(column) for column in zip(*(numbers[:size].tolist() for _, numbers in places), strict=True)]

    def _wait(self, missing: list[int], places: Sequence[tuple[memoryview, memoryview[float]]], number: int) -> None:
        asleep = self._own.asleep
        end = time.monotonic() + self._timeout
        while True:
            asleep[0] = SUMMING
            fence()
            missing = [rank for rank in missing if places[rank][0][0] != number]
            if not missing:
                asleep[0] = 0
                fence()
                return
            if lost := [rank for rank in missing if self._receivers[rank].gone]:
                raise PeerLost(
                    f"rank {self._rank} lost its connection to rank {lost[0]}, whose process has ended, while it "
                    "waited for a sum over all ranks"
                )
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"rank {self._rank} waited {self._timeout:g} s for a sum over all ranks from rank "
                    f"{', '.join(map(str, missing))}; if that is just slow, give a longer timeout; if not, it stands "
                    "still or was given other batches or calls"
                )
            self._sleep(min(POLL_S, left))

    def close(self) -> None:
        """Lets go of all rows."""
        for places in self._places:
            for word, numbers in places:
                word.release()
                numbers.release()
        self._places = []
