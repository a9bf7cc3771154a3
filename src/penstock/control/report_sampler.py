"""Which steps the ranks report in full. Of all other steps only the time is known, which costs the ranks nothing.

step       0 to 15   16   17 ... 23   24   ...   41 takes longer than the 16 before it   42   43   44   45
reported   all       x                x          x                                       x    x    x    x
"""

from __future__ import annotations

from collections import deque

CLOSELY = 16
"""Steps from the start, or from a switch on, of which all are reported."""
REST = 8
"""While nothing changes, one step in so many is reported."""
ALARM = 4
"""Steps that are reported after one that took longer than the `CLOSELY` before it, which is reported as well."""
SLOWER = 1.02
"""A step counts as longer if the step takes at least so many times as long as the longest of those before."""


class ReportSampler:
    """Finds after each step whether the ranks report the step. All ranks are told the same times, so all agree.

    Args:
        num_updates: how many steps are measured as one: those of a pass, where updates are among a schedule's ops.

    Examples:
        >>> from penstock.control.report_sampler import ReportSampler
        >>> sampler, reported = ReportSampler(), []
        >>> for step in range(40):
        ...     reported += [step] if sampler.ended(120.0 if step == 33 else 100.0, False) else []
        >>> reported[16:]
        [16, 24, 32, 33, 34, 35, 36, 37]
    """

    def __init__(self, num_updates: int = 1) -> None:
        self._is_reported = True
        self._rest = max(1, REST // num_updates)
        self._num, self._closely_until = 0, CLOSELY
        self._recent: deque[float] = deque(maxlen=CLOSELY)

    def ended(self, ms: float, asked: bool) -> bool:
        """Whether the step that has ended is reported.

        Args:
            ms: how long the step took.
            asked: whether a rank asks for the next one.
        """
        is_alarm = len(self._recent) == CLOSELY and ms > SLOWER * max(self._recent)
        is_reported = self._is_reported or is_alarm
        if is_alarm:
            self._closely_until = max(self._closely_until, self._num + 1 + ALARM)
        self._recent.append(ms)
        self._num += 1
        self._is_reported = asked or self._num < self._closely_until or self._num % self._rest == 0
        return is_reported

    def switched(self) -> None:
        """Something else runs from the next step on."""
        self._closely_until, self._is_reported = self._num + CLOSELY, True
        self._recent.clear()
