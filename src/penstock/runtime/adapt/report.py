"""A rank's report of one iteration: when its ops ran, when its messages arrived, and the state of its links.

A rank's own thread turns measurements into the controller's events, so rank 0 only has to pass them on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from penstock.control import Event, IterationEnded, OpTimes, Transfers
from penstock.control.events import OP_KINDS, event_from_json, show_link, slowest_of
from penstock.control.log import event_line
from penstock.runtime.transport.base import TransferRecord
from penstock.schedule import Op


class MeasuredStep(NamedTuple):
    """What a rank measured of a step.

    Attributes:
        begin, end: of the step, in nanoseconds of the rank's clock; ops: each with its start and end.
        crossings: messages that came in. events: links that went down or came back.
        peak: most activations the rank held; counters: what its delegates have counted so far.
    """

    rank: int
    begin: int
    end: int
    ops: Sequence[tuple[Op, int, int]]
    crossings: Sequence[TransferRecord] = ()
    events: Sequence[Event] = ()
    peak: float = 0.0
    counters: Mapping[str, int] | None = None


@dataclass(frozen=True)
class RankReport:
    """One rank's iteration. All times are ms of the job, from when rank 0's clock showed 0.

    Attributes:
        iteration: from 0; rank: whose; ms: how long it took this rank.
        ops: rows of kind, stage, microbatch, start and end.
        events: lines for the controller, as its log has them.
        links: the median time of a message on each link that brought any.
        peak, counters: see `MeasuredStep`.
        pipeline_index: over a mesh, which of the pipelines (replica x shard) the rank belongs to.
    """

    iteration: int
    rank: int
    ms: float
    ops: Sequence[Sequence[Any]]
    events: Sequence[str] = ()
    links: Mapping[str, float] | None = None
    peak: float = 0.0
    counters: Mapping[str, int] | None = None
    pipeline_index: int = 0


def report_of(
    iteration: int,
    measured: MeasuredStep,
    clock_offsets_ns: Sequence[int],
    stretch: float = 1.0,
    pipeline_index: int = 0,
) -> RankReport:
    """A rank's report of what it measured.

    Args:
        clock_offsets_ns: nanoseconds that the clock of each rank of its pipeline is ahead of process 0's.
        stretch: milliseconds of the clock to one of the job's time.
        pipeline_index: see `RankReport`.
    """
    rank, begin, end, ops, crossings, events, peak, counters = measured
    scale, own = 1e6 * stretch, clock_offsets_ns[rank]
    by_link: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for crossing in crossings:
        row = (float(crossing.num_bytes), began(crossing, clock_offsets_ns) / scale, crossing.arrived / scale)
        by_link.setdefault((crossing.source, crossing.target), []).append(row)
    transfers = [Transfers.of(*each) for each in sorted(by_link.items())]
    by_stage: dict[int, list[tuple[str, float]]] = {}
    for op, start, stop in ops:
        if op.kind in OP_KINDS:
            by_stage.setdefault(op.stage, []).append((op.kind, (stop - start) / scale))
    found: list[Event] = [*events, *transfers]
    found += [OpTimes.of(rank, stage, rows) for stage, rows in sorted(by_stage.items())]
    return RankReport(
        iteration,
        rank,
        (end - begin) / scale,
        [
            [op.kind, op.stage, op.microbatch, round((start - own) / scale, 4), round((stop - own) / scale, 4)]
            for op, start, stop in ops
        ],
        [event_line(event) for event in found],
        {show_link(each.link): round(median(each.ms), 4) for each in transfers},
        peak,
        counters,
        pipeline_index,
    )


def lines_of(reports: Sequence[RankReport]) -> list[str]:
    """What the controller is told of an iteration, in an order that is always the same: by rank, then its end."""
    ended = IterationEnded(reports[0].iteration, round(max(report.ms for report in reports), 4))
    return [*(line for report in reports for line in report.events), event_line(ended)]


def as_one(reports: Sequence[RankReport]) -> list[RankReport]:
    """What all copies of a pipeline report of an iteration, as one pipeline's, by rank: of each link and stage what
    the slowest says, and the ops of the pipeline that took longest.
    """
    if len({report.pipeline_index for report in reports}) == 1:
        return sorted(reports, key=lambda report: report.rank)
    shown = max(reports, key=lambda report: report.ms).pipeline_index
    found = []
    for rank in sorted({report.rank for report in reports}):
        mine = sorted((report for report in reports if report.rank == rank), key=lambda report: report.pipeline_index)
        slowest = slowest_of([event_from_json(json.loads(line)["event"]) for line in each.events] for each in mine)
        links: dict[str, float] = {}
        for each in mine:
            links |= {link: max(ms, links.get(link, 0.0)) for link, ms in (each.links or {}).items()}
        one = next(each for each in mine if each.pipeline_index == shown)
        found.append(
            replace(
                one,
                ms=max(each.ms for each in mine),
                events=[event_line(event) for event in slowest],
                links=links,
                peak=max(each.peak for each in mine),
                counters=dict(sum((Counter(each.counters or {}) for each in mine), Counter())),
            )
        )
    return found


def began(crossing: TransferRecord, clock_offsets_ns: Sequence[int]) -> int:
    """When both sides were ready for a message, in nanoseconds of its receiver's clock."""
    further = clock_offsets_ns[crossing.target] - clock_offsets_ns[crossing.source]
    # Where nothing was posted early `posted` is the moment of sending, by the sender's clock as well.
    posted = crossing.posted + (further if crossing.posted == crossing.sent else 0)
    return max(crossing.sent + further, posted)


class ReportCollector:
    """Brings the reports of all ranks together: holds them until an iteration has all, in whatever order they come.

    An iteration of which a report was lost is left out as soon as a later one is complete.

    Args:
        num_ranks: of a pipeline. num_copies: of the pipeline, over a mesh.
    """

    def __init__(self, num_ranks: int, num_copies: int = 1) -> None:
        self._num = num_ranks * num_copies
        self._reports: dict[int, dict[tuple[int, int], RankReport]] = {}
        self._last = -1

    def add(self, report: RankReport) -> Sequence[RankReport] | None:
        """Takes a report; returns those of its iteration, one per rank, if it is the last that was missing."""
        if report.iteration <= self._last:
            return None
        rows = self._reports.setdefault(report.iteration, {})
        rows[report.pipeline_index, report.rank] = report
        if len(rows) < self._num:
            return None
        self._last = report.iteration
        self._reports = {number: kept for number, kept in self._reports.items() if number > self._last}
        return as_one(list(rows.values()))
