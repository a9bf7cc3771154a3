"""The story of a run, told from its logs: which link was slow when, what was decided, and what it saved.

"Saved" is measured. An iteration that runs a change is compared with the median of the iterations before the change
under the same links:

    ms    . . . o o o|x x|x o o o o o      o  clean: these count in medians
          . . .      | | |                 x  preparing, and the first iteration after the switch
                late ^ ^ ^
                  decided switched

Ranks prepare between a decision and its switch, and buffers and connections are new in the first iteration after it.
These iterations count in no median, and what they took longer is charged to the change. At least three clean
iterations are needed before a change. When links are late no more, nothing is saved, and what an iteration takes
longer than undisturbed ones counts as lost by the change.

    control.jsonl      the controller's log: every message's time, every decision       needed
    iterations.jsonl   what ranks held and delegates counted, one line an iteration     if there
    timelines.jsonl    when the ops of some iterations ran                              if there

Links, stages and nodes are watched again, as the controller watched them, so that late links are those that the
controller saw. Nothing is decided again.

Each iteration is also simulated under links and op times as they were measured in it, once with what ran and once
with the first configuration. Both are called simulated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from penstock.control.advice import Unanswered
from penstock.control.changes import AS_DEVIATION, deviation
from penstock.control.closed_loop_simulation import run_once
from penstock.control.configuration import Configuration, Job, peaks
from penstock.control.decide import Action, predict
from penstock.control.events import (
    ControlError,
    Dropped,
    Event,
    IterationEnded,
    Link,
    LinkDown,
    LinkUp,
    OpTimes,
    Probed,
    Switched,
    Transfers,
    as_type,
    event_from_json,
    undirected,
)
from penstock.control.log import json_lines, read_header
from penstock.control.measured import JobMonitor
from penstock.control.orchestrator import Orchestrator
from penstock.control.steps import FEWEST
from penstock.control.watches import factors_of, scaled
from penstock.cost import Links
from penstock.cost.mesh import LinkGroup
from penstock.formats.traces.reader import IterationRecord, iteration_records
from penstock.report.run_story import (
    DecisionOutcome,
    Fault,
    Iteration,
    LatePeriod,
    MeasuredConditions,
    RunMemory,
    RunPlan,
    RunStory,
    late_links,
    link_name,
    main_spells,
    saved_by,
    spells_of,
)
from penstock.schedule import Op, ScheduleError
from penstock.simulation import TimedOp, Timeline


class ReadLog:
    """What the records of a run say.

    Args:
        lines: of control.jsonl, which is read as far as it goes.

    Attributes:
        job: what the controller knew of the run.
        monitor, nodes: the watched links and stages, and the watched nodes of a mesh.
        iterations, decisions: by number.
        configurations: what runs with each decision; 0 is the start.
        late_nodes: by link between nodes and what it serves, how late (ms) it was in each iteration.
        faults: links that went down or came back.
        unanswered: causes for which nothing was changed.

    Raises:
        ControlError: no log, or one of another version.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        values = json_lines(lines, "the log")
        first = next(values, None)
        if first is None:
            raise ControlError(
                "an empty log: its first line must name the job, and a run writes it when its controller has "
                "started, some steps after it began; train for more steps"
            )
        self.job = read_header(first)
        self.monitor = JobMonitor(self.job)
        self.nodes = None if self.job.mesh is None else Orchestrator(self.job, self.job.mesh)
        self.iterations: dict[int, Iteration] = {}
        self.decisions: dict[int, DecisionOutcome] = {}
        self.configurations: dict[int, Configuration] = {0: self.job.start}
        self.late_nodes: dict[tuple[Link, str], dict[int, float]] = {}
        self.faults: list[Fault] = []
        self.unanswered: list[Unanswered] = []
        self._in_force, self._last = 0, -1
        self._began: int | None = None
        self._is_clean, self._waits = True, False
        """Whether the last switch lies an iteration back, and whether a decision waits for its switch."""
        self._probed: list[int] = []
        for value in values:
            self._take(value)

    def _take(self, value: Mapping[str, Any]) -> None:
        """Takes a line; lines of kinds that this version does not know say nothing."""
        if "event" in value:
            self._event(event_from_json(value["event"]))
        readers: dict[str, Callable[[Any], None]] = {"decision": self._decide, "verdict": self._judge}
        readers["unanswered"] = lambda value: self.unanswered.append(as_type(value, Unanswered))
        for kind in value.keys() & readers.keys():
            try:
                readers[kind](value[kind])
            except (KeyError, TypeError, ValueError, ScheduleError) as error:
                raise ControlError(f"a {kind} that this version did not write: {error}") from None

    def _judge(self, value: Mapping[str, Any]) -> None:
        judged = self.decisions[int(value["number"])]
        why, taken_back = str(value.get("why", "")), not value["kept"]
        self.decisions[judged.number] = replace(judged, verdict=why, taken_back=taken_back)

    def _decide(self, value: Mapping[str, Any]) -> None:
        number = int(value["number"])
        self.configurations[number] = Configuration.from_json(json.dumps(value["configuration"]))
        self.decisions[number] = DecisionOutcome(
            number=number,
            action=str(value["action"]),
            reason=str(value["reason"]),
            plan=self.plan(number),
            began=self._began,
            made=int(value["iteration"]),
            ms_now=value["ms_now"],
            ms_then=float(value["ms_then"]),
            price=float(value["price"]),
        )
        self._began, self._waits = None, True

    def _event(self, event: Event) -> None:
        if isinstance(event, IterationEnded):
            self._end(event)
        elif isinstance(event, Switched):
            self._switch(event.number)
        elif isinstance(event, OpTimes | Transfers):
            self.monitor.feed(event)
        elif isinstance(event, Probed) and self.nodes is not None:
            self._probe(self.nodes, event)
        elif isinstance(event, LinkDown | LinkUp):
            self.monitor.note_path(event)
            became = "went down" if isinstance(event, LinkDown) else "came back"
            self.faults.append(Fault(self._last + 1, f"link {link_name(undirected(event.link))} {became}"))
        elif isinstance(event, Dropped) and event.number in self.decisions:
            self.decisions[event.number] = replace(self.decisions[event.number], outcome="given up")
            self._waits = False

    def _end(self, event: IterationEnded) -> None:
        """Ends an iteration, and notes when the changes began that it verifies."""
        number, changes = event.number, self.monitor.end_iteration(event.number)
        conditions, is_starting = None, self.job.is_starting(number)
        reported = self.monitor.reported
        delays = {each.link: median(each.ms) for each in reported if isinstance(each, Transfers)}
        if delays and not is_starting:
            factors = factors_of([each for each in reported if isinstance(each, OpTimes)], self.job.costs)
            conditions = MeasuredConditions(self.monitor.latest(event.ms), factors, frozenset(self.monitor.down))
        is_clean = self._is_clean and not self._waits and not is_starting
        self.iterations[number] = Iteration(
            number, event.ms, self._in_force, delays, is_clean=is_clean, conditions=conditions
        )
        if self.nodes is not None:
            for link, ms in self.nodes.excess.items():
                self._note_late(link, number, ms)
        self._began = min((number - change.num_iterations + 1 for change in changes), default=self._began)
        self._last, self._is_clean = number, True

    def _probe(self, nodes: Orchestrator, event: Probed) -> None:
        """Takes a round of probes. A link that it verifies as late has been late for some rounds."""
        known = set(nodes.excess)
        self._probed.append(self._last)
        if nodes.verifies(event):
            rounds = max((change.began for change in nodes.news), default=len(self._probed))
            began = self._probed[-rounds] if rounds < len(self._probed) else min(self.iterations, default=0)
            self._began = began if self._began is None else min(began, self._began)
            for link in set(nodes.excess) - known:
                for number in range(began, self._last + 1):
                    self._note_late(link, number, nodes.excess[link])

    def _note_late(self, link: Link, number: int, ms: float) -> None:
        """Notes a late link of a ring. Links of pipelines are known from their own messages."""
        assert self.job.mesh is not None, "only a mesh has nodes"
        use = self.job.mesh.use(*link)
        if use.group is LinkGroup.DP:
            self.late_nodes.setdefault((link, str(use)), {})[number] = ms

    def _switch(self, number: int) -> None:
        if number not in self.configurations:
            raise ControlError(f"the log switches to decision {number}, which it does not have")
        was, then = self.configurations[self._in_force], self.configurations[number]
        if was.nodes != then.nodes:
            self.monitor.relocate({})
        else:
            self.monitor.move(set(was.delegated) ^ set(then.delegated))
        self._in_force, self._waits, self._is_clean = number, False, False

    def measured(self, record: IterationRecord) -> Timeline:
        """The ops of a line of timelines.jsonl."""
        if record.number not in self.configurations:
            raise ControlError(f"timelines.jsonl does not fit the log, which has no decision {record.number}")
        configuration = self.configurations[record.number]
        ops = [TimedOp(rank, Op(kind, *where), start, end) for rank, kind, *where, start, end in record.ops]
        ops.sort(key=lambda timed: (timed.rank, timed.start))
        none = (0.0,) * configuration.schedule.num_ranks
        return Timeline(configuration.schedule, tuple(ops), (), none, "measured", configuration.dispatch.value)

    def plan(self, decision: int) -> RunPlan:
        """What runs with a decision, as a report names it; 0 is the start."""
        then = self.configurations[decision]
        is_replanned = then.schedule != self.job.start.schedule
        return RunPlan(then.schedule.name, then.dispatch.value, then.delegated, then.nodes, is_replanned)

    def what_if(self, decision: int, seen: Iteration) -> float | None:
        """What an iteration would have taken (ms) with the configuration of a decision, simulated with the links and
        op times that were measured in the iteration. None without measurements, or if a dead link would have stopped
        it.

            messages of iteration 17     each link's delays over the iteration     configuration
                6:7  60.1 59.8 60.3 ...  -->  a trace of delays                -->  simulate  -->  ms
            ops of iteration 17                                                        ^
                stage 3  F 10.1  W 13.0  -->  the job's costs, W of stage 3 times 1.3 -+
        """
        then = self.configurations[decision]
        if seen.conditions is None or not seen.conditions.down <= set(then.delegated):
            return None
        return predict(self._job_in(seen.conditions), then, [seen.conditions.links.links()])

    def timeline(self, seen: Iteration) -> Timeline | None:
        """An iteration as it ran, simulated in the same way."""
        if seen.conditions is None:
            return None
        ran = self.configurations[seen.decision]
        return run_once(self._job_in(seen.conditions), ran, seen.conditions.links.links())

    def _job_in(self, conditions: MeasuredConditions) -> Job:
        return replace(self.job, costs=scaled(self.job.costs, conditions.factors))


MOST = 300
"""Iterations that are simulated with what ran, and with the first configuration: all, or so many, evenly picked."""
MOST_BEFORE = 16
"""Iterations before a change, and after it, whose median is compared."""
COUNTED = {
    "failovers": "connections that went on over another interface",
    "failbacks": "connections that went back to a better interface",
    "reconnects": "connections made again over the same interface",
    "resent": "chunks of messages sent again",
    "starved": "messages that waited for room in host memory",
}
"""What delegates count, in words; where none of it happened nothing is said."""
_STANDS_OUT = 3.0
"""Times what a quarter of the messages take at most: a delay above that is the link's own."""
_WILD = 5.0
"""Deviations above the median from which on a delay is no noise."""
BYTES = 1e4
"""Activations above this are bytes, not units."""
Late = Mapping[tuple[Link, str], Mapping[int, float]]
"""By link and what it serves, its delay (ms) in each iteration in which it was late."""


def read_story(
    log: Iterable[str],
    *,
    name: str,
    iterations: Iterable[str] = (),
    timelines: Iterable[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    most: int = MOST,
    first: int = 0,
) -> RunStory:
    """Makes a run's story of the lines of its files.

    Args:
        log: of control.jsonl; one that was cut off is read as far as it goes.
        name: of the run; facts: what else there is to say of it, as names and values.
        iterations, timelines: of the files of these names.
        most: see `MOST`.
        first: the number of the first iteration; a run that trains counts its steps from 1.

    Raises:
        ControlError: no log, one of another version, or a run without an iteration.
    """
    read = ReadLog(log)
    rows = iteration_records(iterations, "iterations.jsonl", ControlError)
    told = iteration_records(timelines, "timelines.jsonl", ControlError)
    recorded = {each.why: (each.iteration, read.measured(each)) for each in told}
    if not read.iterations:
        raise ControlError("the log has no iteration that ended: there is nothing to report yet")
    found = _simulated(read, most)
    least = _least(read.job, found)
    late: Late = {**late_links(found, least), **read.late_nodes}
    undisturbed, source = _undisturbed(read.job, found, late)
    levels = Levels(read, found, main_spells(spells_of(late)))
    found = levels.with_baselines(undisturbed)
    decided = tuple(_measured(each, found, levels, undisturbed) for each in levels.decisions)
    faults = sorted((*read.faults, *_counted(rows)), key=lambda fault: fault.iteration or 0)

    def later(number: int | None) -> int | None:
        return None if number is None else number + first

    return RunStory(
        name=name,
        facts=(*_facts(read), *facts),
        links=tuple(sorted({link for row in found for link in row.delays}, key=lambda one: (undirected(one), one))),
        start=read.plan(0),
        iterations=tuple(replace(each, number=each.number + first) for each in found),
        decisions=tuple(
            replace(each, began=later(each.began), made=each.made + first, first=later(each.first))
            for each in decided
        ),
        spells=tuple(replace(each, numbers=tuple(one + first for one in each.numbers)) for each in spells_of(late)),
        memory=_memory(read, rows),
        smallest_delay=least,
        undisturbed=undisturbed,
        undisturbed_from=source,
        saved_error=levels.error,
        unanswered=tuple(
            f"After iteration {each.iteration + first}, steps had gone from {each.before:.4g} to {each.now:.4g} ms: "
            f"{each}"
            for each in read.unanswered
        ),
        faults=tuple(replace(each, iteration=later(each.iteration)) for each in faults),
        counters=_counters(rows),
        shown=_shown(read, decided, recorded, first),
    )


def _simulated(read: ReadLog, most: int) -> tuple[Iteration, ...]:
    """The iterations in order. Those with measurements are simulated, or `most` of them that are picked evenly."""
    rows = [read.iterations[number] for number in sorted(read.iterations)]

    def picked(there: list[int]) -> list[int]:
        return there if len(there) <= most else there[:: -(-len(there) // most)]

    ran = picked([each.number for each in rows if each.conditions is not None])
    changed = picked([each.number for each in rows if each.conditions is not None and each.decision])
    found = []
    for each in rows:
        simulated = read.what_if(each.decision, each) if each.number in ran else None
        kept = read.what_if(0, each) if each.number in changed else None
        found.append(replace(each, simulated=simulated, kept=kept if each.decision else each.ms))
    return tuple(found)


def _least(job: Job, rows: Sequence[Iteration]) -> float:
    """From which delay on (ms) a link counts as late: well above what every message takes on its way, and above what
    messages vary by on a busy machine, as far as that is small against a microbatch's part of an iteration.
    """
    delays = sorted(delay for row in rows for delay in row.delays.values())
    if not delays:
        return job.smallest_delay
    usual = min(delays[len(delays) // 4], job.mean_op / 4)
    wild = median(delays) + _WILD * AS_DEVIATION * median(abs(delay - median(delays)) for delay in delays)
    short = sorted(row.ms for row in rows)[len(rows) // 4] / (2 * job.start.schedule.num_microbatches)
    return max(job.smallest_delay, _STANDS_OUT * usual, min(wild, short))


def _undisturbed(job: Job, iterations: Sequence[Iteration], late: Late) -> tuple[float, str]:
    """How long an iteration of the first configuration takes with no link late, and how that is known."""
    ever = {number for numbers in late.values() for number in numbers}
    calm = [each.ms for each in iterations if each.decision == 0 and each.is_clean and each.number not in ever]
    if len(calm) >= FEWEST:
        return median(calm), f"median of the {len(calm)} iterations of the first configuration with no link late"
    # A machine that does not keep the simulated pace would not do so without late links either.
    longer = median([each.ms - each.simulated for each in iterations if each.simulated is not None] or [0.0])
    ms = predict(job, job.start, [Links()])
    said = f"simulated with no link late, and {longer:.3g} ms by which iterations differ from their simulation"
    return max(0.0, ms + longer), said


class Levels:
    """How long iterations took before each change, and what they are compared with.

    Attributes:
        decisions: with the first iteration that ran each, in order.
        error: the standard error (ms) of what all iterations together saved.
    """

    def __init__(self, read: ReadLog, iterations: Sequence[Iteration], spells: Sequence[LatePeriod]) -> None:
        self._read, self._iterations = read, iterations
        self.error = 0.0
        first = {each.decision: each.number for each in reversed(iterations)}
        self.decisions = [
            replace(each, first=first[number], outcome="ran") if number in first else each
            for number, each in sorted(read.decisions.items())
        ]
        self._late = self._with_moved(spells)

    def with_baselines(self, undisturbed: float) -> tuple[Iteration, ...]:
        """The iterations, each with what iterations took before the changes that run in it, under the same links."""
        digests = {number: each.digest for number, each in self._read.configurations.items()}
        known: dict[str, Sequence[Iteration]] = {digests[0]: ()}
        now: Sequence[Iteration] = ()
        before, found, compared = 0, [], Counter[tuple[float, ...]]()
        for each in self._iterations:
            if each.decision != before:
                change, digest = self._read.decisions[each.decision], digests[each.decision]
                if change.action == Action.TAKE_BACK.value or digest == digests[0]:
                    now = known.get(digest, ())
                else:
                    then = self.before(change)
                    are_alike = now and then and self._late[now[-1].number] == self._late[then[-1].number]
                    now = now if are_alike else then
                known[digest], before = now, each.decision
            reference = now or self._prepares(each)
            baseline = None
            if len(reference) >= FEWEST:
                was_late = sum(bool(self._late[one.number]) for one in reference) > len(reference) / 2
                if bool(self._late[each.number]) == was_late:
                    baseline = median(one.ms for one in reference)
                    compared[tuple(one.ms for one in reference)] += 1
                elif was_late:
                    baseline = undisturbed  # nothing is gained any more, something may be lost
            found.append(replace(each, baseline=baseline))
        noise = self._noise()
        self.error = sum(num * 1.2533 * noise * median(ms) / len(ms) ** 0.5 for ms, num in compared.items())
        return tuple(found)

    def _noise(self) -> float:
        """The deviation of clean iterations, as a share of the median of those that ran the same under the same
        links. A few of them would not show it.
        """
        groups: dict[tuple[int, frozenset[Link]], list[float]] = {}
        for each in self._iterations:
            if each.is_clean:
                groups.setdefault((each.decision, self._late[each.number]), []).append(each.ms)
        return deviation([ms / median(row) for row in groups.values() for ms in row if len(row) >= FEWEST] or [1.0])

    def before(self, change: DecisionOutcome) -> Sequence[Iteration]:
        """The clean iterations that a decision is compared with: those that ran what it replaced, under the links
        that were late when it was made, since what it answers began.
        """
        rows = [each for each in self._iterations if each.number <= change.made]
        if not rows:
            return ()
        links = self._late[rows[-1].number]
        rows = [each for each in rows if each.decision == rows[-1].decision and each.is_clean]
        began = self.began(change)
        since = [each for each in rows if self._late[each.number] == links and each.number >= (began or 0)]
        # The first late iteration was late in part only, if there are enough without it.
        skip = began is not None and len(since) > FEWEST and since[0].number == began
        return since[skip:][-MOST_BEFORE:]

    def began(self, change: DecisionOutcome) -> int | None:
        """The iteration in which what a decision answers began; None if nothing had begun.

        The controller also looks at links now and then, and may see a late one before it is verified. So it began
        where the links turned late that were late when the decision was made, if that was later than known.
        """
        rows = [each.number for each in self._iterations if each.number <= change.made][-MOST_BEFORE:]
        turned = None
        for number in reversed(rows):
            if not self._late[number] or self._late[number] != self._late[rows[-1]]:
                break
            turned = number
        is_turn = turned is not None and turned > rows[0]
        return change.began if change.began is not None else turned if is_turn else None

    def _prepares(self, each: Iteration) -> Sequence[Iteration]:
        """What an iteration between a decision and its switch is compared with."""
        last = next((one for one in reversed(self.decisions) if one.made < each.number), None)
        is_preparing = not each.is_clean and last is not None and (last.first or each.number) >= each.number
        return self.before(last) if last is not None and is_preparing else ()

    def _with_moved(self, spells: Sequence[LatePeriod]) -> dict[int, frozenset[Link]]:
        """The links that are late in each iteration. A link that was late when it was delegated, or when nodes
        moved, and is not late on its new path, counts as late until its messages take the old path again.
        """
        measured: dict[int, set[Link]] = {each.number: set() for each in self._iterations}
        for spell in spells:
            for number in measured.keys() & set(range(spell.first, spell.last + 1)):
                measured[number].add(spell.link)
        found: dict[int, frozenset[Link]] = {}
        moved: set[Link] = set()
        before, latest = 0, frozenset[Link]()
        for place, each in enumerate(self._iterations):
            if each.decision != before:
                then = self._read.configurations[each.decision]
                elsewhere = then.nodes != self._read.job.start.nodes
                carried = {link for link in latest if elsewhere or link in then.delegated}
                next_ones = self._iterations[place : place + FEWEST]
                moved = carried - {link for one in next_ones for link in measured[one.number]}
                before = each.decision
            latest = found[each.number] = frozenset(measured[each.number] | moved)
        return found


def _measured(
    change: DecisionOutcome, found: Sequence[Iteration], levels: Levels, undisturbed: float
) -> DecisionOutcome:
    """A decision with what iterations took before and after it, and what they saved."""
    mine = [each for each in found if each.decision == change.number]
    until = change.first or change.made
    preparing = [each for each in found if not each.is_clean and change.made < each.number < until]
    known = [each for each in (*preparing, *mine) if each.baseline is not None]
    before, after = levels.before(change), [each for each in mine if each.is_clean][:MOST_BEFORE]
    return replace(
        change,
        began=levels.began(change),
        measured_before=_median(before),
        measured_after=_median(after),
        saved=saved_by(known, undisturbed)[0] if known else None,
    )


def _median(rows: Sequence[Iteration]) -> float | None:
    return median(each.ms for each in rows) if len(rows) >= FEWEST else None


def _memory(read: ReadLog, records: Iterable[IterationRecord]) -> RunMemory:
    """The most each rank held: as the records say, or else by the orders of the schedules that ran."""
    ran = [read.configurations[number] for number in {0, *(row.decision for row in read.iterations.values())}]
    rows = [tuple(record.peaks) for record in records if record.peaks]
    source = "measured" if rows else "by each schedule's own order"
    rows = rows or [tuple(peaks(each.schedule, read.job.costs)) for each in ran]
    most, allowed = (tuple(map(max, zip(*each, strict=True))) for each in (rows, [each.caps for each in ran]))
    in_bytes = max(allowed) >= BYTES
    scale = 2.0**20 if in_bytes else 1.0
    unit = "MiB of activations" if in_bytes else "activations"
    return RunMemory(tuple(each / scale for each in most), tuple(each / scale for each in allowed), unit, source)


def _counters(records: Sequence[IterationRecord]) -> tuple[tuple[str, float], ...]:
    """What the delegates of all ranks had counted in the end."""
    last = next((record.counters for record in reversed(records) if record.counters), {})
    return tuple((words, float(last[name])) for name, words in COUNTED.items() if last.get(name))


def _counted(records: Sequence[IterationRecord]) -> list[Fault]:
    """Iterations in which a count rose that speaks of a fault."""
    found, before = [], dict[str, float]()
    for record in records:
        rose = {name: count - before.get(name, 0) for name, count in (record.counters or {}).items()}
        before |= record.counters or {}
        if said := [
            f"{words}: {rose[name]}" for name, words in COUNTED.items() if rose.get(name, 0) > 0 and name != "starved"
        ]:
            found.append(Fault(record.iteration, ", ".join(said)))
    return found


def _shown(
    read: ReadLog, decided: Sequence[DecisionOutcome], recorded: Mapping[str, tuple[int, Timeline]], start: int
) -> tuple[tuple[str, Timeline], ...]:
    """An iteration before the switch that gained most and one after it: measured if both were recorded."""
    there = [each for each in decided if each.outcome == "ran"]
    if not there:
        return ()
    best = max(there, key=lambda each: ((each.ms_now or each.ms_then) - each.ms_then, -each.number))
    found = [recorded[why] for why in (f"before {best.number}", f"after {best.number}") if why in recorded]
    if len(found) < 2:
        first = best.first or 0
        numbers = first - 1, first + 1 if first + 1 in read.iterations else first
        ran = [(number, read.timeline(read.iterations[number])) for number in numbers if number in read.iterations]
        found = [(number, timeline) for number, timeline in ran if timeline is not None]
    return tuple(
        (f"iteration {at + start}: {read.plan(read.iterations[at].decision)}", timeline) for at, timeline in found
    )


def _facts(read: ReadLog) -> tuple[tuple[str, str], ...]:
    schedule = read.job.start.schedule
    return (
        ("schedule", schedule.name),
        ("ranks", str(schedule.num_ranks)),
        ("microbatches", str(schedule.num_microbatches)),
        ("mean op", f"{read.job.mean_op:.3g} ms"),
        ("first configuration", str(read.plan(0))),
    )
