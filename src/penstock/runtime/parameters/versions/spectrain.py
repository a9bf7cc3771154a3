"""SpecTrain: forward and backward read weights predicted by the momentum.

    reads W - s lr v,  s = floor(k/2) + N - k - 1 in the forward, floor(k/2) in the backward

Stage k of N, k from 0; v is SGD's momentum buffer (`v = momentum v + g`, W <- W - lr v), 0 before the first update.
The prediction stands for W after s more updates of the same v, so that all ops of a microbatch, on all stages, read
about the weights of one moment.

s counts microbatches, of which each has its own update in SpecTrain; where an update gathers a window of several, s
is divided by it and rounded down. Only what is read changes; the update steps from W itself.

Reference: Chen, Yang, Cheng, "Efficient and robust parallel DNN training through model parallelism on multi-GPU
platform", 2018 (weight prediction).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.versions.rule import Read, Spot, VersionRule, require_state_everywhere
from penstock.schedule import Schedule
from penstock.schedule.staleness import backward_steps, forward_steps


class MomentumPrediction(VersionRule):
    """Forward and backward read what the momentum predicts."""

    name = "spectrain"

    def forward(self, spot: Spot) -> Read:
        return Read(spot.newest, forward_steps(spot.stage, spot.num_stages, spot.window_size))

    def backward(self, spot: Spot, forward: Read) -> Read:
        return Read(spot.newest, backward_steps(spot.stage, spot.window_size))

    def most_steps(self, schedule: Schedule, stage: int) -> int:
        window = schedule.updates.window if schedule.updates is not None else 1
        return forward_steps(stage, schedule.num_stages, window)

    def predict(
        self, out: Tensor, weight: Tensor, steps: int, rate: float, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        velocity = state.get("momentum_buffer")
        if velocity is None:
            out.copy_(weight)
            return
        # Two kernels, so that the product is rounded before the sum, as the formula reads.
        torch.mul(velocity, -(steps * rate), out=out)
        out.add_(weight)

    def require(self, optimizer: Optimizer | None) -> None:
        groups = optimizer.param_groups if isinstance(optimizer, SGD) else []
        if not isinstance(optimizer, SGD) or any(not g["momentum"] or g["nesterov"] for g in groups):
            found = type(optimizer).__name__
            if isinstance(optimizer, SGD):
                found += " without momentum" if any(not g["momentum"] for g in groups) else " with nesterov=True"
            raise RuntimeFailure(
                f"rule {self.name!r} predicts weights from SGD's momentum, W - s lr v, and has no formula for "
                f"{found}; use torch.optim.SGD(momentum=0.9), or rule "
                "'xpipe' with Adam or AdamW, or rule 'pipedream' with any optimizer"
            )

    def require_schedule(self, schedule: Schedule, zero: bool) -> None:
        super().require_schedule(schedule, zero)
        require_state_everywhere(self.name, schedule, zero)
