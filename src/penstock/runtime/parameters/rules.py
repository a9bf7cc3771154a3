"""Rules by name (PipeDream's, SpecTrain's, ...): which version of the weights an op reads, and what is predicted.

       forward reads         backward reads              an update writes

Rule   `forward(context)`    `backward(context, read)`   the newest version; `oldest` says which others stay

An op reads a version, moved forward by a number of predicted updates. Each class is one rule and names its paper.
`rule_of` finds a rule by its name:

| rule            | forward reads           | backward reads          | holds                       |
|-----------------|-------------------------|-------------------------|-----------------------------|
| `none`          | newest                  | newest                  | one version                 |
| `pipedream`     | newest                  | what its forward read   | one for each update between |
| `vnag`          | the same, with NAdam    |                         |                             |
| `pipedream-2bw` | one before its window's | the same                | two                         |
| `spectrain`     | predicted by momentum   | predicted by momentum   | one and the prediction      |
| `xpipe`         | predicted by Adam       | newest                  | one and the prediction      |
| `tentative`     | after a tentative step  | newest, or as forwards  | one and two predictions     |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, Muon, NAdam, Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.muon import MUON, MuonAdamW
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.weight_versions import backward_steps, forward_steps, updates_ahead


@dataclass(frozen=True)
class WeightRead:
    """Weights that an op reads.

    Attributes:
        version: the weights after so many updates, counted over all passes.
        steps: updates of the optimizer that are predicted on top of it.
    """

    version: int
    steps: int = 0


@dataclass(frozen=True)
class ReadContext:
    """Where an op stands among the updates: all that a rule may look at.

    Attributes:
        stage, num_stages: the stage's number, from 0, and how many there are.
        window_size: microbatches that an update gathers.
        window: of the op's microbatch, counted over all passes; its gradient is part of that update.
        newest: updates that this copy of the stage has taken over, over all passes.
        oldest: the oldest version that this copy still holds.
        ahead: updates of this copy between the microbatch's forward and the update that gathers it; what
            `VersionRule.ahead` read off the schedule, 0 where it read nothing.
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
        steps_tentatively: PREDICT asks the optimizer for the step of a part of a window's gradient.
        wanted: the optimizers that the rule has a formula for; empty for any.
    """

    name: str
    keeps: bool = False
    steps_tentatively: bool = False
    wanted: str = ""

    def forward(self, context: ReadContext) -> WeightRead:
        """What a forward reads: the newest weights, moved on by what the rule reads off the schedule."""
        return WeightRead(context.newest, context.ahead)

    def backward(self, context: ReadContext, forward: WeightRead) -> WeightRead:
        """What the backward reads whose forward read `forward`: the same if it is kept, else the newest weights."""
        return forward if self.keeps else WeightRead(context.newest)

    def oldest(self, newest: int) -> int:
        """The oldest version that forwards may read once there were `newest` updates."""
        return newest

    def ahead(self, schedule: Schedule, stage: int) -> Mapping[int, int]:
        """Microbatch -> `ReadContext.ahead`, if the rule asks for it."""
        return {}

    def most_steps(self, schedule: Schedule, stage: int) -> int:
        """The most updates that an op of the stage predicts."""
        return max(self.ahead(schedule, stage).values(), default=0)

    def predict(
        self, out: Tensor, weight: Tensor, steps: int, rate: float, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        """Writes into `out` where `weight` will be after `steps` more updates.

        Args:
            rate: learning rate of the next update.
            group, state: what the optimizer has of this weight.
        """
        raise NotImplementedError

    def fits(self, optimizer: Optimizer | None) -> bool:
        """Whether the rule has a formula for the optimizer."""
        return True

    def require(self, optimizer: Optimizer | None) -> None:
        """Raises RuntimeFailure where the rule has no formula for the optimizer."""
        if not self.fits(optimizer):
            raise RuntimeFailure(
                f"rule {self.name!r} has no formula for {type(optimizer).__name__} with these options; use "
                f"{self.wanted}, or rule 'pipedream' with any optimizer"
            )


class NewestWeights(VersionRule):
    """Forward and backward read the newest weights.

        W(t+1) = W(t) - lr g(W_F(t), W_B(t))

    W_F is what was newest at a microbatch's forward, W_B at its backward; where updates fall between, they differ and
    the gradient is that of neither. AMDP trains so (paper, section 3.3): its schedule lets at most one update fall
    there, for the first d microbatches of a window (section 3.1, Lemma 1), and holds one version. With more updates
    between, this is naive asynchronous training.

    Reference: "AMDP: asynchronous multi-directional pipeline parallelism for large-scale models training", section 3.
    """

    name = "none"


class WeightStashing(VersionRule):
    """The forward reads the newest weights, the backward the same again.

        W(t+1) = W(t) - lr g(W_1(t-p+1), ..., W_p(t))

    Stage k of p (k from 1) reads what was newest at a microbatch's forward, keeps it until the microbatch's backward
    and computes its gradient with it; the step applies to the newest weights. With one microbatch a window p - k
    updates fall between, so that stage k holds p - k + 1 versions: the first stage p, the last one.

    Reference: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019: weight
    stashing, without its optional vertical sync, so stages may read versions of different ages.
    """

    name = "pipedream"
    keeps = True


class DoubleBuffer(VersionRule):
    """Forward and backward read the version one before the microbatch's window.

        W(t+1) = W(t) - lr g(W(t-1))

    Microbatches of window t read W(t-1), in forward and backward and on every stage, though W(t) may be there
    already; those of windows 0 and 1 read W(0). Two versions are enough: after the update of window t - 1 the weights
    W(t) are for window t + 1, and W(t-1) for what is left of window t.

    A forward of window t finds its version if its copy has taken over update t - 2 by then. In PipeDream's order
    windows of p - 1 microbatches see to that; `check` proves it for any order (rule: versions).

    Reference: Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021: double-buffered weight
    updates. Correction: the published code skips loss unscaling and clipping under stashing; here an update is the
    same under every rule.
    """

    name = "pipedream-2bw"
    keeps = True

    def forward(self, context: ReadContext) -> WeightRead:
        # A copy that holds no older version has just begun: then the newest stands for the one before.
        return WeightRead(max(context.window - 1, context.oldest))

    def oldest(self, newest: int) -> int:
        return max(newest - 1, 0)


class MomentumPrediction(VersionRule):
    """Forward and backward read what the momentum predicts.

        reads W - s lr v,  s = floor(k/2) + N - k - 1 in the forward, floor(k/2) in the backward

    Stage k of N, k from 0; v is SGD's momentum buffer (`v = momentum v + g`, W <- W - lr v), 0 before the first
    update. The prediction stands for W after s more updates of the same v, so that all ops of a microbatch, on all
    stages, read about the weights of one moment.

    s counts microbatches, of which each has its own update in SpecTrain; where an update gathers a window of several,
    s is divided by it and rounded down. Only what is read changes; the update steps from W itself.

    Reference: Chen, Yang, Cheng, "Efficient and robust parallel DNN training through model parallelism on multi-GPU
    platform", 2018 (weight prediction).
    """

    name = "spectrain"
    wanted = "torch.optim.SGD(momentum=0.9), without nesterov"

    def forward(self, context: ReadContext) -> WeightRead:
        return WeightRead(context.newest, forward_steps(context.stage, context.num_stages, context.window_size))

    def backward(self, context: ReadContext, forward: WeightRead) -> WeightRead:
        return WeightRead(context.newest, backward_steps(context.stage, context.window_size))

    def most_steps(self, schedule: Schedule, stage: int) -> int:
        window = schedule.updates.window if schedule.updates is not None else 1
        return forward_steps(stage, schedule.num_stages, window)

    def predict(
        self, out: Tensor, weight: Tensor, steps: int, rate: float, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        predict_by_momentum(out, weight, steps * rate, state)

    def fits(self, optimizer: Optimizer | None) -> bool:
        return isinstance(optimizer, SGD) and all(g["momentum"] and not g["nesterov"] for g in optimizer.param_groups)


def predict_by_momentum(out: Tensor, weight: Tensor, rate: float, state: Mapping[str, Any]) -> None:
    """Writes where SGD's buffer leads at this rate, or the weight itself if there is no such buffer."""
    velocity = state.get("momentum_buffer")
    if velocity is None:
        out.copy_(weight)
        return
    # Two kernels, so that the product is rounded before the sum, as the formula reads.
    torch.mul(velocity, -rate, out=out)
    out.add_(weight)


class AdamPrediction(VersionRule):
    """The forward reads what Adam's moments, or Muon's, predict, the backward the newest weights.

        reads W - s lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)        what Adam steps
        reads W - s lr 0.2 sqrt(max(rows, columns)) NS(M)                     what Muon steps (ours, see `muon.py`)

    m and v are Adam's moments after the t updates so far (nothing is predicted before the first), s the updates of
    this copy of the stage that fall between the forward and the one that gathers its microbatch: the steps that W is
    behind the weights to which the gradient will be applied. With one microbatch a window in PipeDream's order
    s = N - k for stage k of N, k from 1, the paper's figure; `updates_ahead` reads it off any order. Weight decay is
    not predicted.

    Reference: Guan et al., "XPipe: efficient pipeline model parallelism for multi-GPU DNN training", 2019, and
    PipeOptim (2023). The paper's own s for a window of several microbatches could not be verified; above is ours.
    """

    name = "xpipe"
    wanted = "torch.optim.Adam or AdamW, without amsgrad, or penstock's MuonAdamW"

    def ahead(self, schedule: Schedule, stage: int) -> Mapping[int, int]:
        return updates_ahead(schedule, stage)

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

    def fits(self, optimizer: Optimizer | None) -> bool:
        if isinstance(optimizer, Adam):
            return not any(group["amsgrad"] for group in optimizer.param_groups)
        return isinstance(optimizer, MuonAdamW)


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


class StashingNesterov(WeightStashing):
    """Stashing that insists on NAdam.

    The weights are read as under `pipedream`; what differs is the optimizer, NAdam with a momentum near one:

        mu_t = b1 (1 - 0.5 * 0.96^(t psi))
        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        W <- W (1 - lr wd) - lr [(1 - mu_t) / (1 - prod mu) g + mu_(t+1) / (1 - prod mu * mu_(t+1)) m]
                                / (sqrt(v / (1 - b2^t)) + eps)

    with b1, b2 = 0.99, 0.999 and psi = 0.004. That is `torch.optim.NAdam(parameters, lr, betas=(0.99, 0.999),
    momentum_decay=0.004, decoupled_weight_decay=True)`.

    Reference: Ajanthan et al., "Nesterov method for asynchronous pipeline parallel optimization", 2025.
    """

    name = "vnag"
    wanted = "torch.optim.NAdam(betas=(0.99, 0.999), momentum_decay=0.004, decoupled_weight_decay=True)"

    def fits(self, optimizer: Optimizer | None) -> bool:
        return isinstance(optimizer, NAdam)


class TentativeStep(AdamPrediction):
    """Late forwards read what the optimizer makes of the known part of the window's gradient.

        reads W(t) + step(g_known / w_known)         a backward reads alike until that update, then the newest

    g_known is the sum over the microbatches whose backwards have ended, w_known the sum of their losses' weights (1
    over the window). It is clipped as the window's gradient is. The step is the optimizer's own, with the rate of the
    update that it stands for, and commits nothing. So if the whole window is known, a late forward reads the weights
    that it would read without delay. Of several updates ahead the first is this step, and the momentum makes the
    others. If nothing is known, the momentum makes all of them: Adam's or Muon's moments as under `xpipe`, SGD's
    buffer as under `spectrain`. Another optimizer's state predicts nothing.

    The rule is ours. It goes beyond AMDP, whose late forwards read the newest weights (`none`).
    """

    name = "tentative"
    steps_tentatively = True

    def backward(self, context: ReadContext, forward: WeightRead) -> WeightRead:
        return WeightRead(context.newest, context.window - context.newest)

    def predict(
        self, out: Tensor, weight: Tensor, steps: int, rate: float, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        if group.get("kind") == MUON or ("exp_avg_sq" in state and "betas" in group):
            super().predict(out, weight, steps, rate, group, state)
        else:
            predict_by_momentum(out, weight, steps * rate, state)

    def fits(self, optimizer: Optimizer | None) -> bool:
        return True


class TiedPrediction(VersionRule):
    """Of a tied parameter that another stage owns: the newest that came, moved on by `ReadContext.ahead`.

    So each op reads what stands for the same moment as what the owner's stage reads in the same op of the microbatch
    (`schedule/weight_versions.py`), under any rule that predicts. In a forward it is the same to the bit, as all
    stages have the same version of it there. In a backward the owner's stage will have made updates that have not
    come here.
    """

    name = "tied"

    def backward(self, context: ReadContext, forward: WeightRead) -> WeightRead:
        return WeightRead(context.newest, context.ahead)


_KINDS: tuple[type[VersionRule], ...] = (
    NewestWeights,
    WeightStashing,
    DoubleBuffer,
    MomentumPrediction,
    AdamPrediction,
    StashingNesterov,
    TentativeStep,
)
_RULES: dict[str, VersionRule] = {kind.name: kind() for kind in _KINDS}


def rule_of(name: str) -> VersionRule:
    """The rule that `Updates.rule` names.

    Raises:
        ScheduleError: there is none of that name.
    """
    if name not in _RULES:
        raise ScheduleError(
            f"no rule named {name!r} says which weights ops read; there are {', '.join(_RULES)}", rule="updates"
        )
    return _RULES[name]
