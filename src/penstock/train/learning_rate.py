"""The learning rate as a function of the step alone, so that a resumed run needs to remember nothing."""

from __future__ import annotations

import math

FLOOR = 0.1
"""Share of the peak at which a cosine decay ends."""


def learning_rate(step: int, steps: int, peak: float, warmup: int, decay: str) -> float:
    """The rate of `step` (from 0) of `steps`: a linear warm-up, then a cosine decay to a tenth; or constant."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
