"""Runs whose reports tests look at, stories made by hand, and a page taken apart."""

from __future__ import annotations

import json
from functools import lru_cache
from html.parser import HTMLParser
from typing import Any

import penstock as ps
from penstock.control import (
    Configuration,
    Controller,
    Job,
    rehearse,
)
from penstock.control.configuration import peaks
from penstock.cost import Links
from penstock.report import RunStory
from penstock.report.from_logs import read_story
from penstock.report.run_story import (
    DecisionOutcome,
    Iteration,
    RunPlan,
    late_links,
    spells_of,
)

COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
CROPPED = """() => {
  const shown = (each) => each.getClientRects().length > 0;
  const name = (each) =>
    `${each.tagName} ${each.className.baseVal ?? each.className}: ${each.textContent.slice(0, 60)}`;
  const wide = [...document.querySelectorAll("body *")].filter((each) => shown(each) && !each.closest("svg")
    && each.tagName !== "CANVAS" && each.scrollWidth > each.clientWidth + 1 && each.clientWidth);
  const texts = [...document.querySelectorAll("svg text")].filter(shown).filter((each) => {
    const box = each.getBoundingClientRect(), svg = each.closest("svg").getBoundingClientRect();
    return box.left < svg.left - 1 || box.right > svg.right + 1
      || box.bottom > svg.bottom + 1 || box.top < svg.top - 1;
  });
  return [...wide, ...texts].map(name);
}"""
"""The elements of a page that are cut off, in a browser."""
LATE = "2:3=latency:steps:0ms/0ms,1600ms/60ms,6s/0ms"


def job(**more: Any) -> Job:
    zb = ps.build("zb", 4, 8)
    return Job(COSTS, Configuration(zb, "frozen", (), tuple(peaks(zb, COSTS))), **more)


@lru_cache(maxsize=8)
def log_of(link: str = LATE, until: float = 12_000) -> tuple[str, ...]:
    lines: list[str] = []
    rehearse(Controller(job(), log=lines.append), Links.parse(link), until=until)
    return tuple(lines)


@lru_cache(maxsize=8)
def story_of(link: str = LATE, until: float = 12_000) -> RunStory:
    return read_story(log_of(link, until), name="late & last")


class Page(HTMLParser):
    """Tags, the text of each element, and the rows of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.table: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.stack.append(tag)
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.table = self.tables.setdefault(dict(attrs).get("aria-label") or "", [])
        if tag == "tr":
            self.table.append([])
        if tag in ("td", "th"):
            self.table[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.texts[self.stack[-1]][-1] += data
        if self.stack and self.stack[-1] in ("td", "th"):
            self.table[-1][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))


LINKS = ((0, 1), (1, 0), (1, 2), (2, 1))
"""Directions of links in stories made by hand, in order."""


def iteration(number: int, ms: float, decision: int = 0, kept: float | None = None, *delays: float) -> Iteration:
    """One whose steps took `kept` ms before the changes that run in it, measured and simulated."""
    measured = dict(zip(LINKS, delays, strict=False))
    return Iteration(number, ms, decision, measured, ms, kept if decision else ms, kept if decision else None)


START, THEN = RunPlan("zb", "frozen"), RunPlan("zb", "dynamic", ((0, 1),))
"""What runs first, and then, in stories made by hand."""


def told(iterations: list[Iteration], decisions: list[DecisionOutcome] | None = None) -> RunStory:
    return RunStory(
        "run", (), tuple(iterations[0].delays), START, tuple(iterations), tuple(decisions or ()),
        spells_of(late_links(iterations, 1.0)), None, 1.0, 100.0, "given",
    )  # fmt: skip


def decided(
    number: int,
    made: int,
    first: int | None,
    action: str = "delegate",
    outcome: str = "ran",
    plan: RunPlan = THEN,
) -> DecisionOutcome:
    """A decision whose cause began an iteration before it was made."""
    return DecisionOutcome(number, action, "why", plan, made - 1, made, 2.0, 1.0, 0, first, outcome, saved=5)
