"""The report of a run: the few lines that it ends with, and report.json. Runs that train and emulated runs share it.

A run whose links were measured also sums up what became of them: which links were slow and when, what was decided,
and what that saved. `penstock report` tells the same at length (`penstock.report.from_logs`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from penstock.control import ControlError
from penstock.draw import save_picture
from penstock.formats import save as save_schedule
from penstock.report.from_logs import read_story
from penstock.report.run_story import strict_json
from penstock.report.words import headline, times
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.folder import RunFolder, write_whole

CONTROL, ITERATIONS = "control.jsonl", "iterations.jsonl"
LATEST = 16
"""Iterations at the end whose messages give a link's final delay. As many are simulated, so it ends at once."""


def read_adaptation(folder: Path, before: int = 0) -> dict[str, Any] | None:
    """What the records in a run's folder say at its end; None if there are none, or none has an iteration.

    Args:
        before: the iterations of earlier parts of the run, which its records do not have.

    Returns:
        A JSON object with iterations that count from 1, those of earlier parts included: the run in one sentence
        (`headline`); the first one on record (`first`); the median delay (ms) of each direction's latest messages, as
        in {"6>7": 60.1} (`links`); the times in which a link was late (`spells`); what was decided, and the ms
        measured before and after it (`decisions`); the ms that late links would have cost if nothing had changed,
        and how much of it was saved, or null if that cannot be told (`lost`, `saved`).
    """
    try:
        lines = {name: (folder / name).read_text(encoding="utf-8").splitlines() for name in (CONTROL, ITERATIONS)}
        story = read_story(lines[CONTROL], name="", iterations=lines[ITERATIONS], most=LATEST, first=before + 1)
    except (OSError, ControlError):
        return None
    delays: dict[str, float] = {}
    for a, b in story.links:
        known = [row.delays[a, b] for row in story.iterations if (a, b) in row.delays]
        delays[f"{a}>{b}"] = median(known[-LATEST:])
    value = story.to_json()
    for each in value["spells"]:
        each["link"] = "{}:{}".format(*each["link"])
    found = {"headline": headline(story), "links": delays, "lost": story.lost, "saved": story.saved}
    return found | {"first": before + 1, "spells": value["spells"], "decisions": value["decisions"]}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a run.

    Attributes:
        folder: the run's folder.
        schedule: the name of the schedule. dispatch: how ranks chose their ops.
        num_ranks: ranks of the pipeline.
        steps: the step that the run has reached. first_step: the step at which this part of the run began, from 0; a
            part that does not resume another begins at 0. seconds: of all steps of this part, measured.
        interrupted: a signal ended the run early.
        notices: what the user should know. said_before: how many of them, the first ones, were printed when the run
            began.
        steered: see `read_adaptation`; None if nothing was recorded.
        details: the values of report.json that only this kind of run has.
        more_files: files in addition to those of every run, by what they are.
        noun: the name of a step. pace: how fast the run was, in words.
        rows: further lines for people, each with its heading.
    """

    folder: RunFolder
    schedule: str
    dispatch: str
    num_ranks: int
    steps: int
    interrupted: bool
    seconds: float
    notices: Sequence[str]
    said_before: int
    steered: Mapping[str, Any] | None
    details: Mapping[str, Any]
    pace: str
    rows: Sequence[tuple[str, str]]
    noun: str = "step"
    first_step: int = 0
    more_files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The whole report. JSON has no nan, so null stands for a number that is not finite."""
        names = "schedule", "dispatch", "num_ranks", "steps", "interrupted", "seconds", "notices", "said_before"
        files = {
            "schedule": str(self.folder.file("schedule.svg")),
            "timeline": str(self.folder.file("timeline.html")),
            "metrics": str(self.folder.metrics),
            **self.more_files,
        }
        common = {name: getattr(self, name) for name in (*names, "first_step", "steered")}
        return dict(strict_json({**common, "files": files, **self.details}))

    def to_text(self) -> str:
        """The few lines that a run ends with. Everything else is in report.json, and on the run's page."""
        ended, folder = "interrupted after " if self.interrupted else "", self.folder.path
        num = self.steps - self.first_step
        which = f" ({self.first_step + 1} to {self.steps})" if 0 < num < self.steps else ""
        ran = f"{ended}{times(num or self.steps, self.noun)}{which} of {self.schedule}, {self.dispatch}"
        rows = [("run", f"{ran}, on {times(self.num_ranks, 'rank')}: {self.pace}"), *self.rows]
        if self.steered is not None:
            rows.append(("links", self.steered["headline"]))
        rows += [("note", notice) for notice in self.notices[self.said_before :]]
        rows.append(("wrote", f"{folder}, with report.json; penstock report {folder} makes a page of it"))
        if self.interrupted and "checkpoints" in self.more_files:
            rows.append(("go on", f"penstock train --resume {folder}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)

    def write(self, pictures: Sequence[Timeline]) -> None:
        """Writes it into the run's folder, together with a simulated and a measured step."""
        for name in ("timeline.html", "timeline.json"):
            save_picture(pictures, self.folder.file(name))
        write_whole(self.folder.report, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    def show(self, as_json: bool) -> None:
        """Prints it, for people or as one JSON object."""
        try:
            print(json.dumps(self.to_json(), allow_nan=False) if as_json else "\n" + self.to_text(), flush=True)
        except BrokenPipeError:  # the reader of our output, like `head`, has left; report.json has all
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_plan(folder: RunFolder, settings: str, schedule: Schedule) -> None:
    """Writes what was asked for into a run's folder: settings as JSON, and the schedule. The report of an earlier
    part of the run goes.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.report.unlink(missing_ok=True)
    write_whole(folder.settings, settings + "\n")
    save_schedule(schedule, folder.file("schedule.txt"))
    save_picture(schedule, folder.file("schedule.svg"))
