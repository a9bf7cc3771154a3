"""Numbers that change over time: a constant, a trace, or draws from a distribution. Pure: the same at every reading.

30ms                            always
trace:wan.txt                   lines of TIME VALUE; each value holds until the next time
steps:0ms/13ms,500ms/40ms       the same, written out
normal:30ms,10ms@50ms..100ms#7  mean 30, deviation 10, drawn anew after 50 to 100 ms; 7 seeds the draws
uniform:10ms,50ms@1s            from 10 to 50, drawn anew every second
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

from penstock.cost.errors import CostError

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
