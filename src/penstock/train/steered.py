"""What a run's records say in the end: which links were slow and when, what was decided, and what that saved.

control.jsonl   --->  links, changes, decisions      (events are taken in again; nothing is decided anew)
iterations.jsonl  ->  how long iterations took with each plan
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from penstock.control import Configuration, ControlError, IterationEnded, LinkDown, LinkUp, Switched
from penstock.control.events import OpTimes, Transfer, Transfers, event_from_json, show_link
from penstock.control.log import read_header
from penstock.control.measured import Book

CONTROL, ITERATIONS = "control.jsonl", "iterations.jsonl"
WIDTH = 100
"""Columns that reasons are wrapped to."""
MOST_CHANGES = 8
"""Changes that the report lists; the page has all."""


@dataclass(frozen=True)
class LinkSeen:
    """One direction of a link, as its messages told in the end.

    Attributes:
        link: like 6>7. delay: median ms of a message by itself. busy: ms of it that the link is taken up, where
            that shows. late_share: of messages that took far longer than the others. num_messages: it rests on.
    """

    link: str
    delay: float
    busy: float | None
    late_share: float
    num_messages: int


@dataclass(frozen=True)
class DecisionSeen:
    """A decision and what came of it.

    Attributes:
        iteration: after which it was made, counted from 1. ms_now, ms_then: simulated then, without and with it.
        num_iterations: that ran with it; 0 for one that was dropped. ms: their median, measured.
        saved: ms over all of them, against ms_now; None where that is not known.
    """

    number: int
    iteration: int
    action: str
    reason: str
    ms_now: float | None
    ms_then: float
    num_iterations: int
    ms: float | None
    saved: float | None


@dataclass(frozen=True)
class Steered:
    """What is known at the end of a run that was measured.

    Attributes:
        links: every direction that messages passed.
        changes: those verified, in words, each with its iteration, counted from 1.
        num_suspected, num_false: alarms, and those of them that nothing followed.
        decisions: all, in order.
    """

    links: tuple[LinkSeen, ...]
    changes: tuple[str, ...]
    num_suspected: int
    num_false: int
    decisions: tuple[DecisionSeen, ...]

    @property
    def saved(self) -> float:
        """Milliseconds over the whole run, as far as they are known."""
        return sum(each.saved or 0.0 for each in self.decisions)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"saved": self.saved}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Steered:
        rest = {name: each for name, each in value.items() if name not in ("links", "decisions", "saved", "changes")}
        return cls(
            tuple(LinkSeen(**each) for each in value["links"]),
            tuple(value["changes"]),
            decisions=tuple(DecisionSeen(**each) for each in value["decisions"]),
            **rest,
        )

    def rows(self, adapted: bool) -> list[tuple[str, str]]:
        """Lines of the report, each with its heading."""
        late = [each for each in self.links if each.delay >= 1.0 or each.late_share > 0.1]
        shown = ", ".join(_shown(each) for each in sorted(late, key=lambda each: -each.delay)[:4])
        rows = [("links", f"slow: {shown}" if shown else f"none of {len(self.links)} directions took 1 ms or more")]
        rows += [("", change) for change in self.changes[-MOST_CHANGES:]]
        if not adapted:
            return rows
        if not self.decisions:
            return [*rows, ("decided", "nothing: no link asked for it")]
        for place, each in enumerate(self.decisions):
            what = f"{each.number}, after iteration {each.iteration}: {each.action}"
            rows.append(("decided" if place == 0 else "", what))
            rows += [("", f"   {line}") for line in textwrap.wrap(each.reason, WIDTH - 3)]
            ran = f"{each.num_iterations} iterations took {each.ms:.1f} ms (median)" if each.ms is not None else ""
            rows.append(("", f"   {ran or 'no iteration ran with it'}"))
        if self.saved > 0:
            rows.append(("saved", f"about {self.saved / 1e3:.1f} s, against staying with each former plan"))
        return rows


def _shown(each: LinkSeen) -> str:
    late = f", {each.late_share:.0%} far later" if each.late_share > 0.1 else ""
    return f"{each.link} {each.delay:.1f} ms{late}"


def read_steered(folder: Path) -> Steered | None:
    """Reads the records in a run's folder; None where there are none. A last line that was cut off does not count."""
    lines = _lines(folder / CONTROL)
    header = next(lines, None)
    if header is None:
        return None
    try:
        job, sensitivity = read_header(header)
    except ControlError:
        return None
    book, delegated, iteration = Book(job, sensitivity), job.start.delegated, 0
    changes: list[str] = []
    decisions: list[dict[str, Any]] = []
    for value in lines:
        if "decision" in value:
            decisions.append(value["decision"])
            continue
        event = event_from_json(value["event"])
        if isinstance(event, Transfer | Transfers | OpTimes):
            book.feed(event)
        elif isinstance(event, IterationEnded):
            iteration = event.number + 1
            changes += [f"iteration {iteration}: {change}" for change in book.end_iteration()]
        elif isinstance(event, LinkDown | LinkUp):
            what = "is down" if isinstance(event, LinkDown) else "is back"
            changes.append(f"iteration {iteration}: link {show_link(event.link)} {what}")
        elif isinstance(event, Switched):
            chosen = next(each for each in decisions if each["number"] == event.number)
            after = Configuration.from_json(json.dumps(chosen["configuration"])).delegated
            book.move(set(after) ^ set(delegated), delegated)
            delegated = after
    watches = list(book.watches)
    return Steered(
        tuple(
            LinkSeen(f"{a}>{b}", found.delay, found.busy, found.late_share, found.num_messages)
            for (a, b), found in book.estimates.items()
        ),
        tuple(changes),
        sum(watch.num_suspected for watch in watches),
        sum(watch.num_false for watch in watches),
        tuple(_seen(decisions, _lines(folder / ITERATIONS))),
    )


def _seen(decisions: list[dict[str, Any]], iterations: Iterable[dict[str, Any]]) -> Iterator[DecisionSeen]:
    times: dict[int, list[float]] = {}
    for row in iterations:
        times.setdefault(row["number"], []).append(row["ms"])
    for value in decisions:
        ran = times.get(value["number"], [])
        before = value["ms_now"]
        saved = None if before is None or not ran else sum(before - ms for ms in ran)
        yield DecisionSeen(
            value["number"],
            value["iteration"] + 1,
            value["action"],
            value["reason"],
            before,
            value["ms_then"],
            len(ran),
            median(ran) if ran else None,
            saved,
        )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                return
            if isinstance(value, dict):
                yield value
