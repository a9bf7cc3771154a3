"""The records of a run, read into what they say of each iteration and each decision. Nothing is decided again.

    control.jsonl      the controller's log: every message's time, every decision       needed
    iterations.jsonl   one line an iteration, from the first one on                     if there
    timelines.jsonl    when the ops of some iterations ran                              if there

Links, stages and nodes are watched again, as the controller watched them, so that alarms and late links are those
that the controller saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from penstock.control.advice import Unanswered
from penstock.control.closed_loop_simulation import run_once
from penstock.control.compute import Factors, scaled
from penstock.control.configuration import Configuration, Job
from penstock.control.decide import run_on
from penstock.control.errors import ControlError
from penstock.control.events import (
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
    event_from_json,
    read_link,
    undirected,
)
from penstock.control.log import json_lines, read_header
from penstock.control.measured import JobMonitor, LinksOfStep
from penstock.control.orchestrator import Orchestrator
from penstock.cost import Costs, Links
from penstock.cost.mesh import LinkGroup
from penstock.report.run_story import Fault, link_name
from penstock.schedule import Op, ScheduleError
from penstock.simulation import TimedOp, Timeline

WARM_UP = 2
"""The first iterations of a run, in which memory is allotted and connections are made: no median counts them."""
_AS_ASSUMED = 0.005
"""Share of its assumed time that an op may differ by and still count as taking just that."""


@dataclass(frozen=True)
class ObservedIteration:
    """One iteration as it was seen.

    Attributes:
        number: from 0. ms: how long it took. decision: the number of the one in force.
        delays: of each direction of a link, the median time of its messages (ms).
        links: the links as measured, for simulation; None for iterations before the log began.
        factors: how many times as long as assumed ops took.
        down: links (lower rank first) whose own path was dead.
        is_clean: see `Iteration.is_clean`.
    """

    number: int
    ms: float
    decision: int
    delays: Mapping[Link, float]
    links: LinksOfStep | None = None
    factors: Factors = ()
    down: frozenset[Link] = frozenset()
    is_clean: bool = True


@dataclass
class LoggedDecision:
    """A decision as the log tells it."""

    number: int
    value: Mapping[str, Any]
    configuration: Configuration
    began: int | None
    first: int | None = None
    outcome: str = "open"


@dataclass
class LogContents:
    """What the records of a run say."""

    job: Job
    monitor: JobMonitor
    nodes: Orchestrator | None
    seen: dict[int, ObservedIteration] = field(default_factory=dict)
    chosen: dict[int, LoggedDecision] = field(default_factory=dict)
    late_nodes: dict[tuple[Link, str], dict[int, float]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    verdicts: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    unanswered: list[Unanswered] = field(default_factory=list)

    def configuration(self, decision: int) -> Configuration:
        return self.job.start if decision == 0 else self.chosen[decision].configuration

    def what_if(self, configuration: Configuration, seen: ObservedIteration) -> float | None:
        """What an iteration would have taken (ms) with a configuration, simulated with the links and op times that
        were measured in the iteration. None without measurements, or if a dead link would have stopped it.

            messages of iteration 17     each link's delays over the iteration     configuration
                6:7  60.1 59.8 60.3 ...  -->  a trace of delays                -->  simulate  -->  ms
            ops of iteration 17                                                        ^
                stage 3  F 10.1  W 13.0  -->  the job's costs, W of stage 3 times 1.3 -+

        A delegated link is measured on the path of its delegates. What they add is taken off for its own path.
        """
        if seen.links is None or not seen.down <= set(configuration.delegated):
            return None
        return run_on(*self._conditions(configuration, seen, seen.links)).makespan

    def timeline(self, seen: ObservedIteration) -> Timeline | None:
        """An iteration as it ran, simulated in the same way."""
        if seen.links is None:
            return None
        costs, _, configuration, links = self._conditions(self.configuration(seen.decision), seen, seen.links)
        return run_once(replace(self.job, costs=costs), configuration, links)

    def _conditions(
        self, configuration: Configuration, seen: ObservedIteration, measured: LinksOfStep
    ) -> tuple[Costs, int, Configuration, Links]:
        """The costs, the depth of links, the configuration and the links to simulate an iteration with."""
        ran, then = set(self.configuration(seen.decision).delegated), set(configuration.delegated)
        added = self.job.delegate_ms
        sooner = dict.fromkeys(ran - then, added) | dict.fromkeys(then - ran, -added)
        return scaled(self.job.costs, seen.factors), self.job.depth, configuration, measured.links(sooner)


class LogReader:
    """Takes the lines of control.jsonl one by one.

    Args:
        first: the first line, which names the job.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        job, sensitivity = read_header(first)
        nodes = None if job.mesh is None else Orchestrator(job, job.mesh)
        self.contents = LogContents(job, JobMonitor(job, sensitivity), nodes)
        self._times: dict[Link, list[float]] = {}
        self._ops: list[OpTimes] = []
        self._force, self._last = 0, -1
        self._began: int | None = None
        self._is_clean = True
        """Whether no decision waits for its switch and the last switch lies an iteration back."""
        self._waits = False
        self._probed: list[int] = []

    def take(self, value: Mapping[str, Any]) -> None:
        """Takes a line; lines of kinds that this version does not know say nothing."""
        contents = self.contents
        if "event" in value:
            self._event(event_from_json(value["event"]))
        elif "decision" in value:
            chosen = _chosen(value["decision"], self._began)
            contents.chosen[chosen.number] = chosen
            self._began, self._waits = None, True
        elif "verdict" in value:
            contents.verdicts[int(value["verdict"]["number"])] = value["verdict"]
        elif "unanswered" in value:
            contents.unanswered.append(_unanswered(value["unanswered"]))

    def _event(self, event: Event) -> None:
        contents = self.contents
        if isinstance(event, IterationEnded):
            self._end(event)
        elif isinstance(event, Switched):
            self._switch(event.number)
        elif isinstance(event, Transfers | OpTimes):
            contents.monitor.feed(event)
            if isinstance(event, OpTimes):
                self._ops.append(event)
            else:
                ms = event.ms if isinstance(event, Transfers) else (event.ms,)
                self._times.setdefault(event.link, []).extend(ms)
        elif isinstance(event, Probed) and contents.nodes is not None:
            self._probe(contents.nodes, event)
        elif isinstance(event, LinkDown):
            contents.monitor.down.add(undirected(event.link))
            contents.faults.append(Fault(self._last + 1, f"link {link_name(undirected(event.link))} went down"))
        elif isinstance(event, LinkUp):
            contents.monitor.down.discard(undirected(event.link))
            contents.faults.append(Fault(self._last + 1, f"link {link_name(undirected(event.link))} came back"))
        elif isinstance(event, Dropped) and event.number in contents.chosen:
            contents.chosen[event.number].outcome = "given up"
            self._waits = False

    def _end(self, event: IterationEnded) -> None:
        """Ends an iteration, and notes when what is verified with it began."""
        contents = self.contents
        changes = contents.monitor.end_iteration()
        contents.seen[event.number] = ObservedIteration(
            event.number,
            event.ms,
            self._force,
            {link: median(times) for link, times in self._times.items()},
            contents.monitor.latest((), event.ms) if self._times else None,
            factors_of(self._ops, contents.job.costs),
            frozenset(contents.monitor.down),
            self._is_clean and not self._waits,
        )
        chosen = contents.chosen.get(self._force)
        if chosen is not None and chosen.first is None:
            chosen.first = event.number
        if contents.nodes is not None:
            for link, ms in contents.nodes.excess.items():
                self._note_late(link, event.number, ms)
        self._began = min((event.number - change.num_iterations + 1 for change in changes), default=self._began)
        self._times, self._ops, self._last, self._is_clean = {}, [], event.number, True

    def _probe(self, nodes: Orchestrator, event: Probed) -> None:
        """Takes a round of probes. A link that it verifies as late has been late for some rounds."""
        known = set(nodes.excess)
        self._probed.append(self._last)
        if nodes.verifies(dict(event.times)):
            rounds = max((change.began for change in nodes.news), default=len(self._probed))
            began = self._probed[-rounds] if rounds < len(self._probed) else min(self.contents.seen, default=0)
            self._began = began if self._began is None else min(began, self._began)
            for link in set(nodes.excess) - known:
                for number in range(began, self._last + 1):
                    self._note_late(link, number, nodes.excess[link])

    def _note_late(self, link: Link, number: int, ms: float) -> None:
        """Notes a late link of a ring. Links of pipelines are known from their own messages."""
        assert self.contents.job.mesh is not None, "only a mesh has nodes"
        use = self.contents.job.mesh.use(*link)
        if use.group is LinkGroup.DP:
            self.contents.late_nodes.setdefault((link, str(use)), {})[number] = ms

    def _switch(self, number: int) -> None:
        contents = self.contents
        if number not in contents.chosen:
            raise ControlError(f"the log switches to decision {number}, which it does not have")
        contents.chosen[number].outcome = "ran"
        was, then = contents.configuration(self._force), contents.configuration(number)
        if was.nodes != then.nodes:
            contents.monitor.relocate({})
        else:
            contents.monitor.move(set(was.delegated) ^ set(then.delegated), was.delegated)
        self._force, self._waits, self._is_clean = number, False, False


def read_log(lines: Iterable[str]) -> LogContents:
    """Reads control.jsonl as far as it goes. Raises ControlError for what is no log, or one of another version."""
    reader: LogReader | None = None
    for value in json_lines(lines, "the log"):
        if reader is None:
            reader = LogReader(value)
        else:
            reader.take(value)
    if reader is None:
        raise ControlError(
            "an empty log: its first line must name the job, and a run writes it when its controller has started, "
            "some steps after it began; train for more steps"
        )
    return reader.contents


def factors_of(ops: Iterable[OpTimes], costs: Costs) -> Factors:
    """How many times as long as the costs say each kind of op took on each stage; kinds that took as long as the
    costs say are left out.
    """
    rows = {"F": costs.f, "I": costs.i, "W": costs.w, "B": costs.b}
    found = []
    for each in ops:
        for kind, halves in each.ms:
            assumed = rows[kind][each.stage] if kind in rows and each.stage < costs.num_stages else 0.0
            factor = fmean(halves) / assumed if assumed > 0 else 1.0
            if abs(factor - 1) > _AS_ASSUMED and factor > 0:
                found.append((each.stage, kind, factor))
    return tuple(sorted(found))


def _unanswered(value: Mapping[str, Any]) -> Unanswered:
    try:
        return Unanswered.from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ControlError(f"a finding that this version did not write: {error}") from None


def _chosen(value: Mapping[str, Any], began: int | None) -> LoggedDecision:
    try:
        configuration = Configuration.from_json(json.dumps(value["configuration"]))
        return LoggedDecision(int(value["number"]), value, configuration, began)
    except (KeyError, TypeError, ScheduleError) as error:
        raise ControlError(f"a decision that this version did not write: {error}") from None


def add_record(contents: LogContents, record: Mapping[str, Any]) -> None:
    """Takes a line of iterations.jsonl: iterations before the log began, and which decision was in force."""
    try:
        number, force = int(record["iteration"]), int(record["number"])
        known = contents.seen.get(number)
        if known is not None:
            contents.seen[number] = replace(known, decision=force)
        else:
            delays = {read_link(name): float(ms) for name, ms in record["links"].items()}
            clean = number >= WARM_UP
            contents.seen[number] = ObservedIteration(number, float(record["ms"]), force, delays, is_clean=clean)
        if force:
            chosen = contents.chosen[force]
            chosen.first = number if chosen.first is None else min(chosen.first, number)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ControlError(
            f"iterations.jsonl: a line that does not fit the log: {error!r} in {record!r}"[:300]
        ) from None


def measured_timeline(contents: LogContents, record: Mapping[str, Any]) -> tuple[str, tuple[int, Timeline]]:
    """A line of timelines.jsonl: why the iteration was recorded, its number, and its ops. Raises ControlError for a
    line that does not fit the log.
    """
    try:
        iteration = int(record["iteration"])
        configuration = contents.configuration(int(record["number"]))
        ops = [
            TimedOp(int(rank), Op(str(kind), int(stage), int(microbatch)), float(start), float(end))
            for rank, kind, stage, microbatch, start, end in record["ops"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ControlError(
            f"timelines.jsonl: a line that does not fit the log: {error!r} in {str(record)[:200]}"
        ) from None
    ops.sort(key=lambda timed: (timed.rank, timed.start))
    none = (0.0,) * configuration.schedule.num_ranks
    timeline = Timeline(configuration.schedule, tuple(ops), (), none, "measured", configuration.dispatch.value)
    return str(record.get("why")), (iteration, timeline)
