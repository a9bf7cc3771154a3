"""Pictures of schedules and timelines: SVG, self-contained HTML, colour in the terminal.

`save_picture` writes a picture or a trace to a file, its form chosen by the file's ending.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.draw.html import to_html
from penstock.draw.panel import Drawable, panels
from penstock.draw.svg import to_svg
from penstock.draw.terminal import to_terminal
from penstock.formats import save as save_schedule
from penstock.formats.files import path_of, write_whole
from penstock.formats.native import ENDINGS
from penstock.formats.perfetto import to_perfetto
from penstock.schedule import Schedule, ScheduleError, to_text
from penstock.simulation import Timeline

__all__ = ["save", "save_picture", "to_html", "to_svg", "to_terminal"]

PICTURES = (".svg", ".html")

Given = Drawable | Sequence[Drawable]


def save_picture(drawn: Given, path: str | Path) -> None:
    """Writes schedules or timelines, whole or not at all.

        .svg                one picture, stacked on one time axis
        .html               a page to zoom and ask, which loads nothing
        .txt                a schedule's grid (parses back), or bars of letters for a timeline
        .json .json.gz      a trace for ui.perfetto.dev and chrome://tracing

    Args:
        drawn: a schedule, a timeline, or a list of them.
        path: of the file; its ending says what is written.

    Raises:
        ScheduleError: another ending, nothing to draw, a schedule that cannot run, or no such folder.

    Examples:
        >>> import penstock as ps
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> ps.draw.save_picture(ps.build("1f1b", 2, 4), folder / "1f1b.svg")
        >>> (folder / "1f1b.svg").read_text()[:4]
        '<svg'
    """
    path = path_of(path)
    writer = next((write for ending, write in WRITERS.items() if path.name.lower().endswith(ending)), None)
    if writer is None:
        raise ScheduleError(
            f"{path}: pictures are written as .svg, .html or .txt, traces as .json or .json.gz", rule="file"
        )
    write_whole(path, writer(drawn))


def save(drawn: Schedule | Timeline, path: str | Path) -> None:
    """Writes a schedule as .json, .txt or .csv, which `ps.load` reads, or its picture; a timeline as `save_picture`
    does. A trace is of a timeline.

    Raises:
        ScheduleError: as `save_picture`.
    """
    if isinstance(drawn, Schedule) and path_of(path).suffix in ENDINGS:
        save_schedule(drawn, path)
    elif isinstance(drawn, Schedule) and path_of(path).suffix.lower() not in PICTURES:
        raise ScheduleError(
            f"{path}: schedules are written as .json, .txt or .csv, and their pictures as .svg or .html", rule="file"
        )
    else:
        save_picture(drawn, path)


def _text(drawn: Given) -> bytes:
    given = [drawn] if isinstance(drawn, Schedule | Timeline) else list(drawn)
    texts = [to_text(one) if isinstance(one, Schedule) else to_terminal(one, color=False, width=160) for one in given]
    return ("\n\n".join(texts) + "\n").encode()


def _trace(drawn: Given) -> bytes:
    return to_perfetto([panel.timeline for panel in panels(drawn)])


WRITERS: dict[str, Callable[[Given], bytes]] = {
    ".svg": lambda drawn: to_svg(drawn).encode(),
    ".html": lambda drawn: to_html(drawn).encode(),
    ".txt": _text,
    ".json": _trace,
    ".json.gz": lambda drawn: gzip.compress(_trace(drawn), mtime=0),
}
