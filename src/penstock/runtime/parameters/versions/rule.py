"""What a rule of weights says: what a forward reads, what its backward reads, what an update leaves behind.

       forward reads        backward reads            an update writes

Rule   `forward(spot)`      `backward(spot, read)`    the newest version; `oldest` says which others stay
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.versions.read import Read, Spot
from penstock.schedule import Schedule, ScheduleError


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
