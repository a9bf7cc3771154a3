"""How long a rank must stand idle while the pipelines fill and drain under its cap.

    rank 3 of a V    .  .  .  F3 F4 F3 F4 F3 F4 .  .  .  I4 I3 W4 ...      room for six: no work until I4 is there

By a time A a rank has run no more than U(A): each op only after its head, each microbatch no further on its way than
the stages allow, and what is held then is within the cap. So it has stood idle for A - U(A) at least. The same holds
from the end, with time turned round. A rank's work and both are a bound: what it does between the two has no gaps at
best.

U(A) is a linear program with one row for the cap. At a price for memory each microbatch goes as far on its way as
pays, and every price gives an upper bound of U(A); the best one is found by bisection.

An op under way counts in part. What takes memory does so at its start, and what gives it back does so at its end, so
parts would hold less than they do: what gives back counts as it stood a little before.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.engine.arrays import Floats, Ints
from penstock.engine.network import Network
from penstock.engine.tolerance import EPSILON

_PRICES = 24
"""Prices of memory that are tried."""


def run_by(p: Network, head: Floats, q: int, time: float) -> float:
    """How many ops of queue q can have run by then, the one under way in part."""
    first, long = p.op_first[q], p.duration[q]
    low, high = 0, p.size[q]
    while low < high:
        middle = (low + high) // 2
        if head[first + middle] + long <= time:
            low = middle + 1
        else:
            high = middle
    part = 0.0
    if low < p.size[q] and long > 0.0:
        part = max(0.0, (time - head[first + low]) / long)
    return low + part


def taken(p: Network, q: int, height: float, freed: Floats) -> float:
    """What an op of queue q adds to what is held; it takes nothing from it before its end."""
    amount = p.memory[q]
    if amount < 0.0 and freed[q] < height:
        amount = 0.0
    return amount


class RankWays(NamedTuple):
    """How microbatches come through a rank, and working space.

    Attributes:
        way: queues of the rank in the order in which a microbatch comes to them, W left out; pipeline after pipeline,
            each from `way_first[k]` to `way_first[k + 1] - 1`.
        weight: per place on the way, the queue of the W that belongs to it, or -1.
        weight_first: W comes before what it belongs to, as where time is turned round.
        shift: per queue, how long before what gives back memory counts (ms).
        run, freed: room, one number per queue. heights: room for four numbers per queue.
    """

    way: Ints
    weight: Ints
    way_first: Ints
    weight_first: bool
    shift: Floats
    run: Floats
    freed: Floats
    heights: Floats


def most_work(p: Network, r: int, head: Floats, ways: RankWays, time: float) -> float:
    """The most work (ms) that rank r can have done by `time`."""
    way, weight, way_first, weight_first = ways.way, ways.weight, ways.way_first, ways.weight_first
    run, freed, heights = ways.run, ways.freed, ways.heights
    longest, least = 0.0, 0.0
    for q in range(p.rank_first[r], p.rank_first[r + 1]):
        run[q] = run_by(p, head, q, time)
        freed[q] = run_by(p, head, q, time - ways.shift[q])
        longest += p.duration[q]
        if p.memory[q] > 0.0 and (least == 0.0 or p.memory[q] < least):
            least = p.memory[q]
    cap = p.cap[r] * (1.0 + EPSILON)
    capped = least > 0.0 and cap < 1e300
    low, high, price, found = 0.0, 0.0, 0.0, 1e300
    if capped:
        high = longest / least
    for trial in range(_PRICES if capped else 1):
        if trial > 0:
            price = (low + high) / 2
        total, slope = 0.0, 0.0
        if capped:
            total, slope = price * cap, cap
        for k in range(len(way_first) - 1):
            count = 0
            for place in range(way_first[k], way_first[k + 1]):
                for q in (way[place], weight[place]):
                    if q >= 0:
                        heights[count], heights[count + 1] = run[q], freed[q]
                        count += 2
            heights[:count].sort()
            below = 0.0
            for n in range(count):
                height = heights[n]
                if height <= below:
                    continue
                value, held = 0.0, 0.0
                if weight_first:
                    for place in range(way_first[k], way_first[k + 1]):
                        w = weight[place]
                        if w >= 0 and run[w] >= height:
                            amount = taken(p, w, height, freed)
                            if p.duration[w] > price * amount:
                                value += p.duration[w] - price * amount
                                held += amount
                best, best_held = value, held
                for place in range(way_first[k], way_first[k + 1]):
                    q, w = way[place], weight[place]
                    if run[q] < height or (weight_first and w >= 0 and run[w] < height):
                        break
                    amount = taken(p, q, height, freed)
                    value += p.duration[q] - price * amount
                    held += amount
                    if w >= 0 and run[w] >= height:
                        amount = taken(p, w, height, freed)
                        # Before its place on the way what pays is there already, and what does not is now needed.
                        if (p.duration[w] > price * amount) != weight_first:
                            value += p.duration[w] - price * amount
                            held += amount
                    if value > best:
                        best, best_held = value, held
                total += best * (height - below)
                slope -= best_held * (height - below)
                below = height
        found = min(found, total)
        if trial == 0:
            if slope >= 0.0:
                break
        elif slope >= 0.0:
            high = price
        else:
            low = price
    return found


def idle_till(p: Network, r: int, head: Floats, ways: RankWays, moments: Floats, idle: Floats) -> None:
    """How long rank r has stood idle by each of the moments (ms), at least; `idle` is what is filled in."""
    for k in range(len(moments)):
        idle[k] = max(0.0, moments[k] - most_work(p, r, head, ways, moments[k]))


def with_both_ends(
    known: float, work: float, begin: Floats, idle_begin: Floats, end: Floats, idle_end: Floats
) -> float:
    """The work and the idle time at both ends, of the two moments for which that is most.

    The two ends must not overlap: all is known to last as long as both.
    """
    bound, risen = known, True
    while risen:
        risen = False
        for a in range(len(begin)):
            for b in range(len(end)):
                found = work + idle_begin[a] + idle_end[b]
                if found > bound and begin[a] + end[b] <= bound:
                    bound, risen = found, True
    return bound
