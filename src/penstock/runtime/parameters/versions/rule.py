"""What a rule of weights says: what a forward reads, what its backward reads, what an update leaves behind.

       forward reads        backward reads            an update writes

Rule   `forward(spot)`      `backward(spot, read)`    the newest version; `oldest` says which others stay

What an op reads is a version, moved on by so many predicted updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.schedule import Schedule, ScheduleError


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


class VersionRule:
    """Says which weights ops read. A value without state: the same for all stages.

    Attributes:
        name: as in `Updates.rule`.
        keeps: a microbatch's backward reads the version its forward read, which is held until then. Where not, all
            ops read from one memory, into which what they read is written.
    """

    name: str
    keeps: bool = False

    def forward(self, spot: Spot) -> Read:
        """What a forward reads."""
        raise NotImplementedError

    def backward(self, spot: Spot, forward: Read) -> Read:
        """What the backward reads whose forward read `forward`."""
        raise NotImplementedError

    def oldest(self, newest: int) -> int:
        """The oldest version that forwards may read once there were `newest` updates."""
        return newest

    def ahead(self, schedule: Schedule, stage: int) -> Mapping[int, int]:
        """Microbatch -> `Spot.ahead`, where the rule wants to know it."""
        return {}

    def most_steps(self, schedule: Schedule, stage: int) -> int:
        """The most updates that an op of the stage predicts."""
        return 0

    def slowed(self, schedule: Schedule, stage: int) -> int:
        """By what the learning rate of a stage is divided."""
        return 1

    def predict(
        self, out: Tensor, weight: Tensor, steps: int, rate: float, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        """Writes into `out` where `weight` will be after `steps` more updates.

        Args:
            rate: learning rate of the next update.
            group, state: what the optimizer has of this weight.
        """
        raise RuntimeFailure(f"rule {self.name!r} predicts no weights, and was asked for {steps} updates ahead")

    def require(self, optimizer: Optimizer | None) -> None:
        """Raises RuntimeFailure where the rule has no formula for the optimizer."""

    def require_schedule(self, schedule: Schedule, zero: bool) -> None:
        """Raises where an op would not find what it is to read.

        Args:
            zero: one copy of each stage has the optimizer's state; where not, all have.

        Raises:
            ScheduleError: a schedule without updates. `check` proves that its order fits the rule.
            RuntimeFailure: a prediction on a copy that does not have the optimizer's state.
        """
        if schedule.updates is None:
            raise ScheduleError(
                f"{schedule.name} has no updates as ops (U), and rule {self.name!r} says which weights ops between "
                "updates read; build it with a window (rule: updates)",
                rule="updates",
            )


def require_state_everywhere(rule: str, schedule: Schedule, zero: bool) -> None:
    """Raises RuntimeFailure where copies without the optimizer's state would have to predict weights from it."""
    num = schedule.placement.num_pipelines
    if num > 1 and zero:
        raise RuntimeFailure(
            f"rule {rule!r} predicts weights from the optimizer's state, and of the {num} copies of each stage in "
            f"{schedule.name} only one has it; give ps.ParallelOptions(sharding='none') (--sharding none), or "
            "use rule 'none'"
        )
