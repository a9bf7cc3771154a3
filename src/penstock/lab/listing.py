"""Labs of this machine: those that run, with what their links did, and what dead ones left."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.lab.errors import LabError
from penstock.lab.folder import LabFolder, names, namespaces_of
from penstock.lab.running import RunningLab


def listed() -> list[dict[str, Any]]:
    """One entry a lab: its record, whether it is alive, its namespaces, and of each way that carried or refused
    anything or is under a condition what `RunningLab.ways` says."""
    found: list[dict[str, Any]] = []
    for name in names():
        entry: dict[str, Any] = {"name": name, "alive": LabFolder(name).alive(), "namespaces": namespaces_of(name)}
        if entry["alive"]:
            try:
                lab = RunningLab(name)
                ways = [way for way in lab.ways() if way["num_packets"] or way["num_refused"] or way["condition"]]
            except LabError:  # it is being made, or taken away just now
                continue
            entry |= {**asdict(lab.record), "ways": ways}
        found.append(entry)
    return found
