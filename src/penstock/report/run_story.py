"""The story of a run under control, as plain values: what a report shows, and all that it shows.

`penstock.report.from_logs` makes a `RunStory` of a run's logs; drawing starts here. Times are milliseconds unless a
name says otherwise, iterations are numbers from 0, links are directed pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from penstock.simulation import Timeline

Link = tuple[int, int]


@dataclass(frozen=True)
class Iteration:
    """One iteration.

    Attributes:
        number: from 0; ms: measured; decision: the number of the one in force, 0 for the start.
        simulated: what ran, simulated under links and op times as measured in it; None where that was not done.
        kept: what keeping the first configuration would have taken: measured where that ran, else simulated under
            the same links. None where that was not done, or where a dead link would have ended the run.
        baseline: what the steps took, measured, before the changes that run now, under the same links: the median.
            None where what ran first runs, and where nothing else was measured under these links.
        delays: median time of a message on each link, in the order of the story's links; None without messages.
    """

    number: int
    ms: float
    decision: int
    simulated: float | None
    kept: float | None
    delays: tuple[float | None, ...]
    baseline: float | None = None

    @property
    def saved(self) -> float:
        """Measured ms less than before the changes; 0 where that was not measured."""
        return 0.0 if self.baseline is None else self.baseline - self.ms


@dataclass(frozen=True)
class DecisionOutcome:
    """A decision, and what became of it.

    Attributes:
        number: from 1; action, reason: in words; what: the configuration in words.
        began: the iteration in which what it answers began, where that is known.
        made: the iteration after which the change was verified and the decision proposed.
        first: the first iteration that ran it; None where none did.
        outcome: "ran", "given up" (not all ranks could take it) or "open" (the run ended first).
        ms_now, ms_then: simulated iteration times before and after; now is None where a dead link left none.
        measured_before, measured_after: median measured iteration time before the switch, since what it answers
            began, and after it.
        saved: see `Iteration.saved`, over the iterations that ran it; None where none was measured under the links
            that it runs under.
        verdict: what its trial came to, in words. taken_back: whether it was.
    """

    number: int
    action: str
    reason: str
    what: str
    began: int | None
    made: int
    first: int | None
    outcome: str
    ms_now: float | None
    ms_then: float
    price: float
    measured_before: float | None
    measured_after: float | None
    saved: float | None
    verdict: str = ""
    taken_back: bool = False

    @property
    def is_slower(self) -> bool:
        """Whether it stayed though measured iterations with it are over 2% longer than before it."""
        before, after = self.measured_before, self.measured_after
        return not self.taken_back and before is not None and after is not None and after > 1.02 * before


@dataclass(frozen=True)
class LatePeriod:
    """A time in which a link (both directions) was late.

    Attributes:
        link: lower rank first; first, last: its first and last late iteration; num_late: late ones between them.
        ms: median over those of the worse direction's delay; most: the largest.
    """

    link: Link
    first: int
    last: int
    num_late: int
    ms: float
    most: float


@dataclass(frozen=True)
class TimeShares:
    """Where the time of all ranks goes in an iteration: parts that add up to 1.

    Attributes:
        busy: in ops. dependency: waiting for a message between the rank's first and last op. head_of_line: standing
            still behind a full link. warm_up_and_drain: before the rank's first op and after its last.
    """

    busy: float
    dependency: float
    head_of_line: float
    warm_up_and_drain: float

    @classmethod
    def of(cls, timeline: Timeline) -> TimeShares:
        """Adds up a timeline."""
        whole = timeline.num_ranks * timeline.makespan
        if not whole:
            return cls(0.0, 0.0, 0.0, 0.0)
        busy = sum(timeline.busy) / whole
        blocked = sum(timed.blocked for timed in timeline.ops) / whole
        origin = min(timed.start for timed in timeline.ops)
        edges = 0.0
        for row in timeline.rows:
            first, last = (
                min((t.start for t in row), default=origin),
                max((t.end + t.blocked for t in row), default=origin),
            )
            edges += (first - origin) + max(0.0, timeline.makespan - (last - origin))
        edges /= whole
        return cls(busy, max(0.0, 1 - busy - blocked - edges), blocked, edges)


@dataclass(frozen=True)
class RanConfiguration:
    """A configuration that ran.

    Attributes:
        decision: which decided it, 0 for the start; what: in words; num_iterations: how many ran it.
        measured, simulated: median iteration times, over the iterations that were simulated.
        error: median of |simulated / measured - 1| over them.
        shares: of one simulated iteration, that number `at`.
    """

    decision: int
    what: str
    num_iterations: int
    measured: float | None
    simulated: float | None
    error: float | None
    shares: TimeShares | None
    at: int | None


@dataclass(frozen=True)
class RunMemory:
    """Most activations that each rank held, against what it might; `source` says how that is known."""

    peaks: tuple[float, ...]
    caps: tuple[float, ...]
    unit: str
    source: str


@dataclass(frozen=True)
class AlarmCounts:
    """Suspected changes of links, those that were verified, and those that nothing followed."""

    suspected: int
    verified: int
    false: int


@dataclass(frozen=True)
class Fault:
    """Something broke, or what was done about it: in which iteration, and in words."""

    iteration: int | None
    what: str


@dataclass(frozen=True)
class TitledTimeline:
    """A timeline to show, with its title."""

    title: str
    timeline: Timeline


@dataclass(frozen=True)
class RunStory:
    """All that a report says.

    Attributes:
        name: of the run.
        facts: what it was, as names and values.
        links: directions that were measured, in order.
        iterations: all iterations, in order.
        decisions: what was decided, in order.
        spells: spans of iterations in which a link was late.
        ran: the configurations that ran, in order.
        memory: what ranks held; None where it was not recorded.
        alarms: how many changes were suspected, and what became of them.
        smallest_delay: from which on a link counts as late (ms).
        undisturbed: how long an iteration takes with no link late (ms).
        undisturbed_from: how `undisturbed` is known, in words.
        unanswered: causes that nothing was changed for, why, and what would help, in words.
        faults: what broke, and what was done about it, by iteration.
        counters: names and numbers of what a run counts besides, like messages sent again.
        shown: the timelines that are drawn.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    links: tuple[Link, ...]
    iterations: tuple[Iteration, ...]
    decisions: tuple[DecisionOutcome, ...]
    spells: tuple[LatePeriod, ...]
    ran: tuple[RanConfiguration, ...]
    memory: RunMemory | None
    alarms: AlarmCounts
    smallest_delay: float
    undisturbed: float
    undisturbed_from: str
    unanswered: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    counters: tuple[tuple[str, float], ...] = ()
    shown: tuple[TitledTimeline, ...] = ()

    @cached_property
    def total(self) -> float:
        """How long all iterations took together."""
        return sum(each.ms for each in self.iterations)

    @cached_property
    def late(self) -> frozenset[int]:
        """Numbers of the iterations in which a link was late."""
        return frozenset(
            each.number
            for each in self.iterations
            if any(delay is not None and delay >= self.smallest_delay for delay in each.delays)
        )

    @cached_property
    def lost(self) -> float:
        """What late links would have cost had nothing been changed, by measured iterations: what those with a late
        link took more than the undisturbed, and what was saved of it."""
        late = [each for each in self.iterations if each.number in self.late]
        return sum(each.ms - self.undisturbed + each.saved for each in late)

    @cached_property
    def saved(self) -> float | None:
        """How much less iterations took than before the changes under the same links, measured. Negative where they
        took more; None where something else ran and nothing of it could be compared."""
        changed = [each for each in self.iterations if each.decision != 0]
        if changed and all(each.baseline is None for each in changed):
            return None
        return sum(each.saved for each in changed)

    @cached_property
    def error(self) -> float | None:
        """Median of |simulated / measured - 1| over all iterations that were simulated."""
        errors = [
            abs(each.simulated / each.ms - 1) for each in self.iterations if each.simulated is not None and each.ms
        ]
        return median(errors) if errors else None

    def to_json(self) -> dict[str, Any]:
        """Everything but the timelines, rounded to what matters, as a JSON object; iterations in columns."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "shown"}
        for name in ("decisions", "spells", "ran", "faults"):
            value[name] = [asdict(each) for each in value[name]]
        columns = ("number", "ms", "decision", "simulated", "kept", "baseline")
        value["iterations"] = {name: [getattr(each, name) for each in self.iterations] for name in columns}
        value["iterations"]["delays"] = [list(column) for column in zip(*(each.delays for each in self.iterations))]
        value["memory"] = None if self.memory is None else asdict(self.memory)
        value["alarms"] = asdict(self.alarms)
        value["facts"], value["counters"] = dict(self.facts), dict(self.counters)
        value |= {"num_iterations": len(self.iterations), "num_late": len(self.late), "total_ms": self.total}
        value |= {"lost_ms": self.lost, "saved_ms": self.saved, "error": self.error}
        return rounded(value)


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


def spells_of(
    iterations: Sequence[Iteration], links: Sequence[Link], least: float, gap: int = 3
) -> tuple[LatePeriod, ...]:
    """The times in which links were late; iterations at most `gap` apart belong to one. The costliest first."""
    both: dict[Link, list[int]] = {}
    for place, (a, b) in enumerate(links):
        both.setdefault((min(a, b), max(a, b)), []).append(place)
    found = []
    for link, places in both.items():
        delays = {
            each.number: max((each.delays[place] or 0.0 for place in places), default=0.0) for each in iterations
        }
        late = [number for number, delay in delays.items() if delay >= least]
        for group in runs_of(late, gap):
            ms = [delays[number] for number in group]
            found.append(LatePeriod(link, group[0], group[-1], len(group), median(ms), max(ms)))
    return tuple(sorted(found, key=lambda spell: (-spell.ms * spell.num_late, spell.first, spell.link)))
