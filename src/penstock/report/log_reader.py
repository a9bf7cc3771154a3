"""A controller's log, read for what it tells of each iteration and each decision. Nothing is decided again.

What links and stages were watched for is watched again, so that alarms are counted as they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.control.advice import Unanswered
from penstock.control.configuration import Configuration, Job
from penstock.control.errors import ControlError
from penstock.control.events import (
    Dropped,
    Event,
    IterationEnded,
    Link,
    LinkDown,
    LinkUp,
    OpTimes,
    Switched,
    Transfer,
    Transfers,
    event_from_json,
    undirected,
)
from penstock.control.log import read_header
from penstock.control.measured import JobMonitor
from penstock.report.run_story import Fault
from penstock.report.what_if import ObservedIteration, factors_of
from penstock.schedule import ScheduleError


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
    """What a log tells."""

    job: Job
    monitor: JobMonitor
    seen: dict[int, ObservedIteration] = field(default_factory=dict)
    chosen: dict[int, LoggedDecision] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    verdicts: list[Mapping[str, Any]] = field(default_factory=list)
    unanswered: list[Unanswered] = field(default_factory=list)

    def configuration(self, decision: int) -> Configuration:
        return self.job.start if decision == 0 else self.chosen[decision].configuration

    def verdict(self, decision: int) -> Mapping[str, Any] | None:
        """The last verdict on a decision; None where there is none."""
        return next((each for each in reversed(self.verdicts) if each["number"] == decision), None)


def json_lines(lines: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    """Lines of JSON objects; the last one may be cut off."""
    rows = [line for line in lines if line.strip()]
    for number, line in enumerate(rows, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(rows):
                return
            raise ControlError(f"line {number} of {name} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ControlError(f"line {number} of {name} is no JSON object: {line[:60]!r}")
        yield value


def read_log(lines: Iterable[str]) -> LogContents:
    """Reads control.jsonl as far as it goes. Raises ControlError for what is no log, or one of another version."""
    contents: LogContents | None = None
    times: dict[Link, list[float]] = {}
    busy: dict[Link, float] = {}
    ops: list[OpTimes] = []
    force, last = 0, -1
    began: int | None = None
    for value in json_lines(lines, "the log"):
        if contents is None:
            job, sensitivity = read_header(value)
            contents = LogContents(job, JobMonitor(job, sensitivity))
        elif "decision" in value:
            chosen = _chosen(value["decision"], began)
            contents.chosen[chosen.number] = chosen
            began = None
        elif "verdict" in value:
            contents.verdicts.append(value["verdict"])
        elif "unanswered" in value:
            contents.unanswered.append(_unanswered(value["unanswered"]))
        elif "event" in value:
            event = event_from_json(value["event"])
            if isinstance(event, IterationEnded):
                factors = factors_of(ops, contents.job.costs)
                began = _end(
                    contents, ObservedIteration(event.number, event.ms, force, times, busy, factors=factors), began
                )
                times, busy, ops, last = {}, {}, [], event.number
            elif isinstance(event, Switched):
                _switch(contents, force, event.number)
                force = event.number
            elif isinstance(event, Transfer | Transfers | OpTimes):
                contents.monitor.feed(event)
                if isinstance(event, Transfers):
                    times.setdefault(event.link, []).extend(event.ms)
                    busy[event.link] = event.busy or 0.0
                elif isinstance(event, Transfer):
                    times.setdefault(event.link, []).append(event.ms)
                else:
                    ops.append(event)
            else:
                _news(contents, event, last)
    if contents is None:
        raise ControlError(
            "an empty log: its first line must name the job, and a run writes it when its controller has started, "
            "some steps after it began; train for more steps"
        )
    return contents


def _end(contents: LogContents, seen: ObservedIteration, began: int | None) -> int | None:
    """Ends an iteration; returns when what is verified with it began, or `began` where nothing is."""
    changes = contents.monitor.end_iteration(seen.ms)
    contents.seen[seen.number] = replace(seen, down=frozenset(contents.monitor.down))
    chosen = contents.chosen.get(seen.decision)
    if chosen is not None and chosen.first is None:
        chosen.first = seen.number
    return min((seen.number - change.num_iterations + 1 for change in changes), default=began)


def _news(contents: LogContents, event: Event, last: int) -> None:
    """A link that went or came back, a decision given up."""
    if isinstance(event, LinkDown):
        contents.monitor.down.add(undirected(event.link))
        contents.faults.append(Fault(last + 1, f"link {_shown(event.link)} went down"))
    elif isinstance(event, LinkUp):
        contents.monitor.down.discard(undirected(event.link))
        contents.faults.append(Fault(last + 1, f"link {_shown(event.link)} came back"))
    elif isinstance(event, Dropped) and event.number in contents.chosen:
        contents.chosen[event.number].outcome = "given up"


def _shown(link: Link) -> str:
    low, high = undirected(link)
    return f"{low}–{high}"


def _switch(contents: LogContents, before: int, now: int) -> None:
    if now not in contents.chosen:
        raise ControlError(f"the log switches to decision {now}, which it does not have")
    contents.chosen[now].outcome = "ran"
    was, then = contents.configuration(before), contents.configuration(now)
    if was.nodes != then.nodes:
        contents.monitor.relocate({})
    else:
        contents.monitor.move(set(was.delegated) ^ set(then.delegated), was.delegated)


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
            times = {_link(name): [float(ms)] for name, ms in record["links"].items()}
            contents.seen[number] = ObservedIteration(number, float(record["ms"]), force, times)
        if force:
            chosen = contents.chosen[force]
            chosen.first = number if chosen.first is None else min(chosen.first, number)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ControlError(
            f"iterations.jsonl: a line that does not fit the log: {error!r} in {record!r}"[:300]
        ) from None


def _link(name: str) -> Link:
    source, _, target = name.partition(":")
    return int(source), int(target)
