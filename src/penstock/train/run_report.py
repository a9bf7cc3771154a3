"""What end reports of all devices have in common: how the run went, notices and files, as JSON and as text.

A run that was measured has a summary of its records too: which links were slow and when, what was decided, what that
saved. `penstock report` tells the same at length (`penstock.report.from_logs`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

from penstock.control import ControlError
from penstock.draw import save_picture
from penstock.formats import save as save_schedule
from penstock.report import RunStory
from penstock.report.from_logs import read_story
from penstock.report.run_record import strict_json
from penstock.report.words import headline, times
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.folder import RunFolder, write_whole
from penstock.train.run_settings import RunSettings

CONTROL, ITERATIONS = "control.jsonl", "iterations.jsonl"
LATEST = 16
"""Iterations at the end whose messages give a link's final delay. As many are simulated, so it ends at once."""


@dataclass(frozen=True)
class AdaptationSummary:
    """What is known at the end of a run that was measured. Iterations count from 1.

    Attributes:
        headline: the run in one sentence.
        links: direction, like 6>7, to the median delay of its messages in the latest iterations (ms).
        spells: times in which a link was late: link, first and last iteration, ms.
        decisions: number, the iteration after which it was made and the first that ran it, action, reason, simulated
            ms before and after, measured ms before and after, ms saved.
        suspected, false: alarms, and how many of them led to nothing.
        lost, saved: ms that late links would have cost if nothing had been changed, and how much of it was saved;
            None if that is not known.
    """

    headline: str
    links: Mapping[str, float]
    spells: tuple[dict[str, Any], ...]
    decisions: tuple[dict[str, Any], ...]
    suspected: int
    false: int
    lost: float | None
    saved: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> AdaptationSummary:
        return cls(**value | {name: tuple(value[name]) for name in ("spells", "decisions")})


def read_adaptation(folder: Path) -> AdaptationSummary | None:
    """Reads the records in a run's folder; None if there are none, or none has an iteration."""
    try:
        lines = {name: (folder / name).read_text(encoding="utf-8").splitlines() for name in (CONTROL, ITERATIONS)}
        story = read_story(lines[CONTROL], name=folder.name, iterations=lines[ITERATIONS], most=LATEST)
    except (OSError, ControlError):
        return None
    return _of(story)


def _of(story: RunStory) -> AdaptationSummary:
    delays: dict[str, float] = {}
    for place, (a, b) in enumerate(story.links):
        known = [row.delays[place] for row in story.iterations]
        if row := [ms for ms in known if ms is not None][-LATEST:]:
            delays[f"{a}>{b}"] = median(row)
    spells = (
        {"link": f"{a}:{b}", "first": spell.first + 1, "last": spell.last + 1, "ms": spell.ms, "use": spell.use}
        for spell in story.spells
        for a, b in (spell.link,)
    )
    decisions = (
        asdict(each) | {"made": each.made + 1, "first": None if each.first is None else each.first + 1}
        for each in story.decisions
    )
    return AdaptationSummary(
        headline(story),
        delays,
        tuple(spells),
        tuple(decisions),
        story.alarms.suspected,
        story.alarms.false,
        story.lost,
        story.saved,
    )


@dataclass(frozen=True, kw_only=True)
class RunReport(ABC):
    """The result of a run.

    Attributes:
        steps: how many ran. seconds: for all of them, measured. interrupted: a signal ended it early.
        steered: links, decisions and what they saved; None if nothing was recorded.
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
    steered: AdaptationSummary | None = None
    said_before: int = 0

    def to_json(self) -> dict[str, Any]:
        value = asdict(self) | {"steered": None if self.steered is None else self.steered.to_json()}
        found: dict[str, Any] = strict_json(value)
        return found

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        steered = value.get("steered")
        return cls(**{**value, "steered": None if steered is None else AdaptationSummary.from_json(steered)})

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
            rows.append(("links", self.steered.headline))
        rows += [("note", notice) for notice in self.notices[self.said_before :]]
        rows.append(("wrote", f"{folder}, with report.json; penstock report {folder} makes a page of it"))
        if self.interrupted and "checkpoints" in self.files:
            rows.append(("go on", f"penstock train --resume {folder}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write_plan(folder: RunFolder, settings: RunSettings, schedule: Schedule) -> None:
    """Writes what was asked for into a run's folder. The report of an earlier part of the run goes."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.report.unlink(missing_ok=True)
    write_whole(folder.settings, settings.to_json() + "\n")
    save_schedule(schedule, folder.file("schedule.txt"))
    save_picture(schedule, folder.file("schedule.svg"))
