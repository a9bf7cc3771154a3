"""A small language for schedules: a placement, rules, and your own ops and functions become a schedule."""

from penstock.program.new_op import Branch, NewOp
from penstock.program.program import Program
from penstock.program.rules import Rules, Traversal, breadth_first, by_microbatch, depth_first, earliest_first
from penstock.program.stepper import NextOp, Step, Stepper, View
from penstock.schedule import placement as placements

__all__ = [
    "Branch",
    "NextOp",
    "NewOp",
    "Program",
    "Rules",
    "Step",
    "Stepper",
    "Traversal",
    "View",
    "breadth_first",
    "by_microbatch",
    "depth_first",
    "earliest_first",
    "placements",
]
