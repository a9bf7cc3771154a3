"""XPipe: a forward reads weights predicted by the optimizer's direction; the backward reads the newest.

    reads W - s lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)        what Adam steps
    reads W - s lr 0.2 sqrt(max(rows, columns)) NS(M)                     what Muon steps (ours, see `muon.py`)

m and v are Adam's moments after the t updates so far (nothing is predicted before the first), s the updates of this
copy of the stage that fall between the forward and the one that gathers its microbatch: the steps that W is behind
the weights to which the gradient will be applied. With one microbatch a window in PipeDream's order s = N - k for
stage k of N, k from 1, the paper's figure; `ahead.py` reads it off any order. Weight decay is not predicted.

Reference: Guan et al., "XPipe: efficient pipeline model parallelism for multi-GPU DNN training", 2019, and
PipeOptim (2023). The paper's own s for a window of several microbatches could not be verified; above is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, Muon, Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.muon import MUON, MuonAdamW
from penstock.runtime.parameters.versions.rule import Read, Spot, VersionRule, require_state_everywhere
from penstock.schedule import Schedule
from penstock.schedule.staleness import updates_ahead


class AdamPrediction(VersionRule):
    """The forward reads what Adam's moments, or Muon's, predict, the backward the newest weights."""

    name = "xpipe"

    def forward(self, spot: Spot) -> Read:
        return Read(spot.newest, spot.ahead)

    def backward(self, spot: Spot, forward: Read) -> Read:
        return Read(spot.newest)

    def ahead(self, schedule: Schedule, stage: int) -> Mapping[int, int]:
        return updates_ahead(schedule, stage)

    def most_steps(self, schedule: Schedule, stage: int) -> int:
        return max(updates_ahead(schedule, stage).values(), default=0)

    def predict(
        self, out: Tensor, weight: Tensor, steps: int, rate: float, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        if group.get("kind") == MUON:
            _predict_by_muon(out, weight, steps * rate, group, state)
            return
        t = float(state["step"]) if "step" in state else 0.0
        if t == 0:
            out.copy_(weight)
            return
        beta1, beta2 = (float(beta) for beta in group["betas"])
        # In the order of torch's own step, so that one update ahead with the same moments is that step, to the bit.
        denominator = state["exp_avg_sq"].sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
        torch.addcdiv(weight, state["exp_avg"], denominator, value=-(steps * (rate / (1 - beta1**t))), out=out)

    def require(self, optimizer: Optimizer | None) -> None:
        found = None
        if isinstance(optimizer, MuonAdamW):
            return
        if not isinstance(optimizer, Adam):
            found = type(optimizer).__name__
        elif any(group["amsgrad"] for group in optimizer.param_groups):
            found = f"{type(optimizer).__name__} with amsgrad=True"
        if found is not None:
            raise RuntimeFailure(
                f"rule {self.name!r} predicts weights from Adam's two moments and has no formula for {found}; use "
                "torch.optim.Adam, AdamW or penstock's MuonAdamW, or rule 'spectrain' with SGD's momentum, or rule "
                "'pipedream' with any optimizer"
            )

    def require_schedule(self, schedule: Schedule, zero: bool) -> None:
        super().require_schedule(schedule, zero)
        require_state_everywhere(self.name, schedule, zero)


def _predict_by_muon(
    out: Tensor, weight: Tensor, rate: float, group: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Writes where Muon's next step leads whose gradient is the mean of those before: torch's own, from a copy."""
    out.copy_(weight)
    mean = state.get("momentum_buffer")
    if mean is None:
        return
    there = Parameter(out)
    there.grad = mean
    own = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    muon = Muon([there], lr=rate, weight_decay=0.0, **{name: group[name] for name in own})
    muon.state[there]["momentum_buffer"] = mean.clone()
    muon.step()
