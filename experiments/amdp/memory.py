"""What every GPU holds under every method, by simulation: what figures 6 and 8 are about.

- Sizes, stages and times are those of `setups.py`; batches are the largest of the paper's table 3.
- A parameter takes 2 bytes as ops read it and 2 of gradient. Where it is stepped it takes 16 more: Megatron-LM's
  optimizer keeps a copy and Adam's two moments in 32 bits, and makes 32-bit gradients of 16-bit ones for the step.
- Activations are counted without recomputation and without a fused attention kernel (`penstock.cost.model_shapes`).
- The more forwards one of AMDP's orders reads ahead at the boundary of blocks (section 3.2), the more it holds.
  `AMDP` is the order made for B a little longer than F, which reads few; `AMDP, fastest` is that of `methods.py`, or
  the same where that does not fit the device.
- Chimera's two copies of a stage both have the optimizer's state: it has no ZeRO.
- Not counted: what the CUDA context, kernels' workspaces and fragments of free memory take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import penstock as ps
from experiments.amdp.methods import Trial, simulate, trial_of
from experiments.amdp.setups import MODELS, Setup
from experiments.common.results import Row

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
RATIO = 1.25
"""Of B to F, for which an order that reads few microbatches ahead is made. With 1 it would read fewer, for 4 to 11%
of the throughput."""
GB = 1e9


def setups() -> list[Setup]:
    return [Setup(model, num_ranks, batch) for model in MODELS for num_ranks, batch in DEPTHS.items()]


def held(trial: Trial, zero: bool = True) -> ps.simulation.Footprint:
    """What each rank holds in a trial."""
    parameters = [weights / 2 for weights in trial.costs.weight_bytes]
    costs = replace(trial.costs, optimizer_bytes=[STEPPED_BYTES * count for count in parameters])
    return ps.footprint(trial.schedule, costs, sharding="copies" if zero else "none", masters=True, links=trial.links)


def trials(setup: Setup) -> dict[str, Trial]:
    """By method, what runs at a setup."""
    found = {method: trial_of(method, setup) for method in NAMES if not method.startswith("amdp")}
    return found | amdp_trials(setup)


def amdp_trials(setup: Setup) -> dict[str, Trial]:
    """The order that reads few microbatches ahead, and the fastest that fits the device."""
    best = trial_of("amdp", setup)
    f, num = sum(best.costs.f) / setup.num_ranks, best.schedule.num_microbatches
    schedule = ps.build("amdp", setup.num_ranks, num, window=setup.window, f=f, b=f * RATIO)
    lean = replace(best, schedule=schedule)
    fits = held(best).peak <= setup.preset.device.memory
    return {"amdp": lean, "amdp, fastest": best if fits else lean}


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
