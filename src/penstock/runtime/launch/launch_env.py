"""What the parent hands to each child, beside torch's own RANK, WORLD_SIZE and the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["Handover"]

VARIABLE = "PENSTOCK_LAUNCH"


@dataclass(frozen=True)
class Handover:
    """The folder for reports, and descriptors: the lifeline's reading end, the real stderr, on rank 0 the store's
    listening socket."""

    reports: str
    lifeline: int
    stderr: int
    store: int | None

    def variables(self) -> dict[str, str]:
        """As environment variables for the child."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Handover | None:
        """What this process was handed, None if no parent of ours started it."""
        text = environment.get(VARIABLE)
        return cls(**json.loads(text)) if text else None
