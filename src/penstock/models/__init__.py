"""What is trained: a GPT as a flat list of layers, its loss, and the cut of any chain of layers into stages."""

from penstock.models.costs import estimate_costs, gpt_costs, measure_costs
from penstock.models.gpt import GPTConfig, build_layers, presets, tied_parameters
from penstock.models.loss import CrossEntropy
from penstock.models.partition import PartitionError, partition
from penstock.models.sample import sample
from penstock.models.stage import Stage, gpt_stage, shared_parameters, stages

__all__ = [
    "CrossEntropy",
    "GPTConfig",
    "PartitionError",
    "Stage",
    "build_layers",
    "estimate_costs",
    "gpt_costs",
    "gpt_stage",
    "measure_costs",
    "partition",
    "presets",
    "sample",
    "shared_parameters",
    "stages",
    "tied_parameters",
]
