"""One error for every checkpoint that cannot be written, read or used."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """One or two lines: what was given, the rule it breaks, and what to do."""
