"""The paper's models on the paper's device, as costs: what sections 4.1 and A.1 say, and what is assumed besides.

- Stages, their times, and the bytes of what they send are those of `penstock.cost.presets`: blocks dealt out evenly,
  the embedding on the first stage, the head on the last, as in Megatron-LM. One number, the share of the device's
  peak that matrix products reach, is chosen there: that which fits the paper's DAPPLE.
- An update is bound by memory: it takes the bytes that it moves over the device's memory bandwidth. They are counted,
  kernel by kernel, for what the paper ran: Megatron-LM's optimizer over Apex's Adam in 16-bit mixed precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import penstock as ps
from penstock.cost.presets import A800, CostPreset, LayerSplit, find_preset

MODELS: Mapping[str, str] = {"GPT": "amdp-gpt", "BERT": "amdp-bert"}

STEP = {
    "16-bit gradients to 32-bit ones": 2 + 4,
    "unscaled, and looked through for overflow": 4 + 4,
    "their norm": 4,
    "clipped": 4 + 4,
    "Adam: gradient, parameter and two moments read; all but the gradient written": 16 + 12,
    "32-bit parameters to 16-bit ones": 4 + 2,
    "16-bit gradients zeroed": 2,
}
"""Bytes of a parameter that each kernel of an optimizer step reads and writes."""
STEP_BYTES = sum(STEP.values())
ADD_BYTES = 2 + 2 + 2
"""Bytes of a parameter that the owner of a stage moves to add up its gradient with another copy's."""
PREDICT_BYTES = 4 + 4 + 4 + 2
"""Bytes of a parameter to predict it (XPipe): two moments and the parameter read, what is predicted written; in one
kernel, the least there can be."""
TENTATIVE_BYTES = 2 + 2 + PREDICT_BYTES
"""Bytes of a parameter of a tentative update: the 16-bit gradient is read for its norm and again for the step, and
the rest is as in a prediction."""


@dataclass(frozen=True)
class Setup:
    """A model on so many ranks.

    Attributes:
        model: one of `MODELS`. num_ranks: the paper's d. batch: samples an update gathers, the paper's b.
        split: how layers are cut into stages.
        head: how many times as long as the preset's the last layer takes.
        link_gb: GB a second from any rank to any other.
    """

    model: str
    num_ranks: int
    batch: int
    split: LayerSplit = "even"
    head: float = 1.0
    link_gb: float = A800.link_gb

    @cached_property
    def preset(self) -> CostPreset:
        found = find_preset(MODELS[self.model])
        return replace(found, split=self.split, device=replace(found.device, link_gb=self.link_gb))

    @property
    def window(self) -> int:
        """Microbatches an update gathers."""
        return self.batch // self.preset.shape.microbatch_size

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.preset.shape.microbatch_size * self.preset.shape.sequence

    @property
    def links(self) -> ps.Links:
        return self.preset.links()

    def costs(self, num_stages: int | None = None, copies: int = 1, zero: bool = True) -> ps.Costs:
        """Of stages in so many copies; one stage a rank where not said.

        Args:
            zero: whether one copy of a stage alone has the optimizer's state and steps.
        """
        costs = self.preset.costs(self.num_ranks if num_stages is None else num_stages)
        parameters = [weights / 2 for weights in costs.weight_bytes]
        step = [self.move_ms(STEP_BYTES * count) for count in parameters]
        add = [self.move_ms(ADD_BYTES * (copies - 1) * count) for count in parameters]
        tentative = [self.move_ms(TENTATIVE_BYTES * count) for count in parameters]
        updates = {("U", stage): step[stage] + add[stage] for stage in range(costs.num_stages)}
        predictions = {("PREDICT", stage): tentative[stage] + add[stage] for stage in range(costs.num_stages)}
        costs = costs.with_other(updates | predictions)
        if not zero:
            costs = replace(costs, take_over=step)
        return costs if self.head == 1 else self._with_head(costs)

    def move_ms(self, num_bytes: float) -> float:
        return self.preset.device.move_ms(num_bytes)

    def _with_head(self, costs: ps.Costs) -> ps.Costs:
        layer, device, more = self.preset.shape.layers()[-1], self.preset.device, self.head - 1
        added = {kind: more * device.compute_ms(kind.upper(), getattr(layer, kind)) for kind in "fiw"}
        added["b"] = added["i"] + added["w"]
        rows = {kind: [*getattr(costs, kind)[:-1], getattr(costs, kind)[-1] + added[kind]] for kind in "fiwb"}
        return replace(costs, **rows)
