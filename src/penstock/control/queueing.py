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
from statistics import fmean, median

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


def busy_times(rows: Sequence[Row]) -> list[float] | None:
    """How long the link is busy with each message (ms): as long with each, or by its bytes. All are 0 where messages
    do not hold one another up.

    None where that cannot be told: too few began while another was under way.

    Args:
        rows: of one direction in one iteration, in the order in which they began.
    """
    gaps = [(number, after[2] - before[2]) for number, (before, after) in enumerate(pairwise(rows), start=1)]
    during = [
        (number, gap)
        for number, gap in gaps
        if rows[number][1] < rows[number - 1][2] - _CLEARLY * (rows[number - 1][2] - rows[number - 1][1])
    ]
    if len(during) < FEWEST:
        return None
    sizes = [size for size, _, _ in rows]
    shapes = [[1.0] * len(rows), sizes] if len(set(sizes)) > 1 else [[1.0] * len(rows)]

    def unlike(busy: Sequence[float]) -> float:
        return _unlike(rows, waits(rows, busy))

    def scaled(rate: float, shape: Sequence[float]) -> list[float]:
        return [rate * each for each in shape]

    free = [0.0] * len(rows)
    tried = [(rate, shape) for shape in shapes for rate in _quarters(_rates(during, shape))]
    rate, shape = min(tried, key=lambda each: unlike(scaled(*each)), default=(0.0, free))
    # The same, told by those messages alone that really waited.
    waiting = waits(rows, scaled(rate, shape))
    waited = _rates([(number, gap) for number, gap in gaps if waiting[number] > 0], shape)
    found = min((scaled(each, shape) for each in (rate, median(waited or [rate]))), key=unlike)
    plain, left = unlike(free), unlike(found)
    least = 0.02 * median(ended - began for _, began, ended in rows)
    return free if left > BETTER * plain or min(plain - left, median(found)) < least else found


def _rates(gaps: Sequence[tuple[int, float]], shape: Sequence[float]) -> list[float]:
    """By how much messages, each with its number, arrive after the one before (ms): for each unit of a shape."""
    return [gap / shape[number] for number, gap in gaps if shape[number] > 0]


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


def waits(rows: Sequence[Row], busy: Sequence[float]) -> list[float]:
    """How long each message waits behind those before it (ms), if the link is `busy` so long with each."""
    found, free = [], float("-inf")
    for (_, began, _), ms in zip(rows, busy, strict=True):
        begins = max(began, free)
        found.append(begins - began)
        free = begins + ms
    return found


def alone(rows: Sequence[Row], waiting: Sequence[float]) -> list[float]:
    """What each message takes by itself (ms), without waiting behind others."""
    return [max(0.0, ended - began - wait) for (_, began, ended), wait in zip(rows, waiting, strict=True)]


def _unlike(rows: Sequence[Row], waiting: Sequence[float]) -> float:
    """How far, waiting taken off, messages differ from others of their size (ms).

    Those that found the link free are few once it is full, and count as much as all others together.
    """
    times = [ended - began - wait for (_, began, ended), wait in zip(rows, waiting, strict=True)]
    by_size: dict[float, list[float]] = {}
    for (size, _, _), time in zip(rows, times, strict=True):
        by_size.setdefault(size, []).append(time)
    middle = {size: median(each) for size, each in by_size.items()}
    differ: dict[bool, list[float]] = {}
    last = float("-inf")
    for (size, began, ended), time in zip(rows, times, strict=True):
        differ.setdefault(began >= last, []).append(abs(time - middle[size]))
        last = ended
    return sum(map(fmean, differ.values())) / 2


def _quarters(values: Sequence[float]) -> list[float]:
    """The first, second and third quarter's ends of what is above 0."""
    above = sorted(value for value in values if value > 0)
    return [above[len(above) * part // 4] for part in (1, 2, 3)] if above else []
