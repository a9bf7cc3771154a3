"""What every GPU holds under every method, by simulation: what figures 6 and 8 are about.

- Sizes, stages and times are those of `setups.py`; batches are the largest of the paper's table 3.
- A parameter takes 2 bytes as ops read it and 2 of gradient. Where it is stepped it takes 16 more: Megatron-LM's
  optimizer keeps a copy and Adam's two moments in 32 bits, and makes 32-bit gradients of 16-bit ones for the step.
- Activations are counted without recomputation and without a fused attention kernel (`penstock.cost.presets.gpt`).
- The more forwards one of AMDP's orders reads ahead, the faster it may be and the more it holds. `AMDP, fastest` is
  the fastest that fits the device, `AMDP` the one that holds least of those within 3% of it.
- Chimera's two copies of a stage both have the optimizer's state: it has no ZeRO.
- Not counted: what the CUDA context, kernels' workspaces and fragments of free memory take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from methods import Trial, num_microbatches, simulate, trial_of
from results import Row
from setups import MODELS, Setup

import penstock as ps

NAMES: Mapping[str, str] = {
    "1f1b": "DAPPLE",
    "interleaved-1f1b": "Inter-1F1B",
    "chimera": "Chimera",
    "zb-v": "ZB-V",
    "pipedream": "PipeDream",
    "xpipe": "XPipe",
    "pipedream-2bw": "2BW",
    "amdp": "AMDP",
    "amdp, fastest": "AMDP, fastest",
}
DEPTHS: Mapping[int, int] = {4: 64, 8: 128}
"""Ranks -> samples of an update."""
PARTS = ("weights", "versions", "gradients", "optimizer", "activations", "messages")
STEPPED_BYTES = 4 + 8 + 4
"""Of a parameter that the optimizer steps: the copy, the moments, the gradient."""
RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0)
"""Of B to F, for which orders of AMDP's are made besides: where it is higher they read further ahead."""
NEAR = 0.97
"""Of the fastest order's throughput, what the one taken has at least."""
GB = 1e9


def setups() -> list[Setup]:
    return [Setup(model, num_ranks, batch) for model in MODELS for num_ranks, batch in DEPTHS.items()]


def held(trial: Trial, zero: bool = True) -> ps.Footprint:
    """What each rank holds in a trial."""
    parameters = [weights / 2 for weights in trial.costs.weight_bytes]
    costs = replace(trial.costs, optimizer_bytes=[STEPPED_BYTES * count for count in parameters])
    return ps.footprint(trial.schedule, costs, zero=zero, masters=True, links=trial.links)


def trials(setup: Setup) -> dict[str, Trial]:
    """By method, what runs at a setup."""
    found = {method: trial_of(method, setup) for method in NAMES if not method.startswith("amdp")}
    return found | amdp_trials(setup)


def amdp_trials(setup: Setup) -> dict[str, Trial]:
    """The fastest order that fits the device, and the one that holds least of those about as fast."""
    best = trial_of("amdp", setup)
    f = sum(best.costs.f) / setup.num_ranks
    num = num_microbatches(setup.window)
    made = [ps.build("amdp", setup.num_ranks, num, window=setup.window, f=f, b=f * ratio) for ratio in RATIOS]
    orders = [best, *(replace(best, schedule=schedule) for schedule in made)]
    known = [(each, each.ktokens(simulate(each)), held(each).peak) for each in orders]
    fitting = [each for each in known if each[2] <= setup.preset.device.memory]
    fastest = max(fitting, key=lambda each: each[1])
    near = [each for each in fitting if each[1] >= NEAR * fastest[1]]
    lean = min(near, key=lambda each: (round(each[2] / GB), -each[1]))
    return {"amdp": lean[0], "amdp, fastest": fastest[0]}


def rows() -> Iterator[Row]:
    """A row for each setup and method, and for AMDP's without ZeRO."""
    for setup in setups():
        for method, trial in trials(setup).items():
            for zero in (False,) if method == "chimera" else (True, False) if method.startswith("amdp") else (True,):
                found = held(trial, zero)
                yield {
                    "model": setup.model,
                    "d": setup.num_ranks,
                    "b": setup.batch,
                    "method": method,
                    "zero": zero,
                    "ktokens": trial.ktokens(simulate(trial)),
                    "peak": found.peak / GB,
                    "mean": found.mean / GB,
                    "balance": found.balance,
                    "activation": max(trial.costs.activation[1:-1]) * trial.costs.num_stages / setup.num_ranks / GB,
                    "ranks": [[part / GB for part in rank] for rank in found.ranks],
                }
