"""`DataError`, the one error for everything a user can get wrong about data."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """Data that cannot be used: one or two lines that say what was given, the rule, and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.data.open_corpus("no-such-file.txt")
        ... except ps.data.DataError as error:
        ...     print("no-such-file.txt" in str(error))
        True
    """
