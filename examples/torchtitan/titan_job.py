"""A job of TorchTitan's over four ranks: as it is, with a profile, and with a plan for a slow link.

The tutorial docs/tutorials/torchtitan-slow-link.md runs all three.
"""

from __future__ import annotations

from titan_on_cpu import make_small
from torchtitan.config import DebugConfig, ParallelismConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

import penstock as ps
from penstock.integrations.torchtitan import planned


def before() -> Trainer.Config:
    config = make_small(llama3_debugmodel())  # 8 microbatches of one sample
    config.parallelism = ParallelismConfig(pipeline_parallel_degree=4, pipeline_parallel_schedule="1F1B")
    config.debug = DebugConfig(seed=0)
    return config


def measured() -> Trainer.Config:
    config = before()
    config.model_spec.pipelining_fn = planned(ps.build("1f1b", num_ranks=4, num_microbatches=8))
    config.profiler = Profiler.Config(enable_profiling=True, profile_freq=5)
    return config


def after() -> Trainer.Config:
    config = before()
    config.model_spec.pipelining_fn = planned("plan.json")
    return config
