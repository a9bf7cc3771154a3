"""Times as short text: three digits of each, most of them in one character.

    30.0 30.2 29.9 61.0   ->   an absolute number, then steps: +2 -3, and an absolute number again

A level is a number of three digits: 0, then 0.000100, 0.000101 ... 0.000999, 0.00100 and so on up to 99,900. A step
of up to 45 levels from the number before is one character; what is further is a mark and the level in two. So a
controller's log keeps every message's time in a twentieth of the space that a line of JSON each would take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.control.errors import ControlError

_DIGITS = "".join(chr(code) for code in range(33, 127) if chr(code) not in '"\\~')
"""91 characters that JSON leaves as they are."""
_MARK = "~"
_BASE = len(_DIGITS)
_REACH = _BASE // 2
_A_DECADE = 900
_FIRST = -4
"""The power of ten of the smallest number above 0."""
_LAST_LEVEL = 9 * _A_DECADE


def rounded(value: float) -> float:
    """The number of three digits next to `value`, which is what the text keeps."""
    return _value(_level(value))


def pack(values: Sequence[float]) -> str:
    """Text for numbers of at least 0. What is below 0.0001 is 0, what is above 99,900 is that."""
    text: list[str] = []
    before = -_BASE
    for value in values:
        level = _level(value)
        step = level - before
        if -_REACH <= step <= _REACH:
            text.append(_DIGITS[step + _REACH])
        else:
            text.append(_MARK + _DIGITS[level // _BASE] + _DIGITS[level % _BASE])
        before = level
    return "".join(text)


def unpack(text: str) -> tuple[float, ...]:
    """Reads `pack`. Raises ControlError for any other text."""
    levels: list[int] = []
    at = 0
    try:
        while at < len(text):
            if text[at] == _MARK:
                level = _DIGITS.index(text[at + 1]) * _BASE + _DIGITS.index(text[at + 2])
                at += 3
            else:
                level = levels[-1] + _DIGITS.index(text[at]) - _REACH
                at += 1
            if not 0 <= level <= _LAST_LEVEL:
                raise ValueError(level)
            levels.append(level)
    except (IndexError, ValueError):
        raise ControlError(f"{text[:40]!r} are no packed times") from None
    return tuple(map(_value, levels))


def _level(value: float) -> int:
    if value < 10.0**_FIRST:
        return 0
    power = math.floor(math.log10(value))
    digits = round(value / 10.0 ** (power - 2))
    if digits < 100:  # log10 was rounded up
        power, digits = power - 1, round(value / 10.0 ** (power - 3))
    return min(1 + (power - _FIRST) * _A_DECADE + digits - 100, _LAST_LEVEL)


def _value(level: int) -> float:
    if level == 0:
        return 0.0
    power, digits = divmod(level - 1, _A_DECADE)
    # Through text, so that it is the float nearest to the three digits.
    return float(f"{digits + 100}e{power + _FIRST - 2}")
