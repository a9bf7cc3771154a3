"""Colours of the op kinds. Colour-blind readers can tell them apart, and they differ in lightness in a grey print.

The hue shows the kind. If a rank hosts several stages, later ones are lighter.
"""

from __future__ import annotations

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
