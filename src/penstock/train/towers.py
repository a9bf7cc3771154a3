"""The options for single towers of a model that has several.

    --tower text=ranks:2+microbatches:8 --tower contrast=microbatches:2

Needs no torch: it is read before anything else.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.train.checks import SettingsError

STYLES = ("1f1b", "interleaved-1f1b", "gpipe")
"""Schedules that one tower can have."""
MIXED = "mixed"
"""The tower with most ranks interleaved, the others 1F1B."""
CONTRAST = "contrast"
KEYS = ("ranks", "stages", "microbatches", "schedule")


@dataclass(frozen=True)
class TowerOptions:
    """None for what was not asked for."""

    ranks: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None


def read_towers(text: str | None) -> dict[str, TowerOptions]:
    """By tower, or "contrast". Raises SettingsError."""
    found: dict[str, TowerOptions] = {}
    for each in shlex.split(text or ""):
        name, equals, wanted = each.partition("=")
        if not (name and equals and wanted):
            raise SettingsError(f"--tower {each}: write NAME=KEY:VALUE+KEY:VALUE, like text=ranks:2+microbatches:8")
        if name in found:
            raise SettingsError(
                f"--tower {each}: tower {name!r} is given twice; give all its options at once, separated by +"
            )
        found[name] = _options(each, name, wanted)
    return found


def _options(option: str, name: str, wanted: str) -> TowerOptions:
    values: dict[str, int | str] = {}
    for part in wanted.split("+"):
        key, _, value = part.partition(":")
        if key not in KEYS or not value:
            raise SettingsError(f"--tower {option}: {part!r} is none of {', '.join(f'{k}:VALUE' for k in KEYS)}")
        if name == CONTRAST and key != "microbatches":
            raise SettingsError(
                f"--tower {option}: the contrast is one stage of its own; it takes microbatches alone"
            )
        if key == "schedule":
            if value not in STYLES:
                raise SettingsError(f"--tower {option}: a tower's schedule is {', '.join(STYLES)}, not {value!r}")
            values[key] = value
        elif value.isdigit() and int(value) > 0:
            values[key] = int(value)
        else:
            raise SettingsError(f"--tower {option}: {key} is {value!r}; give a whole number of at least 1")
    return TowerOptions(**values)  # type: ignore[arg-type]


def check_towers(asked: Mapping[str, TowerOptions], towers: Mapping[str, object]) -> None:
    """Raises SettingsError for a tower that the model does not have."""
    for name in asked:
        if name not in towers and name != CONTRAST:
            raise SettingsError(f"--tower {name}=...: the model has {', '.join(towers)}, and the {CONTRAST}")
