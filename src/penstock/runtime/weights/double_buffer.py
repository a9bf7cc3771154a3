"""PipeDream-2BW's double buffer: all microbatches of a window read the weights of one update before it.

    W(t+1) = W(t) - lr g(W(t-1))

Microbatches of window t read W(t-1), in forward and backward and on every stage, though W(t) may be there already;
those of windows 0 and 1 read W(0). Two versions are enough: after the update of window t - 1 the weights W(t) are for
window t + 1, and W(t-1) for what is left of window t.

A forward finds its version if its copy has taken over the update of the window before the last one by then. Windows
of at least p microbatches see to that in PipeDream's order; `require_schedule` proves it for any.

Reference: Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1.
Correction: the published code skips loss unscaling and clipping under stashing; here an update is the same under
every rule.
"""

from __future__ import annotations

from penstock.runtime.weights.read import Read, Spot
from penstock.runtime.weights.rule import Rule
from penstock.schedule import Schedule
from penstock.schedule.op import FORWARD, UPDATE
from penstock.schedule.spot import error_at


class DoubleBuffer(Rule):
    """Forward and backward read the version one before the microbatch's window."""

    name = "pipedream-2bw"
    keeps = True

    def forward(self, spot: Spot) -> Read:
        # A copy that holds no older version has just begun: then the newest stands for the one before.
        return Read(max(spot.window - 1, spot.oldest))

    def backward(self, spot: Spot, forward: Read) -> Read:
        return forward

    def oldest(self, newest: int) -> int:
        return max(newest - 1, 0)

    def require_schedule(self, schedule: Schedule, zero: bool) -> None:
        super().require_schedule(schedule, zero)
        window = schedule.updates.window if schedule.updates is not None else 1
        for rank, row in enumerate(schedule.order):
            passed: dict[tuple[int, int], int] = {}
            for step, op in enumerate(row):
                copy = op.stage, schedule.pipeline_of(op)
                if op.kind == UPDATE:
                    passed[copy] = passed.get(copy, 0) + 1
                elif op.kind == FORWARD and passed.get(copy, 0) < op.microbatch // window - 1:
                    version = op.microbatch // window - 1
                    message = (
                        f"microbatch {op.microbatch} is of window {version + 1}, so rule {self.name!r} has it read "
                        f"the weights after {version} updates, and {passed.get(copy, 0)} come before this forward; "
                        "give updates a longer window (at least one microbatch a rank in pipedream's order)"
                    )
                    raise error_at(schedule, "updates", rank, step, op, message)
