"""A drawn chart: SVG that is a file by itself, or part of a page that holds the charts' style once.

str(figure)          a whole file: its own style, light and dark background, no font or file besides itself
figure.inline()      for a page whose style holds `STYLE`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from penstock.draw.charts.hues import styles

FONT = '-apple-system,BlinkMacSystemFont,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
STYLE = f"""
.pc{{font-family:{FONT};font-size:12px}}
.pc text{{font-variant-numeric:tabular-nums}}
.pc-page{{fill:#fff;stroke:#dfe4ea}}.pc-ground{{fill:#fff}}.pc-grid{{stroke:#e3e8ee;fill:none}}
.pc-axis{{stroke:#98a2b0;fill:none}}
.pc-title{{font-size:15px;font-weight:650;fill:#16202c}}.pc-text{{fill:#16202c}}.pc-soft{{fill:#5f6a78}}
.pc-mid{{text-anchor:middle}}.pc-end{{text-anchor:end}}.pc-bold{{font-weight:600}}.pc-small{{font-size:11px}}
.pc-line{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}
.pc-dashed{{stroke-dasharray:6 4}}.pc-dotted{{stroke-dasharray:1.5 4}}
.pc-level{{stroke:#5f6a78;stroke-dasharray:4 3;fill:none}}.pc-strong{{stroke:#16202c;stroke-width:2;fill:none}}
.pc-whisker{{stroke:#16202c;stroke-width:1.2;fill:none}}.pc-halo{{stroke:#fff;stroke-width:1}}
.pc-pill{{font-size:11px;font-weight:650;fill:#fff;text-anchor:middle}}.pc-dot{{fill-opacity:.55}}
.pc-over{{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}}
.pc-band{{fill-opacity:.16;stroke:none}}
@media(prefers-color-scheme:dark){{.pc-page{{fill:#0f151d;stroke:#28313c}}.pc-ground{{fill:#0f151d}}
.pc-grid{{stroke:#26303b}}
.pc-axis{{stroke:#6c7887}}.pc-title,.pc-text{{fill:#eef2f7}}.pc-soft{{fill:#9aa6b4}}.pc-level{{stroke:#9aa6b4}}
.pc-strong,.pc-whisker{{stroke:#eef2f7}}.pc-halo{{stroke:#0f151d}}.pc-pill{{fill:#0f151d}}
.pc-over{{stroke:#0f151d}}}}
""" + styles()
"""Style that every chart needs, once per page."""

_UNIT = re.compile(r"(\d) (ms|s|MB|GB)\b")
_WIDE = {**dict.fromkeys("ijl.,:;'|!", 0.26), **dict.fromkeys("ftr()[]- /", 0.34), **dict.fromkeys("mwMW@%→", 0.86)}


@dataclass(frozen=True)
class Figure:
    """A drawn chart.

    Attributes:
        body: SVG elements.
        width, height: pixels.
        label: what it shows, in words, for those who do not see it.
        comment: for a file's first line, such as the command that made it.
        plot: the top and the bottom of the area between the axes; None if there is no such area.
    """

    body: tuple[str, ...]
    width: float
    height: float
    label: str
    comment: str | None = None
    plot: tuple[float, float] | None = None

    def __str__(self) -> str:
        first = f"<!-- {self.comment.replace('--', '- -')} -->\n" if self.comment else ""
        page = (
            f'<rect class="pc-page" x="0.5" y="0.5" width="{num(self.width - 1)}" '
            f'height="{num(self.height - 1)}" rx="8"/>'
        )
        return first + self._svg(f"<style>{STYLE}</style>\n{page}") + "\n"

    def inline(self) -> str:
        """The chart for a page whose style holds `STYLE`; it takes the page's width, but no more than its own."""
        return self._svg("", f' style="width:100%;max-width:{num(self.width)}px;height:auto"')

    def _svg(self, before: str, more: str = "") -> str:
        wide, high = num(self.width), num(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pc" width="{wide}" height="{high}" '
            f'viewBox="0 0 {wide} {high}" role="img" aria-label={quoted(self.label)}{more}>'
        )
        return "\n".join(part for part in (head, before, *self.body, "</svg>") if part)


def num(value: float) -> str:
    """A coordinate with two decimals and no padding."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def quoted(value: str) -> str:
    """A text as an attribute's value, with its quotes."""
    return '"' + escape(value, {'"': "&quot;", "\n": " "}) + '"'


def text(x: float, y: float, shown: str, *names: str, title: str = "", more: str = "") -> str:
    """A text element; `names` are style names without their prefix."""
    style = " ".join(f"pc-{name}" for name in names)
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    return f'<text class="{style}" x="{num(x)}" y="{num(y)}"{more}>{tooltip}{escape(shown)}</text>'


def text_width(shown: str, size: float = 12.0) -> float:
    """The approximate width of a text in pixels, rather too wide than too narrow."""
    widths = (_WIDE.get(c, 0.7 if c.isupper() else 0.56) for c in shown)
    return size * sum(widths)


def wrapped(shown: str, width: float, size: float = 12.0) -> list[str]:
    """A text in lines no wider than `width`, if its words are short enough."""
    lines: list[str] = []
    for word in _UNIT.sub("\\1\u00a0\\2", shown).split(" "):
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


def spread_out(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Positions as near as possible to those wanted, at least `apart` from each other, between `low` and `high`."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    found = [0.0] * len(wanted)
    groups: list[list[int]] = []

    def middle(group: list[int]) -> float:
        free = sum(wanted[each] - place * apart for place, each in enumerate(group)) / len(group)
        return max(low, min(free, high - (len(group) - 1) * apart))

    for each in order:
        groups.append([each])
        while len(groups) > 1 and middle(groups[-2]) + len(groups[-2]) * apart > middle(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    for group in groups:
        for place, each in enumerate(group):
            found[each] = middle(group) + place * apart
    return found
