"""Chimera (Li and Hoefler 2021): two copies of the model, one down the ranks and one up."""

from __future__ import annotations

from penstock.library.deepest_first import Backward, deepest_first
from penstock.library.options import whole_multiple
from penstock.program.placements import bidirectional, one_to_one
from penstock.schedule import Schedule


def chimera(num_ranks: int, num_microbatches: int, backward: Backward = "whole") -> Schedule:
    """Rank i hosts stage i of the one and stage p - 1 - i of the other; even microbatches go down, odd ones up.

        rank 0 | 0F0 0F2 .   3F1 3B1 3F3 3B3 0B0 .   0B2
        rank 1 | .   1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2
        rank 2 | .   1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3
        rank 3 | 0F1 0F3 .   3F0 3B0 3F2 3B2 0B1 .   0B3

    Bubble X = p - 2 stage times, see `deepest_first`: p - 2 at F = B, 2(p - 2) at B = 2F and N = p, (p - 2)/2
    with split backwards. Peak min(p, N) activations. The gradients of the two copies of a stage add up.

    Args:
        backward: "whole", or "split" into I and W.
    """
    whole_multiple("chimera", "ranks", num_ranks, "pipelines", 2)
    placement = bidirectional(one_to_one(num_ranks))
    return deepest_first("chimera", placement, num_ranks, num_microbatches, backward)
