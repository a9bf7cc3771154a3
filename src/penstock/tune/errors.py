"""What can be wrong with a search."""

from __future__ import annotations


class TuneError(ValueError):
    """Options that leave nothing to search, or an invalid cost file. The message says what to do."""

    rule = "tune"


class RanksFailed(TuneError):
    """Processes that measured or verified ended without a result."""

    rule = "run"
    exit_code = 1
