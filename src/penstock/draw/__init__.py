"""Pictures of schedules and timelines: SVG, self-contained HTML, colour in the terminal."""

from penstock.draw.files import save, save_picture
from penstock.draw.html import to_html
from penstock.draw.svg import to_svg
from penstock.draw.terminal import to_terminal

__all__ = ["save", "save_picture", "to_html", "to_svg", "to_terminal"]
