"""How pictures look: the colours of op kinds, short numbers, ticks at round values, and the room that texts take.

Colour-blind readers can tell the colours apart, and they differ in lightness in a grey print. The hue shows the kind.
If a rank hosts several stages, later ones are lighter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

KINDS = {
    "F": ("forward", "#2f6db5"),
    "R": ("recompute", "#1d4468"),
    "B": ("backward", "#c4552d"),
    "I": ("input gradient", "#eb9a2d"),
    "W": ("weight gradient", "#2ba587"),
    "U": ("update", "#7c5fa8"),
    "GIVE": ("gradient so far", "#3f7f93"),
    "PREDICT": ("tentative update", "#a05a8c"),
}
OTHER = "#7a828e"
LIGHT_INK, DARK_INK = "#ffffff", "#16202c"
LIGHTEST = 0.56


def kind_name(kind: str) -> str:
    """The kind in words; a registered kind is its own name."""
    return KINDS[kind][0] if kind in KINDS else kind


def kind_label(kind: str) -> str:
    """The kind for a legend: its letter and its name."""
    return f"{kind} {KINDS[kind][0]}" if kind in KINDS else kind


def kind_order(kinds: Iterable[str]) -> list[str]:
    """The kinds in the order of a legend: ours first, then registered ones by name."""
    known = list(KINDS)
    return sorted(set(kinds), key=lambda k: (known.index(k) if k in KINDS else len(known), k))


def shade(kind: str, chunk: int = 0, num_chunks: int = 1) -> str:
    """The colour of an op of the rank's `chunk`-th stage, as #rrggbb."""
    base = rgb(KINDS[kind][1] if kind in KINDS else OTHER)
    share = LIGHTEST * chunk / max(num_chunks - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in base)


def ink(color: str) -> str:
    """The colour of text that reads best on `color`."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return LIGHT_INK if 1.05 / (luminance + 0.05) >= 4.0 else DARK_INK


def rgb(color: str) -> tuple[int, int, int]:
    """`#rrggbb` as numbers."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


_UNIT = re.compile(r"(\d) (ms|s|MB|GB)\b")
_WIDE = {**dict.fromkeys("ijl.,:;'|!", 0.26), **dict.fromkeys("ftr()[]- /", 0.34), **dict.fromkeys("mwMW@%→", 0.86)}


def tick_step(length: float, most: int) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that cuts `length` into at most `most` parts."""
    if length <= 0 or most < 1:
        return 1.0
    raw = length / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= raw * (1 - 1e-9)), 10 * power)


def ticks(length: float, most: int) -> list[float]:
    """Round times from 0 to `length`."""
    step = tick_step(length, most)
    return [k * step for k in range(math.floor(length / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A time with three or four digits that matter: 2140, 33.5, 0.27."""
    size = abs(value)
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """A share as a percentage with one decimal; exact zeros and hundreds stay short."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def num(value: float) -> str:
    """A coordinate with two decimals and no padding."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def text_width(shown: str, size: float = 12.0) -> float:
    """The approximate width of a text in pixels, rather too wide than too narrow."""
    return size * sum(_WIDE.get(c, 0.7 if c.isupper() else 0.56) for c in shown)


def wrapped(shown: str, width: float, size: float = 12.0) -> list[str]:
    """A text in lines no wider than `width`, if its words are short enough."""
    lines: list[str] = []
    for word in _UNIT.sub("\\1\u00a0\\2", shown).split(" "):
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
