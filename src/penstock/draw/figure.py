"""A drawn chart, and the colours and elements of charts: SVG that is a file by itself, or part of a page.

str(figure)          a whole file: its own style, light and dark background, no font or file besides itself
figure.inline()      for a page whose style holds `STYLE`

The hues are those of the drawings of schedules, in an order in which neighbours also differ in lightness. On a dark
background they are lighter. Text in a series' colour is darker, or lighter, than its line, so that it is readable.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

from penstock.draw.palette import ink
from penstock.draw.scale import num

HUES = {
    "blue": ("#2f6db5", "#5b9be6", "#2a62a4", "#85b6f0"),
    "brick": ("#c4552d", "#e67a52", "#b04a25", "#f09575"),
    "green": ("#2ba587", "#35bd9b", "#13765d", "#54d3b3"),
    "amber": ("#eb9a2d", "#f0a945", "#925e0b", "#f5bb63"),
    "purple": ("#7c5fa8", "#a58bd3", "#6d5199", "#bda7e4"),
    "grey": ("#7a828e", "#98a2b0", "#5a636f", "#aeb8c4"),
    "navy": ("#1d4468", "#a9c9ec", "#1d4468", "#a9c9ec"),
}
"""The colour of lines and bars on a light and on a dark background, then that of text; in the order of series."""
STEPS = (
    ("#eef1f5", "#f6e3bd", "#f3c878", "#eaa044", "#d97333", "#b54a28", "#86301f", "#561c18"),
    ("#1c242e", "#3d2a22", "#63371f", "#8f4a22", "#bd6429", "#e08a3c", "#f2b668", "#fbe3b4"),
)
"""A heat map's colours from none to most, on a light and on a dark ground. Lightness only falls, or only rises."""
SHAPES = {
    "square": ((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)),
    "up": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    "diamond": ((0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)),
    "down": ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
}
"""The corners of points that are no circles. Series differ in shape as well as in colour."""


def _hue_styles(dark: bool) -> str:
    """CSS for all hues: `pc-l-` for strokes, `pc-f-` for fills, `pc-i-` for text, `pc-on-` for text on a fill."""
    rules = [
        f".pc-l-{name}{{stroke:{colors[dark]}}}.pc-f-{name}{{fill:{colors[dark]}}}.pc-i-{name}"
        f"{{fill:{colors[2 + dark]}}}.pc-on-{name}{{fill:{ink(colors[dark])}}}"
        for name, colors in HUES.items()
    ]
    steps = "".join(f".pc-h{number}{{fill:{color}}}" for number, color in enumerate(STEPS[dark]))
    return "\n".join([*rules, steps])


STYLE = f"""
.pc{{font-family:-apple-system,BlinkMacSystemFont,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:12px}}
.pc text{{font-variant-numeric:tabular-nums}}
.pc-page{{fill:#fff;stroke:#dfe4ea}}.pc-grid{{stroke:#e3e8ee;fill:none}}.pc-axis{{stroke:#98a2b0;fill:none}}
.pc-title{{font-size:15px;font-weight:650;fill:#16202c}}.pc-text{{fill:#16202c}}.pc-soft{{fill:#5f6a78}}
.pc-mid{{text-anchor:middle}}.pc-end{{text-anchor:end}}.pc-bold{{font-weight:600}}.pc-small{{font-size:11px}}
.pc-line{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}
.pc-dashed{{stroke-dasharray:6 4}}.pc-dotted{{stroke-dasharray:1.5 4}}
.pc-level{{stroke:#5f6a78;stroke-dasharray:4 3;fill:none}}.pc-strong{{stroke:#16202c;stroke-width:2;fill:none}}
.pc-whisker{{stroke:#16202c;stroke-width:1.2;fill:none}}.pc-halo{{stroke:#fff;stroke-width:1}}
.pc-pill{{font-size:11px;font-weight:650;fill:#fff;text-anchor:middle}}.pc-dot{{fill-opacity:.55}}
.pc-over{{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}}
{_hue_styles(False)}
@media(prefers-color-scheme:dark){{.pc-page{{fill:#0f151d;stroke:#28313c}}.pc-grid{{stroke:#26303b}}
.pc-axis{{stroke:#6c7887}}.pc-title,.pc-text{{fill:#eef2f7}}.pc-soft{{fill:#9aa6b4}}.pc-level{{stroke:#9aa6b4}}
.pc-strong,.pc-whisker{{stroke:#eef2f7}}.pc-halo{{stroke:#0f151d}}.pc-pill{{fill:#0f151d}}.pc-over{{stroke:#0f151d}}
{_hue_styles(True)}}}
"""
"""Style that every chart needs, once per page."""


@dataclass(frozen=True)
class Figure:
    """A drawn chart.

    Attributes:
        body: SVG elements.
        width, height: pixels.
        label: what it shows, in words, for those who do not see it.
        comment: for a file's first line, such as the command that made it.
        plot: the top and the bottom of the area between the axes.
    """

    body: tuple[str, ...]
    width: float
    height: float
    label: str
    comment: str | None
    plot: tuple[float, float]

    def __str__(self) -> str:
        first = f"<!-- {self.comment.replace('--', '- -')} -->\n" if self.comment else ""
        spot = f'x="0.5" y="0.5" width="{num(self.width - 1)}" height="{num(self.height - 1)}" rx="8"'
        return first + self._svg(f'<style>{STYLE}</style>\n<rect class="pc-page" {spot}/>') + "\n"

    def inline(self) -> str:
        """The chart for a page whose style holds `STYLE`; it takes the page's width, but no more than its own."""
        return self._svg("", f' style="width:100%;max-width:{num(self.width)}px;height:auto"')

    def _svg(self, before: str, more: str = "") -> str:
        wide, high = num(self.width), num(self.height)
        label = escape(self.label, {'"': "&quot;", "\n": " "})
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pc" width="{wide}" height="{high}" '
            f'viewBox="0 0 {wide} {high}" role="img" aria-label="{label}"{more}>'
        )
        return "\n".join(part for part in (head, before, *self.body, "</svg>") if part)


def text(x: float, y: float, shown: str, *names: str, more: str = "") -> str:
    """A text element; `names` are style names without their prefix."""
    style = " ".join(f"pc-{name}" for name in names)
    return f'<text class="{style}" x="{num(x)}" y="{num(y)}"{more}>{escape(shown)}</text>'


def box(style: str, left: float, top: float, width: float, height: float, title: str = "", round: float = 2) -> str:
    """A rectangle; its title is shown when the pointer is on it."""
    spot = f'x="{num(left)}" y="{num(top)}" width="{num(width)}" height="{num(height)}" rx="{num(round)}"'
    return f'<rect class="pc-{style}" {spot}{_closed("rect", title)}'


def path(style: str, d: str, title: str = "") -> str:
    """A path by its commands; names of styles have no prefix, and "solid" is none."""
    names = " ".join(f"pc-{name}" for name in style.split() if name != "solid")
    return f'<path class="{names}" d="{d}"{_closed("path", title)}'


def shape(number: int, x: float, y: float, r: float, style: str, title: str = "") -> str:
    """A point's shape by number, a circle first."""
    place = number % (len(SHAPES) + 1)
    if place == 0:
        names = " ".join(f"pc-{name}" for name in style.split())
        return f'<circle class="{names}" cx="{num(x)}" cy="{num(y)}" r="{num(r)}"{_closed("circle", title)}'
    corners = list(SHAPES.values())[place - 1]
    return path(style, "M" + "L".join(f"{num(x + r * dx)} {num(y + r * dy)}" for dx, dy in corners) + "z", title)


def _closed(element: str, title: str) -> str:
    """The end of an element, with its title where it has one."""
    return f"><title>{escape(title)}</title></{element}>" if title else "/>"
