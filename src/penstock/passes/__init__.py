"""Schedule -> Schedule: plain order, separate gradients, overlap, recompute, reorder, messages and reductions as
ops."""

from penstock.passes.communication import add_communication, remove_communication
from penstock.passes.overlap import overlap_pairs, separate_pairs
from penstock.passes.recomputation import recompute
from penstock.passes.reduce import add_reductions
from penstock.passes.reorder import in_plain_order, reorder_microbatches
from penstock.passes.repeated import repeat_windows
from penstock.passes.separate import separate_gradients

__all__ = [
    "add_communication",
    "add_reductions",
    "in_plain_order",
    "overlap_pairs",
    "recompute",
    "remove_communication",
    "reorder_microbatches",
    "repeat_windows",
    "separate_gradients",
    "separate_pairs",
]
