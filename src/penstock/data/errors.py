"""`DataError`, the one error for everything a user can get wrong about data."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """Data that cannot be used: one or two lines that say what was given, the rule, and what to do."""
