"""Whether the messages of a link hold one another up: what tells a busy link from a late one.

    late by 40 ms         |------ 40 ------|              each message arrives 40 ms after it began,
                              |------ 40 ------|          however many are under way

    busy for 40 ms        |======== 40 ========|                       the second waits for the first:
                              | - waits - - - -|======== 40 ========|  it takes 70 ms, of which 30 are waiting

    lost and sent again   |- - - - - - - 200 - - - - - - -|
                              |- - - held up - - - - - - -|        the second arrives with the first

A message that waits behind others takes no longer by itself, so that waiting is taken off, as that for a late
receiver is. How long the link is busy with each is tried out: the number that makes messages which found the link
free and messages which did not take the same time is the right one, if it explains much more than none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

Row = tuple[float, float, float]
"""A message: bytes, when both sides were ready (ms), when it had arrived (ms)."""

FEWEST = 2
"""Messages that began while another was under way from which on the question can be answered."""
TOGETHER = 0.25
"""Share of the time between two messages' beginnings up to which they count as arrived together."""
_CLEARLY = 0.02
"""Share of a message's time by which another must have begun before its end, to count as begun during it."""
BETTER = 0.5
"""Share of the unexplained differences that may be left where a link counts as busy."""


class BusyTime(NamedTuple):
    """How long a link is busy with a message: `each` ms, and `per_byte` ms for each byte; one of them is 0."""

    each: float = 0.0
    per_byte: float = 0.0

    def of(self, num_bytes: float) -> float:
        return self.each + self.per_byte * num_bytes


def busy_time(rows: Sequence[Row]) -> BusyTime | None:
    """How long the link is busy with a message; nothing where messages do not hold one another up.

    None where that cannot be told: too few began while another was under way.

    Args:
        rows: of one direction in one iteration, in the order in which they began.
    """
    overlapping = [
        (after, after[2] - before[2])
        for before, after in pairwise(rows)
        if after[1] < before[2] - _CLEARLY * (before[2] - before[1])
    ]
    if len(overlapping) < FEWEST:
        return None
    plain = _unlike(rows, waits(rows, BusyTime()))
    gaps = sorted(gap for _, gap in overlapping)
    rates = sorted(gap / after[0] for after, gap in overlapping if after[0] > 0)
    tried = [BusyTime(each=gap) for gap in _quarters(gaps)]
    if len({size for size, _, _ in rows}) > 1:
        tried += [BusyTime(per_byte=rate) for rate in _quarters(rates)]
    found = _refined(rows, min(tried, key=lambda busy: _unlike(rows, waits(rows, busy)), default=BusyTime()))
    middle = median(ended - began for _, began, ended in rows)
    left = _unlike(rows, waits(rows, found))
    if left > BETTER * plain or min(plain - left, found.of(median(size for size, _, _ in rows))) < 0.02 * middle:
        return BusyTime()
    return found


def held_share(rows: Sequence[Row]) -> float:
    """The share of messages that arrive together with the one before, though they began later.

    A stream hands on nothing out of order, so what waits for a packet that was lost arrives at one moment.
    """
    held = 0
    for before, after in pairwise(rows):
        apart = after[1] - before[1]
        during = before[2] - after[1] > _CLEARLY * (before[2] - before[1])
        held += during and after[2] - before[2] < TOGETHER * apart
    return held / len(rows)


def waits(rows: Sequence[Row], busy: BusyTime) -> list[float]:
    """How long each message waits behind those before it (ms), if the link is `busy` so long with each."""
    found, free = [], float("-inf")
    for size, began, _ in rows:
        begins = max(began, free)
        found.append(begins - began)
        free = begins + busy.of(size)
    return found


def alone(rows: Sequence[Row], busy: BusyTime) -> list[float]:
    """What each message takes by itself (ms): without waiting behind others on a link that is `busy` so long."""
    waiting = waits(rows, busy)
    return [max(0.0, ended - began - wait) for (_, began, ended), wait in zip(rows, waiting, strict=True)]


def _refined(rows: Sequence[Row], busy: BusyTime) -> BusyTime:
    """The same, told by those messages alone that really waited."""
    waiting = waits(rows, busy)
    gaps = [
        (after[0], after[2] - before[2])
        for (before, after), wait in zip(pairwise(rows), waiting[1:], strict=True)
        if wait > 0
    ]
    if not gaps:
        return busy
    if busy.per_byte:
        better = BusyTime(per_byte=median(gap / size for size, gap in gaps if size > 0))
    else:
        better = BusyTime(each=median(gap for _, gap in gaps))
    return min((busy, better), key=lambda each: _unlike(rows, waits(rows, each)))


def _unlike(rows: Sequence[Row], waiting: Sequence[float]) -> float:
    """How far, waiting taken off, messages differ from others of their size (ms).

    Those that found the link free are few once it is full, and count as much as all others together.
    """
    times = [ended - began - wait for (_, began, ended), wait in zip(rows, waiting, strict=True)]
    by_size: dict[float, list[float]] = {}
    for (size, _, _), time in zip(rows, times, strict=True):
        by_size.setdefault(size, []).append(time)
    middle = {size: median(each) for size, each in by_size.items()}
    free: list[float] = []
    other: list[float] = []
    last = float("-inf")
    for (size, began, ended), time in zip(rows, times, strict=True):
        (free if began >= last else other).append(abs(time - middle[size]))
        last = ended
    return sum(sum(each) / len(each) for each in (free, other) if each) / 2


def _quarters(ordered: Sequence[float]) -> list[float]:
    """The first, second and third quarter's ends of what is above 0."""
    above = [value for value in ordered if value > 0]
    return [above[len(above) * part // 4] for part in (1, 2, 3)] if above else []
