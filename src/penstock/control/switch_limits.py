"""How much a switch must gain, and how soon it may follow the last. Both grow with recent switches, as a guard
against noise.

Decisions are based on measurements. Under noise, the best of many candidates is in part the luckiest. The first few
switches are not limited. Each further one within some hundred iterations must gain half as much again, and must leave
twice as much time to the one before. One that was taken back counts twice. So whatever is measured, the number of
switches in so many iterations is bounded. A dead link is not counted and does not wait, and neither does taking back.

    decisions in the last 1024 iterations   0    1    2    3    4    5    6    7
    least gain, times the job's
      where something has just changed      1    1    1  1.5  2.3  3.4  5.1  7.6
      where nothing has                     1  1.5  2.3  3.4  5.1  7.6    8    8
    must stand above chance                no  yes  yes  yes  yes  yes  yes  yes
    iterations since the last               0    0    0    6   18   42   90  186
"""

from __future__ import annotations

WINDOW = 1024
"""Iterations for which a switch counts."""
FREE = 2
"""Switches that are not limited if something has just changed."""
_GROWTH, _MOST = 1.5, 8.0
_FIRST_PAUSE = 6


class SwitchLimits:
    """Counts switches."""

    def __init__(self) -> None:
        self._made: list[int] = []
        self._failed: list[int] = []

    def decided(self, iteration: int) -> None:
        self._made = [*_recent(self._made, iteration), iteration]

    def failed(self, iteration: int) -> None:
        """A switch was taken back: it counts once more."""
        self._failed = [*_recent(self._failed, iteration), iteration]

    def waits(self, iteration: int, clear: bool = False) -> bool:
        """Whether it is too soon for another switch. `clear`: what it would answer cannot be noise. It then waits for
        the switches before it, but no longer because some of them were taken back.
        """
        recent = _recent(self._made, iteration)
        num = len(recent) + (0 if clear else len(_recent(self._failed, iteration)))
        return bool(recent) and iteration < recent[-1] + pause(num)

    def times_gain(self, iteration: int, news: bool) -> float:
        """How many times the job's least gain a switch must save. `news`: whether something has just changed."""
        num = len(_recent(self._made, iteration)) + len(_recent(self._failed, iteration))
        return min(_GROWTH ** max(0, num - FREE if news else num), _MOST)

    def is_wary(self, iteration: int) -> bool:
        """Whether what a switch saves must stand above chance."""
        return bool(_recent(self._made, iteration))


def _recent(iterations: list[int], now: int) -> list[int]:
    """Those that still count."""
    return [each for each in iterations if each > now - WINDOW]


def pause(num_recent: int) -> int:
    """Iterations that must lie between the last switch and the next, after so many within `WINDOW`."""
    return _FIRST_PAUSE * (2 ** max(0, num_recent - FREE) - 1)
