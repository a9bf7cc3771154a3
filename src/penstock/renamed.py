"""Names that version 0.2 gave up at the top level, each with what to write instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NAMES: dict[str, str] = {
    "DelegateOptions": "ps.TransportOptions(delegates=ps.runtime.DelegateOptions(...))",
    "Steering": "ps.AdaptOptions",
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


def refuse_old(keywords: Mapping[str, str], error: type[Exception]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse keywords that it no longer takes, each with what to write instead."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            for name in given:
                if name in keywords:
                    raise error(f"{name}= is gone since 0.2; give {keywords[name]}")
            return function(*args, **given)

        return called

    return wrap
