"""Cuts a chain of layers into stages so that the costliest stage costs as little as possible.

A pipeline is as fast as its slowest stage. Of all cuts with the lowest maximum, the most even one is taken. If
several are equally even, the one with fewer layers in the first stages is taken, because those hold the most
microbatches in flight.

    costs       1  4  4  4  4  3          over 4 stages
    stages     [1  4][4][4][4  3]         costliest: 7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["PartitionError", "partition"]


class PartitionError(ValueError):
    """Layers can't be cut into stages as asked.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.runtime.partition([1.0, 1.0], num_stages=3)
        ... except ps.runtime.PartitionError as error:
        ...     print(error)
        3 stages asked of a model of 2 layers; a stage needs at least one layer. Use fewer stages or a deeper model
    """


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts layers into stages of consecutive layers, at least one each. The result is exact, and always the same.

    Raises `PartitionError` if there are more stages than layers, or if a cost is negative or not a number.

    Args:
        costs: cost of each layer, in any unit.
        num_stages: number of stages.

    Examples:
        >>> import penstock as ps
        >>> ps.runtime.partition([1, 1, 1, 3, 1, 1], num_stages=3)
        [range(0, 3), range(3, 4), range(4, 6)]
    """
    num_layers = len(costs)
    if num_stages < 1:
        raise PartitionError(f"{num_stages} stages asked of a model of {num_layers} layers; ask for at least 1")
    if num_stages > num_layers:
        raise PartitionError(
            f"{num_stages} stages asked of a model of {num_layers} layers; a stage needs at least one layer. "
            "Use fewer stages or a deeper model"
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise PartitionError(f"layer {index} costs {cost}; a cost is a finite number, at least 0")
    # A power of two scales without rounding, so that sums and squares of any costs stay finite.
    scale = -math.frexp(max(costs))[1]
    before = list(accumulate((math.ldexp(cost, scale) for cost in costs), initial=0.0))
    limit = _smallest_maximum(before, num_stages)
    return _most_even(before, num_stages, limit)


def _smallest_maximum(before: list[float], num_stages: int) -> float:
    """The least cost that the costliest stage can have; `before[j]` is the cost of the first j layers."""
    num_layers = len(before) - 1
    best = before[:]  # best[j]: the maximum for the first j layers, in one stage to begin with
    for stage in range(1, num_stages):
        row = [math.inf] * (num_layers + 1)
        for j in range(stage + 1, num_layers + 1):
            # The last stage is layers i..j-1. Its cost falls and best[i] grows with i: search where they cross.
            low, high = stage, j - 1
            while low < high:
                middle = (low + high) // 2
                if best[middle] >= before[j] - before[middle]:
                    high = middle
                else:
                    low = middle + 1
            row[j] = max(best[low], before[j] - before[low])
            if low > stage:
                row[j] = min(row[j], max(best[low - 1], before[j] - before[low - 1]))
        best = row
    return best[num_layers]


def _most_even(before: list[float], num_stages: int, limit: float) -> list[range]:
    """The cut with the least sum of squared stage costs, no stage above `limit`."""
    num_layers = len(before) - 1
    # least[s][j]: for the layers from j on, in s stages; cut[s][j]: where the first of those ends.
    least = [[math.inf] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    least[0][num_layers] = 0.0
    for left in range(1, num_stages + 1):
        for start in range(num_layers - left, -1, -1):
            for end in range(start + 1, num_layers - left + 2):
                cost = before[end] - before[start]
                if cost > limit:
                    break
                total = cost * cost + least[left - 1][end]
                if total < least[left][start]:
                    least[left][start], cut[left][start] = total, end
    stages: list[range] = []
    start = 0
    for left in range(num_stages, 0, -1):
        stages.append(range(start, cut[left][start]))
        start = cut[left][start]
    return stages
