"""A run on emulated devices as it was ordered, and as it is handed to its ranks."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from penstock.train.emulated.settings import EmulatedSettings


@dataclass(frozen=True)
class EmulatedJob:
    """Attributes:
    folder: the run's folder. as_json: print the report as JSON and nothing else.
    """

    settings: EmulatedSettings
    folder: str
    as_json: bool = False

    def write(self, folder: Path) -> None:
        """Writes what `read` reads."""
        (folder / "order.json").write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> EmulatedJob:
        value = json.loads((folder / "order.json").read_text(encoding="utf-8"))
        return cls(**{**value, "settings": EmulatedSettings.from_mapping(value["settings"])})
