"""The one error of the split backward."""

from __future__ import annotations


class SplitError(RuntimeError):
    """A tape was used out of order, or what it held for W was overwritten."""
