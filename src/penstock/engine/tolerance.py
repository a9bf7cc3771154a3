"""How much sums of the same floats may differ: the one slack in comparisons of times and of memory."""

from __future__ import annotations

EPSILON = 1e-9
"""As a share of what is compared; in milliseconds or units of memory where that is 1 or less."""


def slack(value: float) -> float:
    """What a sum that should be `value` may be off by."""
    return EPSILON * max(1.0, abs(value))


def is_within(amount: float, limit: float) -> bool:
    """Whether an amount of memory keeps to its limit."""
    return amount <= limit * (1 + EPSILON)
