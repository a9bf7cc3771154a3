"""One sequential test for every question about steps: are they slower now, did a change help, did it do harm.

    reference    97  103   99  101   98  100     steps that ran before
    new steps   131, rank 7 of 7;  128, rank 7 of 8;  96, rank 1 of 9;  130, rank 9 of 10;  ...

Where nothing has changed, a new step is as likely to take any rank among the steps so far as any other, however
noisy the machine is and whatever shape its noise has. So a bet on high ranks wins nothing over many steps. The test
stakes 1, bets on each new step, and multiplies: what the stake has grown to is the evidence. By chance it reaches x
at most about once in x steps, so it may be looked at after every step, and adds up while a question is open. Where
it falls to 1, the test starts anew, and the steps that spoke for nothing are forgotten: so a change that comes
late is seen as soon as one that comes at once.

Ranks are bounded, so a wild step weighs no more than a slow one, and the bets are two at once: half of the stake wins
most where steps overlap, nearly all of it where they lie apart.

References: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (conformal test martingales); Shin,
Ramdas and Rinaldo, E-detectors (arXiv 2203.03532).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

STAKES = (0.5, 0.95)
"""Shares of the stake that are bet on each step; the evidence is their mean."""
FEWEST = 3
"""Clean steps on either side without which nothing is decided and no verdict is given."""
BURST = 3
"""Slow steps that lead to nothing: a burst is over before a change for it could run."""
EXPLAINED, UNEXPLAINED = 3.0, 30.0
"""Evidence that steps are slower from which on a change is tried: where simulation says as much, and where it does
not; from the latter on a rise without a known cause is reported. Each decision among the latest `WINDOW` steps
doubles what a change takes, and one that was taken back doubles it twice.
"""
WINDOW = 1024
FACTOR = 2.5
"""Simulation explains a rise if the rise is at most so many times as large as simulated, and not smaller by more."""
HELPED, HARMED = 4.0, 4.0
"""Evidence with which a change stays, or is taken back."""
HARMED_LATER = 20.0
"""Evidence with which a change that stayed is taken back after all: it is asked for with many steps more."""


class Evidence:
    """Evidence that values are higher than those of a reference, or lower.

    Args:
        reference: values from before.
        values: values since, added one by one.
        sign: 1 to bet on higher values, -1 to bet on lower ones.

    Attributes:
        value: what a stake of 1 has grown to, at least 1.
        num: values since the test last started anew.

    Examples:
        >>> from penstock.control.evidence import Evidence
        >>> round(Evidence([97, 103, 99, 101, 98, 100], [131, 128, 130, 129]).value, 1)
        5.0
        >>> Evidence([97, 103, 99, 101, 98, 100], [99.5, 97.5, 102, 98.5]).value
        1.0
    """

    def __init__(self, reference: Iterable[float], values: Iterable[float] = (), sign: int = 1) -> None:
        self._sign = sign
        self._reference = sorted(sign * each for each in reference)
        self._start()
        for each in values:
            self.add(each)

    def _start(self) -> None:
        self.value, self.num = 1.0, 0
        self._known, self._stakes = list(self._reference), [1.0] * len(STAKES)

    def add(self, value: float) -> None:
        """Bets on the rank of the next value."""
        value *= self._sign
        below, not_above = bisect_left(self._known, value), bisect_right(self._known, value)
        rank = (below + not_above + 1) / 2 / (len(self._known) + 1)  # 0 to 1; equal values share their ranks
        insort(self._known, value)
        self._stakes = [
            stake * (1 + share * (2 * rank - 1)) for stake, share in zip(self._stakes, STAKES, strict=True)
        ]
        self.value, self.num = sum(self._stakes) / len(STAKES), self.num + 1
        if self.value <= 1:
            self._start()


def chance(evidence: float) -> str:
    """What evidence means, in words: by chance it reaches x at most about once in x cases."""
    return f"chance alone makes such steps once in {evidence:.3g} cases"


def explains(simulated: float, measured: float) -> bool:
    """Whether a simulated difference (ms) explains a measured one: they are of the same size, within `FACTOR`."""
    return 0 < measured <= FACTOR * simulated and simulated <= FACTOR * measured
