"""Durations, memory and links: assumed, preset or measured."""

from penstock.cost.by_length import CostsByLength, FittedCosts, LengthLine, LengthSample, fit_costs
from penstock.cost.conditions import LinkCondition
from penstock.cost.costs import FREED_BY_INPUT, Costs
from penstock.cost.errors import CostError
from penstock.cost.links import Links
from penstock.cost.mesh import Mesh, Ring
from penstock.cost.overlap import Overlap
from penstock.cost.presets import costs_preset
from penstock.cost.uneven import Uneven

__all__ = [
    "FREED_BY_INPUT", "CostError", "Costs", "CostsByLength", "FittedCosts", "LengthLine", "LengthSample",
    "LinkCondition", "Links", "Mesh", "Overlap", "Ring", "Uneven", "costs_preset", "fit_costs",
]  # fmt: skip
