"""Pictures of schedules and timelines, for `save` and for notebooks.

Drawing lies above the values that are drawn. So the package is asked for it when somebody wants a picture.
"""

from __future__ import annotations

import html
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.schedule.errors import ScheduleError

MOST_OPS = 4_000
"""Ops that a notebook still draws; more make a page that is slow to scroll."""


def drawing() -> Any:
    """The module `penstock.draw`."""
    return import_module("penstock").draw


def save(drawn: Any, path: str | Path) -> None:
    """Writes a schedule or a timeline, see `penstock.draw.save`."""
    drawing().save(drawn, path)


def save_either(schedule: Any, timeline: Any, path: str | Path) -> None:
    """Writes the timeline's picture where the ending is one of a picture (.svg, .html), else the schedule."""
    save(timeline if Path(path).suffix.lower() in (".svg", ".html") else schedule, path)


def shown(drawn: Any, num_ops: int) -> str:
    """Returns a picture for a notebook, or the short text of what is too large to draw or cannot run."""
    text = f"<pre>{html.escape(repr(drawn))}</pre>"
    if num_ops > MOST_OPS:
        return f"{text}<p>{num_ops} ops are too many to draw here; save it as .html</p>"
    try:
        return str(drawing().to_svg(drawn, inline=True))
    except ScheduleError as error:
        return f"{text}<p>It cannot be drawn: {html.escape(str(error).splitlines()[0])}</p>"
