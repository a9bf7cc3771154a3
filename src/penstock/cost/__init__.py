"""Durations, memory and links: assumed, preset or measured."""

from penstock.cost.conditions import LinkCondition, LinkConditions
from penstock.cost.costs import FREED_BY_INPUT, CostError, Costs
from penstock.cost.links import Links
from penstock.cost.presets import costs_preset

__all__ = ["FREED_BY_INPUT", "CostError", "Costs", "LinkCondition", "LinkConditions", "Links", "costs_preset"]
