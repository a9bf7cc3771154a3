"""What the parent of a run hands to its ranks: one JSON file, so that all start from the same values."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.train.settings import Settings


@dataclass(frozen=True)
class Order:
    """A run as it was ordered.

    Attributes:
        folder: the run's folder. resume: go on from its newest checkpoint.
        export: a file for the model at the end, or None. as_json: print the report as JSON and nothing else.
    """

    settings: Settings
    folder: str
    resume: bool = False
    export: str | None = None
    as_json: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Order:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**value, "settings": Settings.from_mapping(value["settings"], str(path))})
