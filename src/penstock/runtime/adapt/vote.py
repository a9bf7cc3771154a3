"""How all ranks switch to a new plan at the same step, or none does: they vote in the collective that ends each step.

    rank 0   runs 2, holds 3 ---+                            +--> all hold 3: from the next step on everybody runs 3
    rank 1   runs 2, holds 3 ---+--> the step's collective --+
    rank 2   runs 2, holds - ---+                            +--> (rank 2 does not: nobody does, and it goes on)

Every rank sees the same votes at the same moment. So no result has to be sent, and nobody waits for one: a plan that
has not reached every rank costs nothing, and a store that is gone cannot hold up training. If the collective itself
fails, the step fails on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.errors import RuntimeFailure

STOPPED = -1
"""What a rank holds that adapts no more."""
REFUSED = 0
"""The digest that a rank gives for a plan that it cannot run."""
_DIGITS = 12
"""Hexadecimal digits of a digest that are compared: as many as a double carries exactly."""


class Vote(NamedTuple):
    """What a rank tells all others at the end of a step. All are numbers that a double carries exactly.

    Attributes:
        running, running_digest: the decision that it runs (0: what the job started with), and that plan's digest.
        held, held_digest: the decision that it could run next, all worked out; 0 for none.
    """

    running: int
    running_digest: int
    held: int = 0
    held_digest: int = 0


class VoteResult(NamedTuple):
    """What the votes of a step come to.

    Attributes:
        switch: the decision that all run from the next step on; None for none.
        stopped: the first rank that adapts no more; then nobody does.
        refused: the first rank that cannot run what rank 0 holds.
        missing: ranks that do not hold it yet.
    """

    switch: int | None = None
    stopped: int | None = None
    refused: int | None = None
    missing: tuple[int, ...] = ()


def short_digest(digest: str) -> int:
    """A digest (hexadecimal) as a number that fits into a vote; never that of a refusal."""
    return int(digest[:_DIGITS], 16) or 1


def agree(votes: Sequence[Vote]) -> VoteResult:
    """What the votes come to, the same on every rank. Rank 0 leads: only what it holds can be next.

    Raises:
        RuntimeFailure: two ranks run different plans.
    """
    first = votes[0]
    for rank, vote in enumerate(votes):
        if vote[:2] != first[:2]:
            raise RuntimeFailure(
                f"rank {rank} ran plan {vote.running} ({vote.running_digest:x}) and rank 0 plan {first.running} "
                f"({first.running_digest:x}); start again from the last checkpoint"
            )
    stopped = next((rank for rank, vote in enumerate(votes) if vote.held == STOPPED), None)
    if stopped is not None:
        return VoteResult(stopped=stopped)
    if first.held <= first.running:
        return VoteResult()
    theirs = [vote for vote in votes if vote.held == first.held]
    refused = next(
        (r for r, o in enumerate(votes) if o.held == first.held and o.held_digest != first.held_digest), None
    )
    if first.held_digest == REFUSED:
        return VoteResult(refused=0)
    if refused is not None:
        return VoteResult(refused=refused)
    if len(theirs) == len(votes):
        return VoteResult(switch=first.held)
    return VoteResult(missing=tuple(rank for rank, vote in enumerate(votes) if vote.held != first.held))
