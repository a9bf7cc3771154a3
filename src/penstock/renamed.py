"""Names that version 0.2 gave up, each with what to write instead, and keywords that there never were."""

from __future__ import annotations

import difflib
import inspect
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
    return _gone("penstock", "ps", name, NAMES[name])


def renamed(module: str, name: str, names: Mapping[str, str]) -> Exception:
    """What `MODULE.NAME` and `from MODULE import NAME` raise in a module below `penstock`.

    Args:
        names: those that the module gave up, each with the one it has now.
    """
    if name not in names:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    where = module.replace("penstock", "ps", 1)
    return _gone(module, where, name, f"{where}.{names[name]}")


def _gone(module: str, where: str, name: str, now: str) -> Exception:
    message = f"{where}.{name} is gone since 0.2; use {now}"
    # `from MODULE import NAME` replaces an AttributeError by one that says less. It asks by importlib first.
    importing = sys._getframe(3).f_globals.get("__name__") == "importlib._bootstrap"
    return ImportError(message, name=f"{module}.{name}") if importing else AttributeError(message)


def refuse_old(keywords: Mapping[str, str], error: type[Exception]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse arguments that it does not take, with its own error: keywords that it no longer takes,
    each with what to write instead; others with those that it has; and more by place than it has places.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        takes_all = any(each.kind is each.VAR_POSITIONAL for each in known.values())
        places = [
            name for name, each in known.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        own = [name for name in known if name != "self"]
        called_as = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            for name in given:
                if name in keywords:
                    raise error(f"{name}= is gone since 0.2; give {keywords[name]}")
                if name not in known and not takes_any:
                    raise error(f"{called_as} has no argument {name!r}; {_instead(name, own)}")
            if len(args) > len(places) and not takes_all:
                so = [name for name in places if name != "self"]
                raise error(
                    f"{called_as} was given {len(args) - len(places) + len(so)} arguments by place and takes "
                    f"{len(so)} so ({', '.join(so)}); give the others by name: "
                    f"{', '.join(f'{name}=' for name in own if name not in so)}"
                )
            return function(*args, **given)

        return called

    return wrap


def _instead(name: str, known: list[str]) -> str:
    """What to write in place of a keyword that there is not."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    near += [each for each in known if name in each.split("_") and each not in near]
    return f"did you mean {' or '.join(f'{each}=' for each in near)}?" if near else f"it takes {', '.join(known)}"
