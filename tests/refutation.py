"""The bound by refutation as one call, which the planner makes step by step until its time is over."""

from __future__ import annotations

import numpy as np

from penstock.planning.destructive_bound import DestructiveBound
from penstock.planning.problem import Problem


def destructive_bound(problem: Problem, known: float, makespan: float) -> float:
    """The longest time that can be refuted (ms), or `known`; see `DestructiveBound`."""
    search = DestructiveBound(problem, known, makespan)
    search.go(np.zeros(1, np.int64))
    return search.bound
