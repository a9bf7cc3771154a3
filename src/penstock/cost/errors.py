"""What is raised for costs and links."""

from __future__ import annotations


class CostError(ValueError):
    """Costs or links that make no sense: negative, not a number, of the wrong length."""
