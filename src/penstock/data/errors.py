"""One error for everything a user can get wrong about data, so that a caller needs to catch one type."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """Data that cannot be used: one or two lines that say what was given, the rule, and what to do."""
