"""How long a method takes for a batch on the paper's ranks, by simulation: the trials of table 3, and some more.

An asynchronous method never flushes, so its time is that of a batch amid many; a synchronous one's is that of its
schedule's whole run. Costs, links and updates are those of `setups.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from experiments.amdp.learning import Method
from experiments.amdp.methods import Trial, simulate, trial_of
from experiments.amdp.pays import amdp
from experiments.amdp.setups import Setup
from penstock.cost.presets import CostPreset
from penstock.schedule import TENTATIVE

PAPER = Setup("GPT", 8, 128)
"""Figure 7's."""

SYNCHRONOUS = ("1f1b", "interleaved-1f1b", "chimera", "zb-v")
"""Those that the paper compares with."""


@dataclass(frozen=True)
class OtherSetup(Setup):
    """A model that is not one of the paper's two; `model` is what it is called."""

    other: CostPreset | None = None

    @cached_property
    def preset(self) -> CostPreset:
        assert self.other is not None
        return replace(self.other, split=self.split)


def ktokens(method: Method, setup: Setup = PAPER, synchronous: Sequence[str] = SYNCHRONOUS) -> float:
    """Thousands of tokens a second. A synchronous method is the fastest of those named."""
    if method.is_synchronous and method.window == 1:
        return _one_by_one(setup)
    if method.is_synchronous:
        return max(_timed(trial_of(name, setup)) for name in synchronous)
    if method.schedule == "amdp" and method.options.get("max_mismatch") == 0:
        return amdp(setup, "drained")[1]
    if method.schedule == "amdp" and method.rule == TENTATIVE:
        return amdp(setup, TENTATIVE)[1]
    if method.schedule == "amdp" and method.rule is not None:  # what predictions themselves take is left out
        return _timed(trial_of("amdp", setup, zero=False))
    if method.schedule in ("amdp", "xpipe", "pipedream-2bw"):
        return _timed(trial_of(method.schedule, setup))
    # One order with three rules: what PipeDream takes with the window.
    return _timed(trial_of("pipedream" if method.window == 1 else "pipedream-2bw", setup))


def batch_seconds(method: Method, setup: Setup = PAPER) -> float:
    """Of a batch, which is an update of `setup.window` microbatches, on `setup.num_ranks` ranks.

    `Setup("GPT", d, 4 * n)` has n microbatches an update: four samples are one microbatch of that model.
    """
    return setup.window * setup.tokens / ktokens(method, setup) / 1000


def _timed(trial: Trial) -> float:
    return trial.ktokens(simulate(trial))


def _one_by_one(setup: Setup) -> float:
    """An update after each microbatch without any mismatch: one alone in the pipeline."""
    return _timed(trial_of("1f1b", replace(setup, batch=setup.preset.shape.microbatch_size)))
