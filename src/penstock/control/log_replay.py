"""Replay: from its log a controller makes the same decisions again."""

from __future__ import annotations

import json
from collections.abc import Iterable

from penstock.control.controller import Controller
from penstock.control.decide import Decision
from penstock.control.events import ControlError, event_from_json
from penstock.control.log import json_lines, read_header


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
    again: list[str] = []
    for number, value in enumerate(json_lines(lines, "the log"), start=1):
        if controller is None:
            controller = Controller(read_header(value), log=again.append)
        elif "event" in value and len(again) < number:
            made += controller.feed(event_from_json(value["event"]))
        replayed = again[number - 1] if len(again) >= number else "null"
        if json.loads(replayed) != value:
            raise ControlError(f"line {number}: the log has {str(value)[:200]}, replayed: {replayed[:200]}")
    if controller is None:
        raise ControlError("an empty log: its first line must name the job")
    return tuple(made)
