"""A run as plain values: the record of its steps, and the story of its links under control. Drawing starts here.

`read_record` makes a `RunRecord` of the files that every run has:

    metrics.jsonl                   one line a step
    report.json                     memory, notices, what was simulated; once the run has ended
    timeline.json, schedule.txt     one of the last steps, measured and simulated

`penstock.report.from_logs` makes a `RunStory` of the logs of a run whose links were watched. Times are milliseconds
unless a name says otherwise, iterations have the numbers that `read_story` gives them, and links are directed
pairs of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

from penstock.control.changes import deviation
from penstock.control.log import json_lines
from penstock.control.measured import LinksOfStep
from penstock.control.steps import FEWEST
from penstock.control.watches import Factors
from penstock.simulation import Timeline

Link = tuple[int, int]
GAP = 3
"""Iterations that two late ones may lie apart and still belong to one late period."""
ENDS = 8
"""Iterations that show how long an iteration took when the run began, and when it ended."""
SMALL = 0.1
"""Share of the costliest late period below which another is not spoken of."""
SMALLEST = 0.02
"""Share of an undisturbed iteration that counts as lost."""
UNKNOWN = 0.1
"""Share of the late iterations with a change that may lack a baseline for what they saved to be known."""
SLOWER, SURE, EXACT = 1.05, 2.0, 6.0
"""A run has become slower from this ratio on. A difference is real from so many standard errors on. It is told as a
number if it is `EXACT` of them, which is within a fifth of it as a rule.
"""


@dataclass(frozen=True)
class RunPlan:
    """What all ranks run, as far as a report names it.

    Attributes:
        schedule: its name. dispatch: how ranks choose their ops.
        delegated: links whose messages go by delegates, the lower rank first.
        nodes: where the nodes of a mesh lie; none if they cannot move.
        is_replanned: whether the order is another than the one that the run began with.
    """

    schedule: str
    dispatch: str
    delegated: tuple[Link, ...] = ()
    nodes: tuple[int, ...] = ()
    is_replanned: bool = False

    def __str__(self) -> str:
        links = ", ".join(map(link_name, self.delegated))
        parts = [self.schedule + " re-planned" * self.is_replanned, self.dispatch]
        parts.append(f"delegated {links}" if links else "all links direct")
        if self.nodes and self.nodes != tuple(range(len(self.nodes))):
            parts.append("nodes " + " ".join(map(str, self.nodes)))
        return ", ".join(parts)


@dataclass(frozen=True)
class MeasuredConditions:
    """What was measured in an iteration, to simulate it with.

    Attributes:
        links: the messages of each link.
        factors: how many times as long as assumed ops took.
        down: links (lower rank first) whose own path was dead.
    """

    links: LinksOfStep
    factors: Factors = ()
    down: frozenset[Link] = frozenset()


@dataclass(frozen=True)
class Iteration:
    """One iteration.

    Attributes:
        number: as `read_story` counts them. ms: as measured. decision: the number of the decision in force, 0 for
            the start.
        delays: of each direction of a link that had messages, their median time.
        simulated: what ran, simulated with the links and op times of the iteration; None if it was not simulated.
        kept: what the first configuration would have taken: measured where it ran, otherwise simulated in the same
            way. None if it was not simulated, or if a dead link would have ended the run.
        baseline: the median of measured iterations, under the same links, before the changes that run now. None
            if the first configuration runs, or if fewer than `FEWEST` such iterations were measured.
        is_clean: False from a decision until all ranks have switched, in the first iteration after the switch, and in
            the first steps of a run that trains. Ranks prepare in these iterations, so medians leave them out.
        conditions: what to simulate it with; None for iterations without messages, and for starting steps.
    """

    number: int
    ms: float
    decision: int
    delays: Mapping[Link, float]
    simulated: float | None = None
    kept: float | None = None
    baseline: float | None = None
    is_clean: bool = True
    conditions: MeasuredConditions | None = None

    @property
    def saved(self) -> float:
        """By how many measured ms it is shorter than its baseline; 0 without one."""
        return 0.0 if self.baseline is None else self.baseline - self.ms


@dataclass(frozen=True)
class DecisionOutcome:
    """A decision, and what became of it.

    Attributes:
        number: from 1. action, reason: in words. plan: what it made all ranks run.
        began: the iteration in which its cause began, if that is known.
        made: the iteration after which it was made.
        ms_now, ms_then: simulated iteration times before and after; `ms_now` is None if a dead link stopped the run.
        first: the first iteration that ran it; None if none did.
        outcome: "ran", "given up" (not all ranks could take it) or "open" (the run ended first).
        measured_before, measured_after: median of the clean iterations before it, since its cause began, and of
            those that ran it; None if there are fewer than `FEWEST`.
        saved: see `Iteration.saved`, over the iterations that prepared or ran it; None if none has a baseline.
        verdict: the result of its trial in words. taken_back: whether it was taken back.
    """

    number: int
    action: str
    reason: str
    plan: RunPlan
    began: int | None
    made: int
    ms_now: float | None
    ms_then: float
    price: float
    first: int | None = None
    outcome: str = "open"
    measured_before: float | None = None
    measured_after: float | None = None
    saved: float | None = None
    verdict: str = ""
    taken_back: bool = False

    @property
    def stayed(self) -> bool:
        """Whether it ran and was neither taken back nor itself takes another change back."""
        return self.outcome == "ran" and not self.taken_back and self.action != "take back"

    @property
    def is_slower(self) -> bool:
        """Whether it stayed though measured iterations with it are over 2% longer than before it."""
        before, after = self.measured_before, self.measured_after
        return not self.taken_back and before is not None and after is not None and after > 1.02 * before


@dataclass(frozen=True)
class LatePeriod:
    """A time in which a link was late.

    Attributes:
        link: its two ranks, the lower first; of a mesh, its two nodes. numbers: the iterations in which it was late.
        ms: the median delay in them, of the worse direction. most: the largest.
        use: of a link between nodes, what it serves: "DP ring of rank 0".
    """

    link: Link
    numbers: tuple[int, ...]
    ms: float
    most: float
    use: str = ""

    @property
    def first(self) -> int:
        return self.numbers[0]

    @property
    def last(self) -> int:
        return self.numbers[-1]

    @property
    def num_late(self) -> int:
        return len(self.numbers)

    @property
    def name(self) -> str:
        """The link in words: `2–3`, or `between nodes 0–1 (DP ring of rank 0)`."""
        return f"between nodes {link_name(self.link)} ({self.use})" if self.use else link_name(self.link)


@dataclass(frozen=True)
class RunMemory:
    """Most activations that each rank held, against what it might; `source` says how that is known."""

    peaks: tuple[float, ...]
    caps: tuple[float, ...]
    unit: str
    source: str


@dataclass(frozen=True)
class Fault:
    """Something broke, or what was done about it: in which iteration, and in words."""

    iteration: int | None
    what: str


@dataclass(frozen=True)
class RunStory:
    """All that a report says.

    Attributes:
        name: of the run.
        facts: what the run was, as names and values.
        links: directions that were measured, in order.
        start: what ran first.
        iterations: all iterations, in order.
        decisions: what was decided, in order.
        spells: times in which a link was late, the costliest first.
        memory: what ranks held; None if it was not recorded.
        smallest_delay: from which delay on a link counts as late (ms).
        undisturbed: how long an iteration takes with no link late (ms).
        undisturbed_from: how that is known.
        saved_error: the standard error (ms) that `saved` has from the iterations before the changes.
        unanswered: causes that nothing was changed for, their size, why, and what would help, in words.
        faults: what broke, and what was done about it, by iteration.
        counters: names and numbers of what delegates count, like chunks sent again.
        shown: the timelines that are drawn, each with its title.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    links: tuple[Link, ...]
    start: RunPlan
    iterations: tuple[Iteration, ...]
    decisions: tuple[DecisionOutcome, ...]
    spells: tuple[LatePeriod, ...]
    memory: RunMemory | None
    smallest_delay: float
    undisturbed: float
    undisturbed_from: str
    saved_error: float = 0.0
    unanswered: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    counters: tuple[tuple[str, float], ...] = ()
    shown: tuple[tuple[str, Timeline], ...] = ()

    @cached_property
    def total(self) -> float:
        """How long all iterations took together."""
        return sum(each.ms for each in self.iterations)

    @cached_property
    def late(self) -> frozenset[int]:
        """Numbers of the iterations in which a link was late."""
        return frozenset(number for spell in self.spells for number in spell.numbers)

    @cached_property
    def lost(self) -> float:
        """What late links would have cost had nothing been changed: what iterations with a late link took more than
        undisturbed ones, in the median of each configuration, and what was saved.
        """
        late = [each for each in self.iterations if each.number in self.late]
        rows: dict[int, list[float]] = {}
        for each in late:
            rows.setdefault(each.decision, []).append(each.ms)
        more = sum(len(row) * (median(row) - self.undisturbed) for row in rows.values())
        return max(0.0, more + saved_by(late, self.undisturbed)[0])

    @cached_property
    def saved_about(self) -> tuple[float, float] | None:
        """What was saved as measured, with its standard error (ms); None if too few iterations were measured before
        the changes.
        """
        back = {each.number for each in self.decisions if each.action == "take back"}
        changed = [each for each in self.iterations if each.decision not in back | {0}]
        late = [each for each in changed if each.number in self.late] or changed
        if sum(each.baseline is None for each in late) > UNKNOWN * len(late):
            return None
        found, error = saved_by(self.iterations, self.undisturbed)
        return found, math.hypot(error, self.saved_error)

    @cached_property
    def saved(self) -> float | None:
        """By how many measured ms iterations were shorter than before the changes under the same links, less what
        preparing the changes cost. Negative if they were longer. None if that cannot be told within a fifth.
        """
        if self.saved_about is None:
            return None
        found, error = self.saved_about
        return None if abs(found) < EXACT * error else found

    @cached_property
    def slower(self) -> tuple[str, float, float] | None:
        """Since when the run is slower, with ms an iteration then and at its end; None if it is not."""
        clean = [each for each in self.iterations if each.is_clean] or self.iterations
        first = [each.ms for each in clean if each.number < min(self.late, default=clean[-1].number)][:ENDS]
        if len(first) < FEWEST:
            first = [each.ms for each in clean if each.decision == 0][:ENDS]
        last = [each.ms for each in clean if each.decision == clean[-1].decision][-ENDS:]
        change = next((each for each in reversed(self.decisions) if each.outcome == "ran"), None)
        if change is not None and change.is_slower and change.measured_before and change.measured_after:
            return "before the last change", change.measured_before, change.measured_after
        if len(clean) < len(first) + len(last) or min(len(first), len(last)) < FEWEST:
            return None
        began, ended = median(first), median(last)
        noise = standard_error(first) + standard_error(last)
        return ("at the start", began, ended) if ended > max(SLOWER * began, began + 3 * noise) else None

    @cached_property
    def error(self) -> float | None:
        """Median of |simulated / measured - 1| over all iterations that were simulated."""
        errors = [
            abs(each.simulated / each.ms - 1) for each in self.iterations if each.simulated is not None and each.ms
        ]
        return median(errors) if errors else None

    def to_json(self) -> dict[str, Any]:
        """Everything but the timelines, rounded to what matters, as a JSON object; iterations in columns."""
        value = asdict(replace(self, iterations=(), spells=(), shown=()))
        del value["shown"]
        columns = ("number", "ms", "decision", "simulated", "kept", "baseline", "is_clean")
        value["iterations"] = {name: [getattr(each, name) for each in self.iterations] for name in columns}
        value["iterations"]["delays"] = [[each.delays.get(link) for each in self.iterations] for link in self.links]
        names = ("link", "first", "last", "num_late", "ms", "most", "use")
        value["spells"] = [{name: getattr(each, name) for name in names} for each in self.spells]
        for each, decision in zip(value["decisions"], self.decisions, strict=True):
            each["what"] = str(decision.plan)
        value["facts"], value["counters"] = dict(self.facts), dict(self.counters)
        value |= {"num_iterations": len(self.iterations), "num_late": len(self.late), "total_ms": self.total}
        value |= {"lost_ms": self.lost, "saved_ms": self.saved, "error": self.error}
        return rounded(value)


def saved_by(rows: Sequence[Iteration], undisturbed: float) -> tuple[float, float]:
    """What iterations saved (ms) beside their baselines, and the standard error of that.

    Clean iterations count by their median, since a few that something else held up say nothing about a change. Those
    in which ranks prepared it count as they are. Beside undisturbed iterations only losses beyond noise count.
    """
    found, error = sum(each.saved for each in rows if not each.is_clean), 0.0
    groups: dict[tuple[int, float], list[float]] = {}
    for each in rows:
        if each.is_clean and each.baseline is not None:
            groups.setdefault((each.decision, each.baseline), []).append(each.ms)
    for (_, baseline), ms in groups.items():
        gain, noise = baseline - median(ms), standard_error(ms)
        if baseline == undisturbed:
            gain = gain if gain < -max(SURE * noise, SMALLEST * undisturbed) else 0.0
        found += len(ms) * gain
        error += len(ms) * noise
    return found, error


def standard_error(values: Sequence[float]) -> float:
    """Of their median, if noise is normal: 1.2533 times that of their mean."""
    return 1.2533 * deviation(values) / len(values) ** 0.5


def link_name(link: Link) -> str:
    """A link, both directions."""
    return f"{link[0]}–{link[1]}"


def rounded(value: Any) -> Any:
    """A JSON value with floats of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def runs_of(numbers: Iterable[int], gap: int) -> list[list[int]]:
    """Rising numbers in groups in which neighbours are at most `gap` apart."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number - groups[-1][-1] <= gap:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def spells_of(late: Mapping[tuple[Link, str], Mapping[int, float]]) -> tuple[LatePeriod, ...]:
    """The times in which links were late, the costliest first; iterations at most `GAP` apart belong to one.

    Args:
        late: by link and what it serves, the delay (ms) in each iteration in which it was late.
    """
    found = [
        LatePeriod(link, tuple(group), median(delays[n] for n in group), max(delays[n] for n in group), use)
        for (link, use), delays in late.items()
        for group in runs_of(sorted(delays), GAP)
    ]
    return tuple(sorted(found, key=lambda spell: (-spell.ms * spell.num_late, spell.first, spell.link)))


def main_spells(spells: Sequence[LatePeriod]) -> Sequence[LatePeriod]:
    """Those that matter beside the costliest."""
    costliest = max((spell.ms * spell.num_late for spell in spells), default=0.0)
    return [spell for spell in spells if spell.ms * spell.num_late >= SMALL * costliest]


def late_links(iterations: Iterable[Iteration], least: float) -> dict[tuple[Link, str], dict[int, float]]:
    """By link between ranks, both directions together, its delay in the iterations in which it was late."""
    found: dict[tuple[Link, str], dict[int, float]] = {}
    delays: dict[Link, float] = {}
    for each in iterations:
        if each.delays:  # one that was not reported in full is as the one before it
            delays = {}
        for (a, b), delay in each.delays.items():
            link = min(a, b), max(a, b)
            delays[link] = max(delay, delays.get(link, 0.0))
        for link, delay in delays.items():
            if delay >= least:
                found.setdefault((link, ""), {})[each.number] = delay
    return found


@dataclass(frozen=True)
class RunRecord:
    """The steps of a run and its end.

    Attributes:
        name: of the run.
        facts: what it was, as names and values.
        steps: the numbers of its steps or iterations, from 1.
        asked: how many were asked for; None if that is not known.
        columns: by the name of a metric, its value in each step; None for a step without a finite one.
        ended: the report.json of the run; empty while there is none.
        shown: the timelines of one of its last steps, each with its title.
        text: what the model wrote.
    """

    name: str
    steps: tuple[int, ...]
    columns: Mapping[str, tuple[float | None, ...]]
    facts: Sequence[tuple[str, str]] = ()
    asked: int | None = None
    ended: Mapping[str, Any] = field(default_factory=dict)
    shown: Sequence[tuple[str, Timeline]] = ()
    text: str = ""

    def known(self, metric: str) -> list[tuple[int, float]]:
        """The steps that have a value of a metric, each with it."""
        values = self.columns.get(metric, ())
        return [(step, value) for step, value in zip(self.steps, values, strict=False) if value is not None]

    @property
    def not_finite(self) -> str:
        """From which step on the loss is not finite, or in how many steps, in words; nothing if it always is."""
        losses = self.columns.get("loss", ())
        if None not in losses:
            return ""
        first = losses.index(None)
        is_over = losses.count(None) == len(losses) - first
        when = f"from step {self.steps[first]} on" if is_over else f"in {losses.count(None)} steps"
        return f"the loss is not finite {when}" + f", first in step {self.steps[first]}" * (not is_over)

    @property
    def noun(self) -> str:
        """The name of a step. On emulated devices, which learn nothing, it is an iteration."""
        return "iteration" if "ms" in self.columns else "step"

    @property
    def bubbles(self) -> tuple[float | None, float | None]:
        """The share of all ranks' time without an op in one of the last steps: measured, and simulated."""
        timing = self.ended.get("timing") or self.ended
        return timing.get("measured_bubble_ratio"), timing.get("simulated_bubble_ratio")

    def to_json(self) -> dict[str, Any]:
        """All but the timelines and the text, as a JSON object; the metrics in columns."""
        value = {"steps": self.steps, "asked": self.asked, "columns": dict(self.columns), "ended": dict(self.ended)}
        found: dict[str, Any] = rounded(value)
        return found


def read_record(metrics: Iterable[str], **known: Any) -> RunRecord | None:
    """Makes a record of the lines of metrics.jsonl; None if no step has ended.

    Args:
        known: the other attributes of the record, at least its name.

    Raises:
        ControlError: a line that is no JSON object, unless it is the last one and was cut off.
    """
    rows = [row for row in json_lines(metrics, "metrics.jsonl") if isinstance(row.get("step"), int)]
    if not rows:
        return None
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns = {name: tuple(_number(row.get(name)) for row in rows) for name in names}
    return RunRecord(steps=tuple(1 + row["step"] for row in rows), columns=columns, **known)


def strict_json(value: Any) -> Any:
    """A JSON value in which null stands for each number that is not finite, as JSON has no nan."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
