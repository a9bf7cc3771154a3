"""What end reports of all devices have in common: how the run went, notices and files, as JSON and as text."""

from __future__ import annotations

import json
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.draw import save_picture
from penstock.formats import save as save_schedule
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.train.adaptation_summary import AdaptationSummary
from penstock.train.folder import RunFolder, write_whole
from penstock.train.run_settings import RunSettings

WIDTH = 100
"""Width to which notes are wrapped."""


PAGE = "page"
"""The one of a report's files that does not exist yet: how to write the page on a run that adapted."""


@dataclass(frozen=True, kw_only=True)
class RunReport(ABC):
    """The result of a run.

    Attributes:
        steps: how many ran. seconds: for all of them, measured. interrupted: a signal ended it early.
        steered: links, decisions and what they saved; None if nothing was recorded.
        notices: what the user should know. files: the files that it left, by what they are.
    """

    UNIT: ClassVar[str] = "steps"

    schedule: str
    dispatch: str
    num_ranks: int
    steps: int
    interrupted: bool
    seconds: float
    notices: list[str]
    files: dict[str, str]
    steered: AdaptationSummary | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"steered": None if self.steered is None else self.steered.to_json()}

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

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """Lines of text, each with its heading, up to the notices."""

    def last_rows(self) -> list[tuple[str, str]]:
        """The lines behind the notices."""
        written = [("wrote", path) for what, path in self.files.items() if what != PAGE]
        return [*written, *((PAGE, how) for what, how in self.files.items() if what == PAGE)]

    def to_text(self) -> str:
        ended = "interrupted after " if self.interrupted else ""
        ran = f"{ended}{self.steps} {self.UNIT} of {self.schedule}, {self.dispatch}, on {self.num_ranks} ranks"
        rows = [("run", ran), *self.rows()]
        for notice in self.notices:
            rows += [("note" if place == 0 else "", line) for place, line in enumerate(textwrap.wrap(notice, WIDTH))]
        rows += self.last_rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write_plan(folder: RunFolder, settings: RunSettings, schedule: Schedule) -> None:
    """Writes what was asked for into a run's folder."""
    folder.path.mkdir(parents=True, exist_ok=True)
    write_whole(folder.settings, settings.to_json() + "\n")
    save_schedule(schedule, folder.file("schedule.txt"))
    save_picture(schedule, folder.file("schedule.svg"))
