"""How long a method takes for a batch on the paper's ranks, by simulation.

d ranks, batches of b samples in microbatches of 4, the GPT-style model's stage costs (`amdp-gpt` in
`penstock.cost.presets`), links as fast as the device's. An asynchronous method never flushes, so its time is that of
a batch amid many; a synchronous one's is that of a whole run of its schedule and the optimizer's step behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import penstock as ps
from penstock.cost.presets import CostPreset, find_preset

MANY = 8
"""Batches of the longer of two runs whose difference is the time of one amid many."""


@dataclass(frozen=True)
class Setting:
    """A model on so many ranks, and the samples of a batch."""

    preset: CostPreset
    num_ranks: int = 8
    batch: int = 128

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.preset.shape.microbatch_size

    @cached_property
    def links(self) -> ps.LinkConditions:
        return self.preset.links()

    def costs(self, num_stages: int) -> ps.Costs:
        return self.preset.costs(num_stages)


PAPER = Setting(find_preset("amdp-gpt"))
"""Figure 7's: d = 8, b = 128."""

SYNCHRONOUS = ("1f1b", "interleaved-1f1b", "chimera", "zb-v")
"""Those that the paper compares with."""


def batch_ms(setting: Setting, schedule: str, window: int | None = None, **options: Any) -> float:
    """Milliseconds of a batch; `window` in microbatches, a batch's where not given."""
    num = setting.num_microbatches
    if schedule in SYNCHRONOUS:
        each = window or num
        return _synchronous(setting, schedule, each) * num / each
    few, many = (_run(setting, schedule, count * num, window or num, options) for count in (MANY // 2, MANY))
    return (many - few) / (MANY - MANY // 2)


def _run(setting: Setting, schedule: str, num: int, window: int, options: dict[str, Any]) -> float:
    costs = setting.costs(setting.num_ranks)
    if schedule == "amdp":
        stages = range(costs.num_stages)
        f, b, u = (
            sum(costs.duration(kind, stage) for stage in stages) / costs.num_stages for kind in ("F", "B", "U")
        )
        options = {"f": f, "b": b, "u": u, **options}
    built = ps.build(schedule, setting.num_ranks, num, window=window, **options)
    return ps.simulate(built, costs, links=setting.links).makespan


def _synchronous(setting: Setting, schedule: str, num: int) -> float:
    built = ps.build(schedule, setting.num_ranks, num)
    costs = setting.costs(built.num_stages)
    timeline = ps.simulate(built, costs, links=setting.links)
    ends = [max(timed.end for timed in row) for row in timeline.rows]
    steps = [
        sum(costs.duration("U", stage) for stage in set(built.stages_of(rank))) for rank in range(built.num_ranks)
    ]
    # Each rank steps its optimizer when it is done; two copies of a stage first have to add their gradients up.
    return max(end + step for end, step in zip(ends, steps, strict=True)) + _summed(setting, built, costs)


def _summed(setting: Setting, built: ps.Schedule, costs: ps.Costs) -> float:
    """An all-reduce of the copies' gradients over the links, none where there is one pipeline."""
    if built.placement.num_pipelines == 1:
        return 0.0
    return setting.preset.device.all_reduce_ms(max(costs.update_bytes), built.placement.num_pipelines)


def with_shape(preset: CostPreset, **sizes: Any) -> CostPreset:
    """The same device and split with another model."""
    return replace(preset, shape=replace(preset.shape, **sizes))
