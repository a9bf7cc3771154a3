"""Costs of known models on an assumed device, where nothing was measured."""

from penstock.cost.presets.accelerator import A100, A800, DEVICES, H800, Accelerator
from penstock.cost.presets.bert import BERTShape
from penstock.cost.presets.gpt import GPTShape, LayerCosts
from penstock.cost.presets.named import (
    PRESETS,
    SPLITS,
    CostPreset,
    costs_preset,
    find_preset,
    is_preset,
    parse_preset,
)

__all__ = [
    "A100",
    "A800",
    "DEVICES",
    "H800",
    "PRESETS",
    "SPLITS",
    "Accelerator",
    "BERTShape",
    "CostPreset",
    "GPTShape",
    "LayerCosts",
    "costs_preset",
    "find_preset",
    "is_preset",
    "parse_preset",
]
