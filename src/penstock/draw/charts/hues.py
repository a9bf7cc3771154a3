"""Colours of a chart's series, on a light and on a dark background, and of a heat map's steps.

The hues are those of the drawings of schedules, in an order in which neighbours also differ in lightness. On a dark
background they are lighter. Text in a series' colour is darker, or lighter, than its line, so that it is readable.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.draw.palette import ink as on


@dataclass(frozen=True)
class Hue:
    """One series' colour, for lines and bars and for text, on a light and on a dark background."""

    light: str
    dark: str
    light_ink: str
    dark_ink: str


HUES = {
    "blue": Hue("#2f6db5", "#5b9be6", "#2a62a4", "#85b6f0"),
    "brick": Hue("#c4552d", "#e67a52", "#b04a25", "#f09575"),
    "green": Hue("#2ba587", "#35bd9b", "#13765d", "#54d3b3"),
    "amber": Hue("#eb9a2d", "#f0a945", "#925e0b", "#f5bb63"),
    "purple": Hue("#7c5fa8", "#a58bd3", "#6d5199", "#bda7e4"),
    "grey": Hue("#7a828e", "#98a2b0", "#5a636f", "#aeb8c4"),
    "navy": Hue("#1d4468", "#a9c9ec", "#1d4468", "#a9c9ec"),
}
"""By name, in the order in which series take them."""
NAMES = tuple(HUES)

STEPS_LIGHT = ("#eef1f5", "#f6e3bd", "#f3c878", "#eaa044", "#d97333", "#b54a28", "#86301f", "#561c18")
STEPS_DARK = ("#1c242e", "#3d2a22", "#63371f", "#8f4a22", "#bd6429", "#e08a3c", "#f2b668", "#fbe3b4")
"""A heat map's colours from none to most. Lightness only falls, or on a dark background only rises."""


def hue_of(name: str | None, place: int) -> str:
    """The name of a series' hue: as given, or the one of its place among the series."""
    return name if name in HUES else NAMES[place % len(NAMES)]


def styles() -> str:
    """CSS for all hues: `pc-l-` for strokes, `pc-f-` for fills, `pc-i-` for text, `pc-on-` for text on a fill, and
    `pc-h` for a heat map's steps."""

    def rules(dark: bool) -> str:
        out = []
        for name, hue in HUES.items():
            color, ink = (hue.dark, hue.dark_ink) if dark else (hue.light, hue.light_ink)
            out.append(
                f".pc-l-{name}{{stroke:{color}}}.pc-f-{name}{{fill:{color}}}.pc-i-{name}{{fill:{ink}}}"
                f".pc-on-{name}{{fill:{on(color)}}}"
            )
        steps = STEPS_DARK if dark else STEPS_LIGHT
        out.append("".join(f".pc-h{number}{{fill:{color}}}" for number, color in enumerate(steps)))
        return "\n".join(out)

    return f"{rules(False)}\n@media(prefers-color-scheme:dark){{\n{rules(True)}\n}}\n"
