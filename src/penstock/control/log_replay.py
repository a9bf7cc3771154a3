"""Replay: from its log a controller makes the same decisions again."""

from __future__ import annotations

import json
from collections.abc import Iterable

from penstock.control.controller import Controller
from penstock.control.decide import Decision
from penstock.control.errors import ControlError
from penstock.control.events import event_from_json
from penstock.control.log import json_lines, read_header

OUTCOMES = {"decision", "verdict", "unanswered"}
"""What a controller says of an event, in lines after it."""


def replay(lines: Iterable[str]) -> tuple[Decision, ...]:
    """Feeds a log's events to a new controller, and compares its decisions with those of the log.

    If a log was cut off in the middle of its last line, or before the decision of its last event, it is read up to
        there.

    Args:
        lines: the lines of the log.

    Raises:
        ControlError: it is no log, or one of another version, or a decision differs; the message names the line.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> lines = []
        >>> late = ps.Links.parse("2:3=latency:steps:0ms/0ms,1600ms/60ms")
        >>> run = ps.control.rehearse(ps.control.Controller(job, log=lines.append), late, until=8_000)
        >>> ps.control.replay(lines) == run.decisions
        True
    """
    controller: Controller | None = None
    made: list[Decision] = []
    said: list[str] = []
    awaited: list[str] = []
    for number, value in enumerate(json_lines(lines, "the log"), start=1):
        line = json.dumps(value, separators=(",", ":"))
        if controller is None:
            controller = Controller(read_header(value), log=said.append)
        elif "event" in value:
            if awaited:
                raise ControlError(f"line {number}: what was decided is missing from the log: {awaited[0][:200]}")
            said.clear()
            made += controller.feed(event_from_json(value["event"]))
            awaited = said[1:]  # the first line is the event itself
        elif value.keys() & OUTCOMES:
            if not awaited or awaited[0] != line:
                again = awaited[0][:200] if awaited else "none"
                raise ControlError(f"line {number}: the log has {line[:200]}, replayed: {again}")
            awaited = awaited[1:]
        else:
            raise ControlError(
                f"line {number} of the log is neither an event nor a decision, verdict or finding: {line[:80]!r}"
            )
    if controller is None:
        raise ControlError("an empty log: its first line must name the job")
    return tuple(made)
