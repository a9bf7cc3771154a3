"""The rule by which simulated annealing keeps a worse order (Metropolis et al. 1953), and the random numbers that it
draws. Written to be compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from penstock.engine.arrays import Stop


class Cooling(NamedTuple):
    """How far a search goes.

    Attributes:
        num_moves: how many moves it makes.
        hot, cold: the temperatures (ms) between which it falls, by the same factor in equal numbers of moves.
        target: the makespan (ms) at which it may stop.
        stop: its one number is 0 until some other thread wants this one to come to its end.
    """

    num_moves: int
    hot: float
    cold: float
    target: float
    stop: Stop


def seed(number: int) -> None:
    """Seeds the random numbers of this thread's compiled functions."""
    np.random.seed(number)


def is_kept(worse: float, cooling: Cooling, move: int) -> bool:
    """Whether the order that a move makes, which is `worse` ms longer than the one before it, is kept.

    It is with probability exp(-worse / temperature), always where it is no longer.
    """
    if worse <= 0:
        return True
    temperature = cooling.hot * (cooling.cold / cooling.hot) ** (move / cooling.num_moves)
    return np.random.random() < math.exp(-worse / temperature)
