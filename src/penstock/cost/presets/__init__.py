"""Costs of known models on an assumed device, where nothing was measured."""

from penstock.cost.presets.accelerator import A100, DEVICES, H800, Accelerator
from penstock.cost.presets.gpt import GPTShape, LayerCosts
from penstock.cost.presets.named import PRESETS, CostPreset, costs_preset, find_preset, is_preset, parse_preset

__all__ = [
    "A100",
    "DEVICES",
    "H800",
    "PRESETS",
    "Accelerator",
    "CostPreset",
    "GPTShape",
    "LayerCosts",
    "costs_preset",
    "find_preset",
    "is_preset",
    "parse_preset",
]
