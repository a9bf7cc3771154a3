"""One error for every checkpoint that cannot be written, read or used."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CheckpointError", "DamagedCheckpointError"]


class CheckpointError(ValueError):
    """One or two lines: what was given, the rule it breaks, and what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, or are not what was written; an older checkpoint may be whole.

    Attributes:
        damage: which file, and what is wrong with it.
        older: the newest older checkpoint that looks whole; None where there is none, or none was looked for.
    """

    def __init__(self, damage: str, older: Path | None = None) -> None:
        offer = "use an older checkpoint"
        if older is not None:
            offer = f'{older} before it is whole: load("{older}"), or give load(..., fallback=True)'
        super().__init__(f"{damage}; {offer}")
        self.damage, self.older = damage, older
