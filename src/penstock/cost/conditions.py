"""What one link does to messages, as a small language and a pure function.

    latency:30ms                 messages arrive 30 ms after they left; any number may be under way
    occupancy:5ms                the link is busy 5 ms with each message; those behind it wait
    bandwidth:1GB/s              busy for size / bandwidth
    loss:1%                      packets get lost and are sent again
    occupancy:5ms+half-duplex    both directions wait for each other, as where one queue holds sends and receives
    latency:30ms+loss:1%         several at once
    20                           latency:20ms

Latency and occupancy are the two things that "delay" may mean, and they differ in kind: a late link delays each
message once, a busy one delays the tenth message ten times. Each may change over time (see `over_time`).

    sent            leaves                     arrives
      |-- waits ----|~~ busy ~~|--- latency ---|        arrivals keep the order of sending, as in any stream
                    `occupancy + size / bandwidth
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from penstock.cost.errors import CostError
from penstock.cost.over_time import (
    RATE,
    TIME,
    Constant,
    OverTime,
    RandomSteps,
    Trace,
    Unit,
    read_over_time,
    read_quantity,
    show_quantity,
)
from penstock.schedule.short_repr import short_repr

PACKET_BYTES = 1448
"""What one TCP segment carries over Ethernet."""
NOTHING = Constant(0.0)
HALF_DUPLEX = "half-duplex"
SHORTEST_RETRY = 10.0
"""Milliseconds that a sender waits at least before it sends lost packets again."""


@dataclass(frozen=True)
class PacketLoss:
    """Loss as a reliable stream shows it: nothing is missing, some messages are late.

    A message is `ceil(size / 1448)` packets, at least one. In each round of sending every packet still missing
    is lost with chance `share`; each further round costs one wait. What was sent behind waits too.

    Attributes:
        share: of packets lost, at least 0 and below 1.
        retry: ms that one more round takes; None: one round trip of the link's latency, at least 10 ms.
        seed: settles which messages are hit.
    """

    share: float
    retry: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise CostError(f"a loss of {self.share:.6g}: give a share of at least 0% and below 100%")
        if self.retry is not None and not 0 <= self.retry < math.inf:
            raise CostError(f"a retry of {self.retry:g} ms: give a number of at least 0")

    def rounds(self, num_bytes: float, number: int, stream: str) -> int:
        """Rounds of sending again that message `number` of a direction needs."""
        if self.share == 0:
            return 0
        packets = max(1, math.ceil(num_bytes / PACKET_BYTES))
        chance = Random(f"{self.seed} {stream} {number}").random()
        # The chance that r further rounds are enough is (1 - share^(r + 1))^packets.
        missing = -math.expm1(math.log(max(chance, 1e-300)) / packets)
        return max(0, math.ceil(math.log(missing) / math.log(self.share)) - 1)

    def show(self) -> str:
        retry = "" if self.retry is None else f",{show_quantity(self.retry, TIME)}"
        return f"{show_quantity(self.share, _SHARE)}{retry}" + (f"#{self.seed}" if self.seed else "")


_SHARE = {"%": 0.01, "": 1.0}


class LinkQueue(NamedTuple):
    """One direction of a link between two messages.

    Attributes:
        free_at: when it is no longer busy (ms); last_arrival: of the last message; num_sent: messages so far.
    """

    free_at: float = 0.0
    last_arrival: float = 0.0
    num_sent: int = 0


class MessagePassage(NamedTuple):
    """How a message passes: it leaves, arrives (ms), and so it leaves the direction behind."""

    left: float
    arrived: float
    queue: LinkQueue


@dataclass(frozen=True)
class LinkCondition:
    """What one link does to messages.

    Attributes:
        latency: ms from leaving to arriving; read when the message is taken up.
        occupancy: ms that the link is busy with each message, besides size / bandwidth.
        bandwidth: bytes a second; None where size does not matter.
        loss: see `PacketLoss`; None for none.
        half_duplex: whether both directions share one queue; each has its own otherwise.

    Raises:
        CostError: a bandwidth that is, or may become, 0.

    Examples:
        >>> import penstock as ps
        >>> links = ps.Links({(0, 1): "latency:30ms+bandwidth:1GB/s"})
        >>> condition = links.conditions[0, 1]
        >>> condition.bandwidth.value, condition.loss
        (1000000000.0, None)
    """

    latency: OverTime = NOTHING
    occupancy: OverTime = NOTHING
    bandwidth: OverTime | None = None
    loss: PacketLoss | None = None
    half_duplex: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        rate = self.bandwidth
        if isinstance(rate, RandomSteps):
            lowest = rate.first if rate.shape == "uniform" else 0.0
        else:
            lowest = min(_values(rate), default=math.inf)
        if lowest <= 0:
            raise CostError("a bandwidth that may be 0 lets no message pass; give one above 0 (uniform, not normal)")

    @property
    def is_latency(self) -> bool:
        """Whether it is a latency that lasts, and nothing else: a message of any size is late by so many ms."""
        return self == LinkCondition(self.latency) and isinstance(self.latency, Constant)

    @property
    def is_steady(self) -> bool:
        """Whether it is the same at any time, and nothing is drawn by lots."""
        rate = NOTHING if self.bandwidth is None else self.bandwidth
        return self.loss is None and all(isinstance(each, Constant) for each in (self.latency, self.occupancy, rate))

    def delay_of(
        self, num_bytes: float, now: float, queue: LinkQueue, name: str = "", direction: str = ""
    ) -> MessagePassage:
        """When a message handed over at `now` arrives. Pure: the same arguments give the same answer.

        Args:
            name: of the link, by which draws are told apart from those of other links.
            direction: by which losses are.
        """
        start = max(now, queue.free_at)
        busy = self.occupancy.at(start, f"{name} occupancy")
        if self.bandwidth is not None and num_bytes > 0:
            busy += num_bytes / self.bandwidth.at(start, f"{name} bandwidth") * 1e3
        latency = self.latency.at(start, f"{name} latency")
        left = start + busy
        arrived = left + latency
        if self.loss is not None:
            retry = max(SHORTEST_RETRY, 2 * latency) if self.loss.retry is None else self.loss.retry
            arrived += retry * self.loss.rounds(num_bytes, queue.num_sent, direction)
        arrived = max(arrived, queue.last_arrival)
        return MessagePassage(left, arrived, LinkQueue(left, arrived, queue.num_sent + 1))

    def __str__(self) -> str:
        parts = []
        for name, units in (("latency", TIME), ("occupancy", TIME), ("bandwidth", RATE)):
            value = getattr(self, name)
            if value is not None and value != NOTHING:
                parts.append(f"{name}:{value.show(units)}")
        if self.loss is not None:
            parts.append(f"loss:{self.loss.show()}")
        if self.half_duplex:
            parts.append(HALF_DUPLEX)
        return "+".join(parts) or "latency:0ms"

    @classmethod
    def parse(cls, text: str) -> LinkCondition:
        """Reads what stands right of the `=`. Raises CostError."""
        found: dict[str, OverTime | PacketLoss] = {}
        parts = text.split("+")
        if half_duplex := HALF_DUPLEX in parts[1:]:
            parts.remove(HALF_DUPLEX)
        for part in parts:
            word, colon, rest = part.partition(":")
            if not colon:
                word, rest = "latency", part
            if word not in _WORDS:
                raise CostError(f"{word!r} is not a condition; give {', '.join(_WORDS)}, like latency:30ms+loss:1%")
            if word in found:
                raise CostError(f"{word} is given twice")
            found[word] = _read_loss(rest) if word == "loss" else read_over_time(rest, _WORDS[word])
        return cls(**found, half_duplex=half_duplex)  # type: ignore[arg-type]


def _values(value: Constant | Trace | None) -> Sequence[float]:
    if value is None:
        return ()
    return (value.value,) if isinstance(value, Constant) else value.values


_WORDS: dict[str, Unit] = {"latency": TIME, "occupancy": TIME, "bandwidth": RATE, "loss": {}}


def _read_loss(text: str) -> PacketLoss:
    rest, mark, seed = text.partition("#")
    share, comma, retry = rest.partition(",")
    if mark and not seed.isdecimal():
        raise CostError(f"a loss of {text!r}: what follows # is a seed, a whole number")
    try:
        value = read_quantity(share, _SHARE)
    except CostError:
        raise CostError(
            f"a loss of {text!r}: write it like 1%, or 1%,200ms to say what sending again takes"
        ) from None
    return PacketLoss(value, read_quantity(retry, TIME) if comma else None, int(seed or 0))
