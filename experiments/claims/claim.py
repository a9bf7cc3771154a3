"""A claim of a paper, and where its number stands among the results."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.common.results import Row, facts, filled, load, rounded

ROOT = Path(__file__).resolve().parents[2]
Value = Callable[[Sequence[Row], str], "float | None"]
"""Of rows and "simulated", "measured" or "trained", the number that is claimed; None where it was not found so."""


Lines = Callable[[Sequence[Row]], Iterable[str]]
"""Of rows, what is printed."""


@dataclass(frozen=True)
class Claim:
    """A number of a paper, beside ours.

    Attributes:
        item: the figure or table. what: the number, in words. paper: what the paper says, None where it says nothing.
        file: of the simulated results, below `experiments/`, such as "pipemorph/figure15-simulate".
        measured: the same of those by the clock; empty where there are none.
        trained: the same of those by real training; empty where there are none.
        again: simulates anew what the claim needs, in seconds; None where that takes longer.
        digits: those that are shown, and have to come out alike.
        show: of the number.
    """

    item: str
    what: str
    paper: float | None
    file: str
    value: Value
    measured: str = ""
    again: Callable[[], Iterable[Row]] | None = None
    digits: int = 2
    show: str = "{:.2f}"
    trained: str = ""

    def committed(self, how: str) -> float | None:
        """The number by the committed results: simulated, measured or trained."""
        name = {"simulated": self.file, "measured": self.measured, "trained": self.trained}[how]
        if not name:
            return None
        return self.value(rows_of(name), how)

    def shown(self, how: str) -> str:
        found = self.committed(how)
        return "" if found is None else self.show.format(found)


@dataclass(frozen=True)
class Item:
    """A figure or table of a paper as its page shows it.

    Attributes:
        name: "Figure 15". about: what it is of. command: what finds it, without `python -m experiments.`.
        files: of its results, below `experiments/`. chart: its picture, likewise.
        also: files that its table is made of too, likewise.
        finding: what was found, in a few sentences, which stand before the table.
        differs: what differs, and why. In both a name in braces stands for the number of that name of the paper.
        own: whether it is ours, and the paper has no such figure or table.
        reason: why there are no results, where there are none; shown for as long as one of `files` is not there.
    """

    name: str
    about: str
    command: str = ""
    files: tuple[str, ...] = ()
    chart: str = ""
    finding: str = ""
    differs: str = ""
    reason: str = ""
    also: tuple[str, ...] = ()
    own: bool = False

    @property
    def has_results(self) -> bool:
        """Whether all its files are there."""
        return bool(self.files) and all(is_there(name) for name in self.files)


@dataclass(frozen=True)
class Paper:
    """A paper's page.

    Attributes:
        lines: of the items whose table their command's module does not print from rows alone, by name.
        intro: what the page begins with. It may have names in braces, as the items' texts.
        numbers: what stands for the names in braces in the texts, made out of committed results.
    """

    key: str
    title: str
    intro: str
    items: Sequence[Item]
    claims: Sequence[Claim]
    lines: Mapping[str, Lines]
    numbers: Mapping[str, Callable[[], str]]

    def filled(self, text: str) -> str:
        """A text with numbers in place of the names in braces.

        Raises:
            ValueError: there is no number of such a name.
        """
        return filled(text, self.numbers)

    @property
    def texts(self) -> list[str]:
        """All that may have names in braces."""
        return [self.intro, *(text for item in self.items for text in (item.finding, item.differs))]

    def table(self, item: Item, rows: Sequence[Row]) -> Iterable[str]:
        """The paper's numbers beside ours, as the item's command prints them."""
        if item.name in self.lines:
            return self.lines[item.name](rows)
        found: Iterable[str] = import_module(f"experiments.{item.command.partition(' ')[0]}").lines(rows)
        return found


def read_paper(
    key: str,
    claims: Sequence[Claim],
    lines: Mapping[str, Lines] | None = None,
    numbers: Mapping[str, Callable[[], str]] | None = None,
) -> Paper:
    """A paper as its file `KEY.toml` describes it."""
    value = tomllib.loads(Path(__file__).with_name(f"{key}.toml").read_text(encoding="utf-8"))
    items = [Item(**each | {name: tuple(each.get(name, ())) for name in ("files", "also")}) for each in value["item"]]
    return Paper(key, value["title"], value["intro"], items, claims, lines or {}, numbers or {})


@cache
def rows_of(name: str) -> list[Row]:
    """The rows of a file of results, such as "pipemorph/figure15-simulate"."""
    paper, _, file = name.partition("/")
    return load(ROOT / "experiments" / paper / "results", file)


def is_there(name: str) -> bool:
    """Whether there is such a file."""
    paper, _, file = name.partition("/")
    return (ROOT / "experiments" / paper / "results" / f"{file}.json").exists()


def facts_of(name: str) -> dict[str, Any]:
    """What such a file says besides its rows."""
    paper, _, file = name.partition("/")
    return facts(ROOT / "experiments" / paper / "results", file)


def as_saved(rows: Iterable[Row]) -> list[Row]:
    """Rows as they would come back from a file."""
    found: list[Row] = json.loads(json.dumps(rounded(list(rows))))
    return found
