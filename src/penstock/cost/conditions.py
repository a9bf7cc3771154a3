"""What one link does to messages, as a small language and a pure function.

    latency:30ms                 messages arrive 30 ms after they left; any number may be under way
    occupancy:5ms                the link is busy 5 ms with each message; those behind it wait
    bandwidth:1GB/s              busy for size / bandwidth
    loss:1%                      packets get lost and are sent again
    occupancy:5ms+half-duplex    both directions wait for each other, as where one queue holds sends and receives
    latency:30ms+loss:1%         several at once
    20                           latency:20ms

Latency and occupancy are the two things that "delay" may mean, and they differ in kind: a late link delays each
message once, a busy one delays the tenth message ten times. Each may be a number that changes over time. All is
pure: the same at every reading.

    30ms                            always
    trace:wan.txt                   lines of TIME VALUE; each value holds until the next time
    steps:0ms/13ms,500ms/40ms       the same, written out
    normal:30ms,10ms@50ms..100ms#7  mean 30, deviation 10, drawn anew after 50 to 100 ms; 7 seeds the draws
    uniform:10ms,50ms@1s            from 10 to 50, drawn anew every second

    sent            leaves                     arrives
      |-- waits ----|~~ busy ~~|--- latency ---|        arrivals keep the order of sending, as in any stream
                    `occupancy + size / bandwidth
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from penstock.cost.errors import CostError
from penstock.schedule.short_repr import short_repr

Unit = dict[str, float]
TIME: Unit = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 60e3, "": 1.0}
"""Milliseconds; a bare number is milliseconds."""
RATE: Unit = {
    **{f"{prefix}B/s": size for prefix, size in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9))},
    **{f"{prefix}bit/s": size / 8 for prefix, size in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9))},
}
"""Bytes a second."""

_NUMBER = re.compile(r"(?P<number>-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?)(?P<unit>[A-Za-z/%]*)")


def read_quantity(text: str, units: Unit) -> float:
    """Reads `30ms` or `1GB/s`; raises CostError that says what could stand there."""
    match = _NUMBER.fullmatch(text)
    if match is None or match["unit"] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise CostError(f"{text!r} is not a number with a unit; units are {known}")
    value = float(match["number"]) * units[match["unit"]]
    if not 0 <= value < math.inf:
        raise CostError(f"{text!r}: give a number of at least 0")
    return value


def show_quantity(value: float, units: Unit) -> str:
    """A text that `read_quantity` reads back as just this value: times in ms, others as short as can be."""
    if units is TIME:
        return f"{_digits(value)}ms"
    texts = [f"{_digits(value / size)}{unit}" for unit, size in units.items() if unit]
    exact = [text for text in texts if read_quantity(text, units) == value]
    return min(exact, key=len, default=_digits(value))


def _digits(value: float) -> str:
    text = repr(float(value)).replace("e+", "e")
    return text.removesuffix(".0")


@dataclass(frozen=True)
class Constant:
    """Always the same value."""

    value: float

    def at(self, time: float, stream: str) -> float:
        return self.value

    def show(self, units: Unit) -> str:
        return show_quantity(self.value, units)


@dataclass(frozen=True)
class Trace:
    """Each value holds from its time (ms) until the next time, the last one forever.

    Raises:
        CostError: times that do not start at 0 or do not ascend, a value that is missing or below 0.
    """

    times: tuple[float, ...]
    values: tuple[float, ...]
    path: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        where = f"trace {self.path}" if self.path else "the trace"
        if not self.times or len(self.times) != len(self.values):
            raise CostError(
                f"{where} has {len(self.times)} times and {len(self.values)} values; give one value a time"
            )
        if self.times[0] != 0:
            raise CostError(f"{where} has a gap: it starts at {self.times[0]:g} ms, and what holds from 0 is needed")
        for earlier, later in zip(self.times, self.times[1:], strict=False):
            if not later > earlier:
                raise CostError(f"{where} goes from {earlier:g} to {later:g} ms: its times must ascend")
        for time, value in zip(self.times, self.values, strict=True):
            if math.isnan(value):
                raise CostError(f"{where} has a gap: no value at {time:g} ms")
            if not 0 <= value < math.inf:
                raise CostError(f"{where} is {value:g} at {time:g} ms: give numbers of at least 0")

    def at(self, time: float, stream: str) -> float:
        return self.values[max(0, bisect_right(self.times, time) - 1)]

    def show(self, units: Unit) -> str:
        if self.path:
            return f"trace:{self.path}"
        pairs = zip(self.times, self.values, strict=True)
        return "steps:" + ",".join(f"{show_quantity(t, TIME)}/{show_quantity(v, units)}" for t, v in pairs)


@dataclass(frozen=True)
class RandomSteps:
    """A value drawn from a distribution, and drawn anew after `shortest` to `longest` ms (evenly drawn too).

    Attributes:
        shape: "normal" (mean, deviation; what falls below 0 counts as 0) or "uniform" (lowest, highest).
        seed: with the name of what it is read for, it settles every draw.

    Raises:
        CostError: numbers that make no distribution or no interval.
    """

    shape: str
    first: float
    second: float
    shortest: float
    longest: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in ("normal", "uniform"):
            raise CostError(f"distribution {self.shape!r}: give normal or uniform")
        if not all(0 <= value < math.inf for value in (self.first, self.second)):
            raise CostError(f"{self.shape}:{self.first:g},{self.second:g}: give two numbers of at least 0")
        if self.shape == "uniform" and self.first > self.second:
            raise CostError(f"uniform:{self.first:g},{self.second:g}: the lowest value comes first")
        if not 1 <= self.shortest <= self.longest < math.inf:
            raise CostError(
                f"redrawn every {self.shortest:g} to {self.longest:g} ms: give an interval of at least 1 ms, "
                "the shorter first"
            )

    def at(self, time: float, stream: str) -> float:
        random, ends, values = _draws(self, stream)
        while not ends or ends[-1] <= time:
            draw = random.gauss if self.shape == "normal" else random.uniform
            values.append(max(0.0, draw(self.first, self.second)))
            ends.append((ends[-1] if ends else 0.0) + random.uniform(self.shortest, self.longest))
        return values[bisect_right(ends, time)]

    def show(self, units: Unit) -> str:
        every = show_quantity(self.shortest, TIME)
        if self.longest != self.shortest:
            every += f"..{show_quantity(self.longest, TIME)}"
        seed = f"#{self.seed}" if self.seed else ""
        return f"{self.shape}:{show_quantity(self.first, units)},{show_quantity(self.second, units)}@{every}{seed}"


@lru_cache(maxsize=1024)
def _draws(redrawn: RandomSteps, stream: str) -> tuple[Random, list[float], list[float]]:
    """The draws of one stream as far as they were asked for: what draws more, when each ends, and its value."""
    return Random(f"{redrawn.seed} {stream}"), [], []


OverTime = Constant | Trace | RandomSteps


def raised(value: OverTime, ms: float) -> OverTime:
    """The value with `ms` added at all times. If something is added to draws, the first draw stands for all."""
    if isinstance(value, Trace):
        return Trace(value.times, tuple(each + ms for each in value.values))
    return Constant(value.at(0.0, "") + ms) if ms else value


def read_over_time(text: str, units: Unit) -> OverTime:
    """Reads any of the forms above. Raises CostError."""
    word, colon, rest = text.partition(":")
    if not colon:
        return Constant(read_quantity(text, units))
    if word == "trace":
        return read_trace(rest, units)
    if word == "steps":
        pairs = [_pair(pair, pair.partition("/")[0], pair.partition("/")[2], units) for pair in rest.split(",")]
        return Trace(tuple(time for time, _ in pairs), tuple(value for _, value in pairs))
    if word in ("normal", "uniform"):
        return _read_redrawn(word, rest, units)
    raise CostError(f"{word!r} is not known here; give a number, trace:FILE, steps:, normal: or uniform:")


def read_trace(path: str, units: Unit) -> Trace:
    """Reads a trace file: a time and a value a line, apart by blanks or a comma; # starts a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise CostError(f"trace {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CostError(f"trace {path}: not text") from None
    times, values = [], []
    for number, line in enumerate(lines, start=1):
        words = re.split(r"\s*,\s*|\s+", line.partition("#")[0].strip())
        if words == [""]:
            continue
        if len(words) != 2:
            raise CostError(f"trace {path}, line {number}: {line.strip()!r} is not a time and a value")
        try:
            time, value = _pair(line.strip(), words[0], words[1], units)
        except CostError as error:
            raise CostError(f"trace {path}, line {number}: {error}") from None
        times.append(time)
        values.append(value)
    return Trace(tuple(times), tuple(values), path)


def _pair(text: str, time: str, value: str, units: Unit) -> tuple[float, float]:
    if value.lower() in ("", "nan", "-"):
        raise CostError(f"{text!r} is a gap: each time needs its value")
    return read_quantity(time, TIME), read_quantity(value, units | ({"": 1.0} if units is TIME else {}))


def _read_redrawn(word: str, rest: str, units: Unit) -> RandomSteps:
    rest, _, seed = rest.partition("#")
    numbers, at, every = rest.partition("@")
    parts = numbers.split(",")
    if len(parts) != 2 or not at or (seed and not seed.isdecimal()):
        raise CostError(f"{word}:{rest}: write it like {_EXAMPLES[word]}")
    shortest, dots, longest = every.partition("..")
    unit = re.sub(r"^[-0-9.e]*", "", longest)
    if dots and re.fullmatch(r"[0-9.]+", shortest):
        shortest += unit  # 50..100ms
    low = read_quantity(shortest, TIME)
    high = read_quantity(longest, TIME) if dots else low
    first, second = (read_quantity(part, units) for part in parts)
    return RandomSteps(word, first, second, low, high, int(seed or 0))


_EXAMPLES: dict[str, str] = {
    "normal": "normal:30ms,10ms@50..100ms",
    "uniform": "uniform:10ms,50ms@50..100ms",
}


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
