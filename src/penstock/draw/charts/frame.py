"""The layout of a chart: title, note and legend above, the plot with its axes, and what is written to the right.

title
note
[] legend  [] legend
label of the upright axis
 20 |------------------------ direct
 10 |------------------------ labels
  0 +-----|------|------|----
          label of the level axis
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.draw.charts.figure import num, text, text_width, wrapped

PAD = 16.0
PHONE = 480
"""Charts narrower than this (pixels) name their series above, as there is no room beside them."""
SHAPES = ("circle", "square", "up", "diamond", "down", "cross")


@dataclass(frozen=True)
class LegendEntry:
    """One line of a legend: a swatch in a hue, and a name."""

    name: str
    hue: str
    swatch: Literal["line", "dashed", "dotted", "box", "shape", "stroke", "level"] = "box"
    shape: int = 0


def head(
    title: str, note: str, legend: Sequence[LegendEntry], width: float, top: float = PAD
) -> tuple[list[str], float]:
    """Title, note and legend. Returns the y below them."""
    out: list[str] = []
    y = top if title or note or legend else 2.0
    if title:
        for line in wrapped(title, width - 2 * PAD, 15):
            y += 15
            out.append(text(PAD, y, line, "title"))
            y += 4
    if note:
        for line in wrapped(note, width - 2 * PAD):
            y += 13
            out.append(text(PAD, y, line, "soft"))
            y += 3
    if legend:
        y += 6 if out else 0
        drawn, y = key(legend, width, y)
        out += drawn
    return out, y


def key(entries: Sequence[LegendEntry], width: float, top: float) -> tuple[list[str], float]:
    """A legend in rows. Returns the y below it."""
    out: list[str] = []
    x, y = PAD, top
    for entry in entries:
        room = 26 + text_width(entry.name) + 16
        if x > PAD and x + room - 16 > width - PAD:
            x, y = PAD, y + 18
        out += [swatch(entry, x, y + 8), text(x + 26, y + 12, entry.name, "text")]
        x += room
    return out, y + 18


def swatch(entry: LegendEntry, x: float, y: float) -> str:
    """A sample of how a series is drawn, 20 pixels wide, around the height `y`."""
    if entry.swatch == "box":
        return f'<rect class="pc-f-{entry.hue}" x="{num(x + 3)}" y="{num(y - 6)}" width="14" height="12" rx="2"/>'
    if entry.swatch == "shape":
        return shape(entry.shape, x + 10, y, 4.5, f"pc-f-{entry.hue}")
    if entry.swatch == "stroke":
        return f'<path class="pc-strong" d="M{num(x)} {num(y)}h20"/>'
    if entry.swatch == "level":
        return f'<path class="pc-level" d="M{num(x)} {num(y)}h20"/>'
    more = "" if entry.swatch == "line" else f" pc-{entry.swatch}"
    return f'<path class="pc-line pc-l-{entry.hue}{more}" d="M{num(x)} {num(y)}h20"/>'


def shape(number: int, x: float, y: float, r: float, style: str, title: str = "") -> str:
    """A point's shape by number. Series differ in shape as well as in colour."""
    inner = f"<title>{title}</title>" if title else ""
    kind = SHAPES[number % len(SHAPES)]
    if kind == "circle":
        return f'<circle class="{style}" cx="{num(x)}" cy="{num(y)}" r="{num(r)}">{inner}</circle>'
    if kind == "square":
        s, side = 0.88 * r, num(1.76 * r)
        path = f"M{num(x - s)} {num(y - s)}h{side}v{side}h-{side}z"
        return f'<path class="{style}" d="{path}">{inner}</path>'
    corners = {
        "up": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
        "down": ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
        "diamond": ((0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)),
        "cross": ((-1, -0.4), (-0.4, -1), (0, -0.6), (0.4, -1), (1, -0.4), (0.6, 0), (1, 0.4), (0.4, 1), (0, 0.6),
                  (-0.4, 1), (-1, 0.4), (-0.6, 0)),
    }[kind]  # fmt: skip
    path = "L".join(f"{num(x + r * dx)} {num(y + r * dy)}" for dx, dy in corners)
    return f'<path class="{style}" d="M{path}z">{inner}</path>'
