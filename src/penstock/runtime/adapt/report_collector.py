"""Brings the reports of all ranks together, iteration by iteration, whatever order they come in. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.adapt.report import RankReport


class ReportCollector:
    """Holds reports until an iteration has all of them.

    An iteration of which a report was lost is left out as soon as a later one is complete.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reports: dict[int, dict[int, RankReport]] = {}
        self._last = -1

    def add(self, report: RankReport) -> Sequence[RankReport] | None:
        """Takes a report; returns those of its iteration, by rank, if it is the last that was missing."""
        if report.iteration <= self._last:
            return None
        rows = self._reports.setdefault(report.iteration, {})
        rows[report.rank] = report
        if len(rows) < self._num_ranks:
            return None
        self._last = report.iteration
        self._reports = {number: kept for number, kept in self._reports.items() if number > self._last}
        return [rows[rank] for rank in sorted(rows)]
