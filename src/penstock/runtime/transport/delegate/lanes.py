"""How many delegates a link wants, and how many messages under way, by what was measured on it.

8 messages a second, each 500 ms in a delegate     -> 4 delegates (PipeMorph, section 5.2)
8 messages a second, each 300 ms on the way        -> ceil(2 * 0.3 * 8) + 1 = 6 under way
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.runtime.errors import RuntimeFailure


class LaneCount(NamedTuple):
    """Attributes:
    lanes: delegates of one kind and direction, each with a connection of its own.
    posted: messages that must have a place at the receiver, so that none waits for one.
    """

    lanes: int
    posted: int


def lanes_for(
    rate: float,
    delay: float,
    busy: float,
    *,
    num_bytes: float = 0.0,
    window: float = math.inf,
    most: int = 16,
) -> LaneCount:
    """The delegates and places that keep up with the messages of one kind on one link.

    A delegate takes `busy` for each message, so that `rate * busy` of them are at work at once; and a connection
    carries at most a window's bytes in a round trip, so that `rate * num_bytes * 2 delay / window` of them must
    share what the messages bring. A message has a place from when it is announced until the answer is back.

    Args:
        rate: messages a second; delay: seconds one way, PipeMorph's c; busy: seconds of a delegate for one message.
        num_bytes: of a message; window: bytes that a connection may have under way.
        most: delegates.

    Raises:
        RuntimeFailure: a number that is negative, not finite, or makes no sense.
    """
    given = {"rate": rate, "delay": delay, "busy": busy, "num_bytes": num_bytes}
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise RuntimeFailure(f"lanes for a {name} of {value:g}: give a number of at least 0")
    if not window > 0 or most < 1:
        raise RuntimeFailure(f"lanes for a window of {window:g} bytes and {most} at most: give more than 0 of each")
    wanted = max(rate * busy, rate * num_bytes * 2 * delay / window)
    # What fits to a billionth fits: 0.1 * 30 is above 3.
    return LaneCount(max(1, min(most, math.ceil(wanted - 1e-9))), math.ceil(2 * delay * rate - 1e-9) + 1)
