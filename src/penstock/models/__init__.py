"""What is trained: a GPT as a flat list of layers, its loss, its costs."""

from penstock.models.costs import estimate_costs, gpt_costs, measure_costs
from penstock.models.gpt import GPTConfig, build_layers, presets, tied_parameters
from penstock.models.loss import CrossEntropy
from penstock.models.sample import sample
from penstock.models.stage import gpt_stage

__all__ = [
    "CrossEntropy",
    "GPTConfig",
    "build_layers",
    "estimate_costs",
    "gpt_costs",
    "gpt_stage",
    "measure_costs",
    "presets",
    "sample",
    "tied_parameters",
]
