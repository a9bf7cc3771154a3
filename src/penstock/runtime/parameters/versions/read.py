"""Which weights an op reads: a version, moved on by so many predicted updates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Read:
    """Weights that an op reads.

    Attributes:
        version: the weights after so many updates, counted over all passes.
        steps: updates of the optimizer that are predicted on top of it.
    """

    version: int
    steps: int = 0


@dataclass(frozen=True)
class Spot:
    """Where an op stands among the updates: all that a rule may look at.

    Attributes:
        stage, num_stages: the stage's number, from 0, and how many there are.
        window_size: microbatches that an update gathers.
        window: of the op's microbatch, counted over all passes; its gradient is part of that update.
        newest: updates that this copy of the stage has taken over, over all passes.
        oldest: the oldest version that this copy still holds.
        ahead: updates of this copy between the microbatch's forward and the update that gathers it; what
            `Rule.ahead` read off the schedule, 0 where it read nothing.
    """

    stage: int
    num_stages: int
    window_size: int
    window: int
    newest: int
    oldest: int
    ahead: int = 0
