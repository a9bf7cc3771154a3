"""A controller's log: JSON lines, from which `replay` makes the same decisions again.

{"controller": {"version": 6, "job": {...}}}
{"event":{"transfers":{"link":[0,1],"num_bytes":[16777216.0],"ms":[30.0,30.2,61.0],"busy":0.0,"held":0.0}}}
{"event":{"iteration":{"number":7,"ms":412.0}}}
{"decision":{"number":1,...}}
{"verdict":{"number":1,"kept":true,...}}          what measured steps said of a decision
{"unanswered":{"obstacle":"memory",...}}          links that are late, and why nothing is changed

Times have three digits, which gzip makes a sixth of: `gzip control.jsonl` when a run is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.control.advice import Unanswered
from penstock.control.configuration import Job, job_from_json, job_to_json
from penstock.control.decide import Decision
from penstock.control.events import ControlError, Event, event_to_json
from penstock.control.trial import Verdict

VERSION = 6


def header(job: Job) -> str:
    """The log's first line."""
    return _line({"controller": {"version": VERSION, "job": job_to_json(job)}})


def event_line(event: Event) -> str:
    return _line({"event": event_to_json(event)})


def outcome_line(said: Decision | Verdict | Unanswered) -> str:
    """What the controller said of the last event."""
    value = said.to_json() if isinstance(said, Decision) else msgspec.to_builtins(said)
    return _line({type(said).__name__.lower(): value})


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_header(value: Any) -> Job:
    """Reads the first line, parsed.

    Raises:
        ControlError: no log, or one of another version.
    """
    first = value.get("controller") if isinstance(value, dict) else None
    if not isinstance(first, dict) or first.get("version") != VERSION:
        raise ControlError(f"no controller's log of version {VERSION}: its first line is {str(value)[:80]!r}")
    return job_from_json(first.get("job", {}))


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
