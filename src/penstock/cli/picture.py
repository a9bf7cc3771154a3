"""`--out FILE`: a picture, a trace or a schedule file, by the ending."""

from __future__ import annotations

from pathlib import Path

from penstock.draw.files import save_picture
from penstock.formats import save as save_schedule
from penstock.formats.files import ENDINGS
from penstock.schedule import Schedule
from penstock.simulation import Timeline


def save_planned(schedule: Schedule, timeline: Timeline, path: str) -> None:
    """Writes what a search found: a schedule file as such, all else as a picture over the costs of the search."""
    save(schedule if Path(path).suffix in ENDINGS else timeline, path)


def save(drawn: Schedule | Timeline, path: str) -> None:
    """Writes a schedule as .json, .txt or .csv into a file of its own, all else as a picture."""
    if isinstance(drawn, Schedule) and Path(path).suffix in ENDINGS:
        save_schedule(drawn, path)
    else:
        save_picture(drawn, path)
