"""What can be wrong with a search that a person asked for."""

from __future__ import annotations


class TuneError(ValueError):
    """Options that leave nothing to search, or a cost file that makes no sense; the message says the way out."""

    rule = "tune"


class DatabaseError(TuneError):
    """The database of measurements cannot be used."""

    rule = "database"


class RanksFailed(TuneError):
    """Processes that measured or verified ended without a result."""

    rule = "run"
    exit_code = 1
