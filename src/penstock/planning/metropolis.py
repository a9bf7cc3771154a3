"""The rule by which simulated annealing keeps a worse order (Metropolis et al. 1953), and the random numbers that it
draws. Written to be compiled."""

from __future__ import annotations

import math

import numpy as np


def seed(number: int) -> None:
    """Seeds the random numbers of this thread's compiled functions."""
    np.random.seed(number)


def is_kept(worse: float, hot: float, cold: float, done: float) -> bool:
    """Whether an order that is `worse` ms longer than the one before it is kept.

    It is with probability exp(-worse / temperature), always where it is no longer.

    Args:
        hot, cold: the temperatures (ms) between which the search falls, by the same factor in equal times.
        done: the share of the search that is done.
    """
    return worse <= 0 or np.random.random() < math.exp(-worse / (hot * (cold / hot) ** done))
