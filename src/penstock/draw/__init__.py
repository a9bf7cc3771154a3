"""Pictures of schedules and timelines: SVG, self-contained HTML, colour in the terminal."""

from penstock.draw.svg import to_svg

__all__ = ["to_svg"]
