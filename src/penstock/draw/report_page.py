"""A self-contained HTML page of sections, tables and figures. It loads nothing and needs no script.

Every figure is drawn twice, once for a screen and once for a phone, and the page's style shows the one that fits.
Tables become a list of cards on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from penstock.draw.chart import STYLE, Figure, can_draw
from penstock.draw.html import filled, script_json
from penstock.draw.panel import Drawable
from penstock.draw.svg import to_svg

Item = TypeVar("Item")
WIDTH, NARROW = 1120, 360
"""Pixels of a figure on a screen and on a phone."""
WITHOUT_CHARTS = "A chart is here where matplotlib is installed: pip install matplotlib"


def sides(width: int, left: float = 84.0) -> dict[str, Any]:
    """The width of a chart, and the pixels between which it is drawn, so that one stands right above the other.

    Args:
        left: where charts begin on a screen; on a phone all begin at the same place.
    """
    return {"width": width, "left": left if width > NARROW else 58.0, "right": width - 16.0}


class PageNumber(NamedTuple):
    """A number that stands large at the top.

    Attributes:
        value, what: the number and what it is of.
        style: "lost", "saved" or nothing.
    """

    value: str
    what: str
    style: str = ""


def whole_page(
    *,
    title: str,
    name: str,
    headline: str,
    more: Iterable[str],
    numbers: Iterable[PageNumber],
    facts: Iterable[tuple[str, str]],
    sections: Iterable[str],
    data: Any,
    script: str = "",
) -> str:
    """The page.

    Args:
        title: of the window. name: of what it is about. headline: the one sentence. more: those that follow it.
        facts: names and values, small.
        sections: HTML, as `section` makes it. All other texts are escaped.
        data: what scripts and other programs may read, as JSON.
        script: JavaScript.
    """
    lines = files("penstock.draw")
    slots = {
        "title": escape(title),
        "name": escape(name),
        "css": STYLE + lines.joinpath("report_page.css").read_text(encoding="utf-8"),
        "js": script,
        "headline": escape(headline).replace("–", "\u2060–\u2060"),  # no line ends within a link's name
        "more": " ".join(escape(each) for each in more),
        "facts": "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts),
        "numbers": "".join(
            f'<div class="r-number {each.style}"><b>{escape(each.value)}</b><span>{escape(each.what)}</span></div>'
            for each in numbers
        ),
        "sections": "\n".join(sections),
        "data": script_json(data),
    }
    return filled(lines.joinpath("report_page.html").read_text(encoding="utf-8"), slots)


def section(title: str, body: str, note: str = "") -> str:
    """A part of the page; `body` and `note` are HTML."""
    said = f'<p class="r-note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>\n{body}\n{said}</section>"


def inline_section(title: str, draw: Callable[[int], Figure], note: str = "") -> str:
    """A part of the page that is a chart; `draw` makes it, given its width."""
    return section(title, inline(draw), note)


def inline(draw: Callable[[int], Figure], place: Callable[[Figure], str] = lambda figure: "") -> str:
    """A chart within the page; without matplotlib, how to get it.

    Args:
        draw: makes the chart, given its width.
        place: attributes of the chart's element.
    """
    if not can_draw():
        return f'<p class="r-note">{WITHOUT_CHARTS}</p>'
    drawn = {width: draw(width) for width in (WIDTH, NARROW)}
    return both(lambda width: drawn[width].inline(), lambda width: place(drawn[width]))


def both(draw: Callable[[int], str], more: Callable[[int], str] = lambda width: "") -> str:
    """A figure for a screen and for a phone.

    Args:
        draw: makes its SVG, given its width.
        more: attributes of the figure's element, given its width.
    """
    return "".join(
        f'<figure class="{name}"{more(width)}>{draw(width)}</figure>'
        for name, width in (("r-screen", WIDTH), ("r-phone", NARROW))
    )


def timelines(drawn: Sequence[Drawable], titles: Sequence[str]) -> str:
    """Timelines on one time axis."""
    return both(
        lambda width: to_svg(drawn, titles=titles, width=width, inline=True).replace(
            "<svg ", '<svg style="width:100%;height:auto" ', 1
        )
    )


def table(
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], str | None]],
    texts: Sequence[int] = (0,),
    label: str = "",
) -> str:
    """A table with a row for each item. Cells are escaped.

    On a phone each row is a card: its first cell, then a line for each of the others with its column's name.

    Args:
        columns: by its name, the text of each item's cell; None is shown as a dash.
        texts: the columns that are words; the others are numbers.
    """
    style = ["" if place in texts else ' class="r-n"' for place in range(len(columns))]
    top = "".join(f'<th scope="col"{each}>{escape(name)}</th>' for name, each in zip(columns, style, strict=True))
    rows = []
    for item in items:
        cells = []
        for (name, text), each in zip(columns.items(), style, strict=True):
            said = text(item)
            cells.append(f'<td{each} data-label="{escape(name)}">{escape("–" if said is None else said)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body, named = "\n".join(rows), f' aria-label="{escape(label)}"' if label else ""
    return f'<div class="r-wide"><table{named}><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def maybe(value: float | None, show: Callable[[float], str]) -> str | None:
    """A number as text; None if there is none."""
    return None if value is None else show(value)
