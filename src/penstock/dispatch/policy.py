"""How a rank picks its next op: which of the ready ones, and whether it waits for one that is nearly due."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

from penstock.engine import decider
from penstock.schedule import ScheduleError


class Dispatch(StrEnum):
    """How a rank picks its next op."""

    FROZEN = "frozen"
    """Only the next of its order."""
    HINTED = "hinted"
    """Of the ready ops that fit, the earliest in its order."""
    DYNAMIC = "dynamic"
    """Of the ready ops that fit, B or I before F before W: class first."""

    @property
    def is_dynamic(self) -> bool:
        """Whether a rank may run any ready op, so that its cap on activations counts."""
        return self is not Dispatch.FROZEN

    @property
    def code(self) -> int:
        """The core's number for it."""
        return _CODES[self]


_CODES = {Dispatch.FROZEN: decider.FROZEN, Dispatch.HINTED: decider.HINTED, Dispatch.DYNAMIC: decider.CLASS_FIRST}


@dataclass(frozen=True)
class Policy:
    """A dispatch, and how long a rank waits for an op that is nearly due. Written "hinted", or "hinted:0.5".

    A rank that has picked a ready op looks for ops that its order has before it and whose planned start comes soon:
    within the share `wait` of the picked op's own duration. It waits for such an op until that start, and then picks
    anew. With 0 no rank waits while an op is ready. With 1 none starts an op that would run into an earlier one as
    planned: so where costs and delays are as planned, and links decoupled, no op starts later than in the frozen run.
    (Schedulers of shared machines call it conservative backfilling, those of shops an active schedule.)

    Attributes:
        dispatch: which of the ready ops is picked.
        wait: a share of at least 0; 0 where dispatch is not hinted.

    Raises:
        ScheduleError: another dispatch or share.
    """

    dispatch: Dispatch
    wait: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.wait, Real) or isinstance(self.wait, bool) or not 0 <= self.wait < math.inf:
            raise ScheduleError(
                f"a wait of {self.wait!r}: give a share of an op's duration, at least 0, like 'hinted:0.5'",
                rule="dispatch",
            )
        if self.wait and self.dispatch is not Dispatch.HINTED:
            raise ScheduleError(
                f"dispatch '{self.dispatch}:{self.wait:g}': only a hinted rank, which follows its order as far as it "
                f"can, waits for what is nearly due there; give 'hinted:{self.wait:g}', or '{self.dispatch}'",
                rule="dispatch",
            )

    @classmethod
    def of(cls, value: Dispatch | Policy | str) -> Policy:
        """Reads a policy, a dispatch, or the text of one. Raises ScheduleError for anything else."""
        return value if isinstance(value, Policy) else cls.parse(str(value))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads `str(policy)`. Raises ScheduleError for anything else."""
        name, colon, share = text.partition(":")
        try:
            dispatch, wait = Dispatch(name), float(share) if colon else 0.0
        except ValueError:
            raise ScheduleError(
                f"dispatch {text!r}: give 'frozen', 'hinted' or 'dynamic', 'hinted:0.5' to wait, or 'auto'",
                rule="dispatch",
            ) from None
        return cls(dispatch, wait)

    def __str__(self) -> str:
        return f"{self.dispatch}:{self.wait:g}" if self.wait else str(self.dispatch)
