"""Names that version 0.2 gave up at the top level, each with what to write instead."""

from __future__ import annotations

import sys

NAMES: dict[str, str] = {
    "LinkCondition": "ps.Links, whose links take texts: ps.Links({(0, 1): 'latency:30ms+loss:1%'}), or "
    "penstock.cost.LinkCondition",
    "LinkConditions": "ps.Links, which reads conditions too: ps.Links.parse('0:1=latency:30ms+loss:1%')",
}

_MOVED = {
    "cost": "Ring Uneven costs_preset",
    "library": "SCHEDULES",
    "passes": "repeat_windows",
    "planning": "Expected order_microbatches",
    "program": "Step Stepper View by_microbatch earliest_first",
    "runtime": "EmulatedMesh EmulatedPipeline OpCall Placed Split device_mesh",
    "schedule": "MicrobatchOrder Needs Registered StageGraph Updates count_mismatch count_versions declare_order "
    "with_updates",
    "simulation": "Decoupled Footprint MeshTimeline simulate_mesh",
}
"""Names that lie in a submodule now."""
NAMES |= {name: f"ps.{module}.{name}" for module, names in _MOVED.items() for name in names.split()}


def missing(name: str, known: list[str]) -> Exception:
    """What `penstock.NAME` and `from penstock import NAME` raise where there is no such name (any more)."""
    if name not in NAMES:
        return AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(known)}")
    message = f"ps.{name} is gone since 0.2; use {NAMES[name]}"
    # `from penstock import NAME` replaces an AttributeError by one that says less. It asks by importlib first.
    importing = sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap"
    return ImportError(message, name=f"penstock.{name}") if importing else AttributeError(message)
