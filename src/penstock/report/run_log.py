"""The records of a run under control, read into its iterations and decisions. Nothing is decided again.

    control.jsonl      the controller's log: every message's time, every decision       needed
    iterations.jsonl   one line an iteration, from the first one on                     if there
    timelines.jsonl    when the ops of some iterations ran                              if there

Links, stages and nodes are watched again, as the controller watched them, so that alarms and late links are those
that the controller saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import Any, TypeVar

import msgspec

from penstock.control.advice import Unanswered
from penstock.control.closed_loop_simulation import run_once
from penstock.control.compute import Factors, scaled
from penstock.control.configuration import Configuration
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
    as_type,
    event_from_json,
    read_link,
    undirected,
)
from penstock.control.log import json_lines, read_header
from penstock.control.measured import JobMonitor
from penstock.control.orchestrator import Orchestrator
from penstock.cost import Costs
from penstock.cost.mesh import LinkGroup
from penstock.formats.traces.penstock_run import TimelineRecord
from penstock.report.run_story import DecisionOutcome, Fault, Iteration, MeasuredConditions, RunPlan, link_name
from penstock.schedule import Op, ScheduleError
from penstock.simulation import TimedOp, Timeline

T = TypeVar("T")
WARM_UP = 2
"""The first iterations of a run, in which memory is allotted and connections are made: no median counts them."""
_AS_ASSUMED = 0.005
"""Share of its assumed time that an op may differ by and still count as taking just that."""


class IterationRecord(msgspec.Struct):
    """A line of iterations.jsonl: an iteration, the decision in force, each link's median delay, the most that each
    rank held, and what its delegates had counted.
    """

    iteration: int
    number: int
    ms: float
    links: dict[str, float]
    peaks: list[float] | None = None
    counters: dict[str, int | float] | None = None


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
        self._times: dict[Link, list[float]] = {}
        self._ops: list[OpTimes] = []
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
        readers = {"decision": self._decide, "verdict": self._judge, "unanswered": self._leave}
        for kind in value.keys() & readers.keys():
            try:
                readers[kind](value[kind])
            except (KeyError, TypeError, ValueError, ScheduleError) as error:
                raise ControlError(f"a {kind} that this version did not write: {error}") from None

    def _judge(self, value: Mapping[str, Any]) -> None:
        judged = self.decisions[int(value["number"])]
        why, taken_back = str(value.get("why", "")), not value["kept"]
        self.decisions[judged.number] = replace(judged, verdict=why, taken_back=taken_back)

    def _leave(self, value: Mapping[str, Any]) -> None:
        self.unanswered.append(as_type(value, Unanswered))

    def _decide(self, value: Mapping[str, Any]) -> None:
        configuration = Configuration.from_json(json.dumps(value["configuration"]))
        decision = DecisionOutcome(
            number=int(value["number"]),
            action=str(value["action"]),
            reason=str(value["reason"]),
            plan=self._plan_of(configuration),
            began=self._began,
            made=int(value["iteration"]),
            ms_now=value["ms_now"],
            ms_then=float(value["ms_then"]),
            price=float(value["price"]),
        )
        self.decisions[decision.number] = decision
        self.configurations[decision.number] = configuration
        self._began, self._waits = None, True

    def _event(self, event: Event) -> None:
        if isinstance(event, IterationEnded):
            self._end(event)
        elif isinstance(event, Switched):
            self._switch(event.number)
        elif isinstance(event, OpTimes):
            self.monitor.feed(event)
            self._ops.append(event)
        elif isinstance(event, Transfers):
            self.monitor.feed(event)
            self._times.setdefault(event.link, []).extend(event.ms)
        elif isinstance(event, Probed) and self.nodes is not None:
            self._probe(self.nodes, event)
        elif isinstance(event, LinkDown | LinkUp):
            link, is_down = undirected(event.link), isinstance(event, LinkDown)
            (self.monitor.down.add if is_down else self.monitor.down.discard)(link)
            became = "went down" if is_down else "came back"
            self.faults.append(Fault(self._last + 1, f"link {link_name(link)} {became}"))
        elif isinstance(event, Dropped) and event.number in self.decisions:
            self.decisions[event.number] = replace(self.decisions[event.number], outcome="given up")
            self._waits = False

    def _end(self, event: IterationEnded) -> None:
        """Ends an iteration, and notes when the changes began that it verifies."""
        number, changes = event.number, self.monitor.end_iteration()
        conditions = None
        if self._times:
            factors = factors_of(self._ops, self.job.costs)
            conditions = MeasuredConditions(self.monitor.latest(event.ms), factors, frozenset(self.monitor.down))
        delays = {link: median(times) for link, times in self._times.items()}
        is_clean = self._is_clean and not self._waits
        self.iterations[number] = Iteration(
            number, event.ms, self._in_force, delays, is_clean=is_clean, conditions=conditions
        )
        if self.nodes is not None:
            for link, ms in self.nodes.excess.items():
                self._note_late(link, number, ms)
        self._began = min((number - change.num_iterations + 1 for change in changes), default=self._began)
        self._times, self._ops, self._last, self._is_clean = {}, [], number, True

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

    def add_record(self, record: IterationRecord) -> None:
        """Takes a line of iterations.jsonl: iterations before the log began, and which decision was in force."""
        number, in_force = record.iteration, record.number
        self._configuration(in_force, "iterations.jsonl")
        if number in self.iterations:
            self.iterations[number] = replace(self.iterations[number], decision=in_force)
        else:
            delays = {read_link(name): ms for name, ms in record.links.items()}
            self.iterations[number] = Iteration(number, record.ms, in_force, delays, is_clean=number >= WARM_UP)

    def measured(self, record: TimelineRecord) -> Timeline:
        """The ops of a line of timelines.jsonl."""
        configuration = self._configuration(record.number, "timelines.jsonl")
        ops = [TimedOp(rank, Op(kind, *where), start, end) for rank, kind, *where, start, end in record.ops]
        ops.sort(key=lambda timed: (timed.rank, timed.start))
        none = (0.0,) * configuration.schedule.num_ranks
        return Timeline(configuration.schedule, tuple(ops), (), none, "measured", configuration.dispatch.value)

    def _configuration(self, decision: int, file: str) -> Configuration:
        if decision not in self.configurations:
            raise ControlError(f"{file}: a line that does not fit the log, which has no decision {decision}")
        return self.configurations[decision]

    def plan(self, decision: int) -> RunPlan:
        """What runs with a decision, as a report names it; 0 is the start."""
        return self._plan_of(self.configurations[decision])

    def _plan_of(self, then: Configuration) -> RunPlan:
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
        return run_on(self._costs(seen.conditions), self.job.transport, then, seen.conditions.links.links()).makespan

    def timeline(self, seen: Iteration) -> Timeline | None:
        """An iteration as it ran, simulated in the same way."""
        if seen.conditions is None:
            return None
        ran, costs = self.configurations[seen.decision], self._costs(seen.conditions)
        return run_once(replace(self.job, costs=costs), ran, seen.conditions.links.links())

    def _costs(self, conditions: MeasuredConditions) -> Costs:
        return scaled(self.job.costs, conditions.factors)


def records(lines: Iterable[str], file: str, kind: type[T]) -> list[T]:
    """The lines of a run's file. Raises ControlError for a line of another kind."""
    found = []
    for value in json_lines(lines, file):
        try:
            found.append(as_type(value, kind))
        except ControlError as error:
            raise ControlError(f"{file}: a line that does not fit the log: {error}") from None
    return found


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
