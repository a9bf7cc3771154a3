"""Names and modules given up by version 0.2, each with what to write instead; arguments that there never were."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib.abc import MetaPathFinder
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

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
    "planning": "order_microbatches",
    "program": "Step Stepper View by_microbatch earliest_first",
    "runtime": "EmulatedMesh EmulatedPipeline OpCall Placed Split device_mesh",
    "schedule": "MicrobatchOrder Needs Registered StageGraph Updates count_mismatch count_versions declare_order "
    "with_updates",
    "simulation": "Decoupled Footprint MeshTimeline simulate_mesh",
}
"""Names that lie in a submodule now."""
NAMES |= {name: f"ps.{module}.{name}" for module, names in _MOVED.items() for name in names.split()}

MODULES = {
    "penstock.plan": "penstock.planning",
    "penstock.simulate": "penstock.simulation",
    "penstock.runtime.devices": "penstock.runtime.execute",
    "penstock.runtime.executors": "penstock.runtime.execute",
    "penstock.runtime.sharded": "penstock.runtime.parameters",
    "penstock.runtime.split": "penstock.runtime.stage.split_backward",
    "penstock.runtime.steering": "penstock.runtime.adapt",
    "penstock.runtime.stores": "penstock.runtime.adapt",
    "penstock.runtime.transports": "penstock.runtime.transport",
    "penstock.runtime.weights": "penstock.runtime.parameters",
}
"""Modules by their old names, each with the one that has what was in it."""

MEANT = {
    "shared": "stages that several ranks share are the schedule's: ps.Placement(..., shared=...); parameters that "
    "are one are given as parallel=ps.ParallelOptions(tied=...)",
}
"""Arguments that a function never had and that lie elsewhere, with where."""


class OldModules(MetaPathFinder):
    """Is asked for a module that was not found, and says which module has its place."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError if it is one of `MODULES`."""
        if now := MODULES.get(fullname):
            raise ModuleNotFoundError(f"{fullname} is gone since 0.2; use {now}", name=fullname)


def point_from_old_modules() -> None:
    """Makes imports of `MODULES` fail with the new name. It comes after all other ways to find a module."""
    if not any(isinstance(each, OldModules) for each in sys.meta_path):
        sys.meta_path.append(OldModules())


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


class OldName:
    """An attribute of a class that has another name now. Asking an object for it is an error that names that one."""

    def __init__(self, now: str) -> None:
        self._now = now

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> OldName:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__}.{self._name} is called {self._now} now")


def _gone(module: str, where: str, name: str, now: str) -> Exception:
    message = f"{where}.{name} is gone since 0.2; use {now}"
    # `from MODULE import NAME` replaces an AttributeError by one that says less. It asks by importlib first.
    importing = sys._getframe(3).f_globals.get("__name__") == "importlib._bootstrap"
    return ImportError(message, name=f"{module}.{name}") if importing else AttributeError(message)


def refuse_old(keywords: Mapping[str, str], error: type[Exception]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse a call that does not fit it, with its own error: keywords that it no longer takes,
    each with what to write instead; others, with the nearest that it has or what else has them; more by place than
    it has places; and a call without what it needs.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        takes_all = any(each.kind is each.VAR_POSITIONAL for each in known.values())
        places = [
            name for name, each in known.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        own = [name for name in known if name not in ("self", "cls")]
        needed = [
            name
            for name, each in known.items()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        called_as = function.__qualname__.removesuffix(".__init__")
        _TAKEN[called_as] = own

        @wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            for name in given:
                if name in keywords:
                    raise error(f"{name}= is gone since 0.2; give {keywords[name]}")
                if name not in known and not takes_any:
                    raise error(f"{called_as} has no argument {name!r}; {_instead(name, own, called_as)}")
            if len(args) > len(places) and not takes_all:
                so = [name for name in places if name in own]
                by_name = ", ".join(f"{name}=" for name in own if name not in so)
                raise error(
                    f"{called_as} was given {len(args) - len(places) + len(so)} arguments by place and takes "
                    f"{len(so)} so ({', '.join(so)}); "
                    + (f"give the others by name: {by_name}" if by_name else "leave the others out")
                )
            if lacking := [name for name in needed if name not in given and name not in places[: len(args)]]:
                near = [name for name in given if name not in known and _near(name, lacking)]
                got = f"; it was given {' and '.join(f'{name}=' for name in near)} instead" if near else ""
                raise error(f"{called_as} needs {' and '.join(f'{name}=' for name in lacking)}{got}")
            return function(*args, **given)

        return called

    return wrap


def refuse_unknown(error: type[Exception], keywords: Mapping[str, str] | None = None) -> Callable[[type[C]], type[C]]:
    """Makes a class refuse arguments that it does not take, with its own error, as `refuse_old` does.

    Args:
        keywords: those that it took before, or that another class took, with what to write instead.
    """

    def wrap(kind: type[C]) -> type[C]:
        kind.__init__ = refuse_old(keywords or {}, error)(kind.__init__)  # type: ignore[method-assign]
        return kind

    return wrap


_TAKEN: dict[str, list[str]] = {}
"""By the name of a function or class that refuses others, the arguments that it takes."""


def _instead(name: str, known: list[str], called_as: str) -> str:
    """What to write in place of a keyword that there is not."""
    if name in MEANT:
        return MEANT[name]
    others = [each for each, taken in _TAKEN.items() if name in taken and each != called_as]
    if options := [each for each in others if each.endswith("Options")]:
        return f"give {' or '.join(f'{each}({name}=...)' for each in options)}"
    if near := _near(name, known):
        return f"did you mean {' or '.join(f'{each}=' for each in near)}?"
    calls = [f"{each}({name}=...)" for each in others if each == "Pipeline" or each.islower()]
    return f"it takes {', '.join(known)}" + (f"; {' and '.join(calls)} would take it" if calls else "")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """A question that proposes the known names closest to a mistyped one; `otherwise` if none is close."""
    near = difflib.get_close_matches(name, list(known), cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _near(name: str, known: list[str]) -> list[str]:
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return near + [each for each in known if name in each.split("_") and each not in near]
