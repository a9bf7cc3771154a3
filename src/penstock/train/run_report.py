"""What end reports of all devices have in common: how the run went, notices and files, as JSON and as text.

A run that was measured has a summary of its records too: which links were slow and when, what was decided, what that
saved. `penstock report` tells the same at length (`penstock.report.from_logs`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

from penstock.control import ControlError
from penstock.draw import save_picture
from penstock.formats import save as save_schedule
from penstock.report.from_logs import read_story
from penstock.report.run_record import strict_json
from penstock.report.words import headline, times
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.folder import RunFolder, write_whole

CONTROL, ITERATIONS = "control.jsonl", "iterations.jsonl"
LATEST = 16
"""Iterations at the end whose messages give a link's final delay. As many are simulated, so it ends at once."""


def read_adaptation(folder: Path) -> dict[str, Any] | None:
    """What the records in a run's folder say at its end; None if there are none, or none has an iteration.

    Returns:
        A JSON object with iterations that count from 1: the run in one sentence (`headline`); the median delay (ms)
        of each direction's latest messages, as in {"6>7": 60.1} (`links`); the times in which a link was late
        (`spells`); what was decided, and the ms measured before and after it (`decisions`); alarms, and how many led
        to nothing (`suspected`, `false`); the ms that late links would have cost if nothing had been changed, and how
        much of it was saved, or null if that cannot be told (`lost`, `saved`).
    """
    try:
        lines = {name: (folder / name).read_text(encoding="utf-8").splitlines() for name in (CONTROL, ITERATIONS)}
        story = read_story(lines[CONTROL], name=folder.name, iterations=lines[ITERATIONS], most=LATEST)
    except (OSError, ControlError):
        return None
    delays: dict[str, float] = {}
    for a, b in story.links:
        known = [row.delays[a, b] for row in story.iterations if (a, b) in row.delays]
        delays[f"{a}>{b}"] = median(known[-LATEST:])
    value = story.to_json()
    for each in value["spells"]:
        each |= {"link": "{}:{}".format(*each["link"]), "first": each["first"] + 1, "last": each["last"] + 1}
    for each in value["decisions"]:
        each |= {"made": each["made"] + 1, "first": None if each["first"] is None else each["first"] + 1}
    alarms = {name: value["alarms"][name] for name in ("suspected", "false")}
    found = {"headline": headline(story), "links": delays, **alarms, "lost": story.lost, "saved": story.saved}
    return found | {name: value[name] for name in ("spells", "decisions")}


@dataclass(frozen=True, kw_only=True)
class RunReport(ABC):
    """The result of a run.

    Attributes:
        steps: how many ran. seconds: for all of them, measured. interrupted: a signal ended it early.
        steered: see `read_adaptation`; None if nothing was recorded.
        notices: what the user should know. said_before: how many of them, the first ones, were known when it began
            and printed then.
        files: the files that it left, by what they are.
    """

    UNIT: ClassVar[str] = "step"

    schedule: str
    dispatch: str
    num_ranks: int
    steps: int
    interrupted: bool
    seconds: float
    notices: list[str]
    files: dict[str, str]
    steered: dict[str, Any] | None = None
    said_before: int = 0

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = strict_json(asdict(self))
        return found

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The report in a run's folder, None if there is none."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def write(self, folder: RunFolder, pictures: Sequence[Timeline]) -> None:
        """Writes it into a run's folder, together with a measured and a simulated step."""
        save_picture(pictures, folder.file("timeline.html"))
        save_picture(pictures, folder.file("timeline.json"))
        write_whole(folder.report, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    @property
    @abstractmethod
    def pace(self) -> str:
        """How fast it was, for the first line of its text."""

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """The lines of its text that follow the first, each with its heading: two or three."""

    def to_text(self) -> str:
        """The few lines that a run ends with. Everything else is in report.json, and on the run's page."""
        ended = "interrupted after " if self.interrupted else ""
        ran = f"{ended}{times(self.steps, self.UNIT)} of {self.schedule}, {self.dispatch}"
        folder = Path(self.files["metrics"]).parent
        rows = [("run", f"{ran}, on {times(self.num_ranks, 'rank')}: {self.pace}"), *self.rows()]
        if self.steered is not None:
            rows.append(("links", self.steered["headline"]))
        rows += [("note", notice) for notice in self.notices[self.said_before :]]
        rows.append(("wrote", f"{folder}, with report.json; penstock report {folder} makes a page of it"))
        if self.interrupted and "checkpoints" in self.files:
            rows.append(("go on", f"penstock train --resume {folder}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write_plan(folder: RunFolder, settings: str, schedule: Schedule) -> None:
    """Writes what was asked for into a run's folder: settings as JSON, and the schedule. The report of an earlier
    part of the run goes.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.report.unlink(missing_ok=True)
    write_whole(folder.settings, settings + "\n")
    save_schedule(schedule, folder.file("schedule.txt"))
    save_picture(schedule, folder.file("schedule.svg"))
