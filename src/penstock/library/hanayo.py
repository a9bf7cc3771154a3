"""Hanayo (Liu et al. 2023): a V repeated, so that every rank has a stage near each end of every wave."""

from __future__ import annotations

from penstock.library.deepest_first import Backward, deepest_first
from penstock.library.options import at_least
from penstock.program.placements import wave
from penstock.schedule import Schedule


def hanayo(num_ranks: int, num_microbatches: int, waves: int = 2, backward: Backward = "whole") -> Schedule:
    """2W stages per rank, down the ranks and back up W times.

    Two ranks, stages 0 1 1 0 0 1 1 0 going down and up twice:

        rank 0 | 0F0 0F1 .   3F0 4F0 3F1 4F1 7F0 7B0 7F1 7B1 4B0 3B0 4B1 3B1 0B0 .   0B1
        rank 1 | .   1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 6B0 5B0 6B1 5B1 2B0 1B0 2B1 1B1

    Bubble X = (p - 1)/W in the time that a rank's 2W stages take, 2(p - 1) in stage times, see `deepest_first`:
    with split backwards half of that. Peak 2W min(p, N) stage activations, min(p, N) full ones.

    Args:
        waves: W, 2 by default; with one the placement is that of `zb-v`.
        backward: "whole", or "split" into I and W.
    """
    at_least("hanayo", "waves", waves, 1)
    return deepest_first("hanayo", wave(num_ranks, waves), num_ranks, num_microbatches, backward)
