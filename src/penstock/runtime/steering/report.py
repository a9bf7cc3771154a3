"""What a rank tells of one iteration: when its ops ran, how its messages came in, and what became of its links."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.control import Event, IterationEnded, OpTimes, Transfers
from penstock.control.events import OP_KINDS, event_from_json, event_to_json
from penstock.runtime.transports.crossing import Crossing
from penstock.schedule import Op

Timed = Sequence[tuple[Op, int, int]]
"""(op, start, end) in nanoseconds of the rank's clock."""


@dataclass(frozen=True)
class Report:
    """One rank's iteration.

    Attributes:
        iteration: from 0; rank: whose.
        begin, end: of the iteration on this rank, in nanoseconds of its clock.
        ops: when each ran. crossings: messages that came in.
        offset: nanoseconds that this rank's clock is ahead of rank 0's.
        events: links that went down or came back.
    """

    iteration: int
    rank: int
    begin: int
    end: int
    ops: Timed
    crossings: Sequence[Crossing] = ()
    offset: int = 0
    events: Sequence[Event] = ()

    @property
    def ns(self) -> int:
        return self.end - self.begin

    def to_json(self) -> bytes:
        value = {
            "iteration": self.iteration,
            "rank": self.rank,
            "begin": self.begin,
            "end": self.end,
            "offset": self.offset,
            "ops": [[op.kind, op.stage, op.microbatch, start, end] for op, start, end in self.ops],
            "crossings": [list(each) for each in self.crossings],
            "events": [event_to_json(event) for event in self.events],
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Report:
        value: dict[str, Any] = json.loads(data)
        value["ops"] = [(Op(kind, stage, m), start, end) for kind, stage, m, start, end in value["ops"]]
        value["crossings"] = [Crossing(*each) for each in value["crossings"]]
        value["events"] = [event_from_json(each) for each in value["events"]]
        return cls(**value)


def events_of(reports: Sequence[Report], stretch: float = 1.0) -> list[Event]:
    """What a controller is told of an iteration, in an order that is always the same: rank by rank, then its end.

    Args:
        reports: of all ranks, by rank.
        stretch: milliseconds of the clock to one of the job's time.
    """
    offsets = {report.rank: report.offset for report in reports}
    scale = 1e6 * stretch
    events: list[Event] = []
    for report in reports:
        events += report.events
        by_link: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
        for crossing in report.crossings:
            row = (float(crossing.num_bytes), began(crossing, offsets) / scale, crossing.arrived / scale)
            by_link.setdefault((crossing.source, crossing.target), []).append(row)
        events += [Transfers.of(link, rows) for link, rows in sorted(by_link.items())]
        by_stage: dict[int, list[tuple[str, float]]] = {}
        for op, start, end in report.ops:
            if op.kind in OP_KINDS:
                by_stage.setdefault(op.stage, []).append((op.kind, (end - start) / scale))
        events += [OpTimes.of(report.rank, stage, ops) for stage, ops in sorted(by_stage.items())]
    events.append(IterationEnded(reports[0].iteration, round(max(report.ns for report in reports) / scale, 4)))
    return events


def began(crossing: Crossing, offsets: Mapping[int, int]) -> int:
    """When both sides were ready for a message, in nanoseconds of its receiver's clock."""
    ahead = offsets.get(crossing.target, 0) - offsets.get(crossing.source, 0)
    # Where nothing was posted ahead `posted` is the moment of sending, told by the sender's clock as well.
    posted = crossing.posted + (ahead if crossing.posted == crossing.sent else 0)
    return max(crossing.sent + ahead, posted)
