"""Brings the reports of all ranks together, iteration by iteration, whatever order they come in. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.adapt.report import RankReport, as_one


class ReportCollector:
    """Holds reports until an iteration has all of them.

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
        rows[report.copy, report.rank] = report
        if len(rows) < self._num:
            return None
        self._last = report.iteration
        self._reports = {number: kept for number, kept in self._reports.items() if number > self._last}
        return as_one(list(rows.values()))
