"""Plans, proves, draws and runs pipeline-parallel training schedules for PyTorch.

    import penstock as ps

    s = ps.build("1f1b", num_ranks=4, num_microbatches=12)
    ps.check(s)
    print(ps.simulate(s, ps.Costs.uniform(num_stages=4, f=10, i=10, w=10)).makespan)

The names for planning, proving, drawing and running are here. Everything else is in submodules (`ps.program`,
`ps.passes`, `ps.runtime`, ...). All are imported when they are first used. `ps.Pipeline`, its options,
`ps.emulate`, `ps.split` and `ps.StepResult` belong to the runtime and import torch: `pip install '.[torch]'`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from penstock.extras import what_to_install

if TYPE_CHECKING:
    from penstock.cost import CostError, Costs, Links, Mesh
    from penstock.formats import load, save
    from penstock.library import build
    from penstock.planning import Plan, plan
    from penstock.program import Branch, NewOp, Program, Rules, breadth_first, depth_first, placements
    from penstock.runtime import (
        WHOLE,
        AdaptOptions,
        BatchRules,
        ParallelOptions,
        Pipeline,
        PrecisionOptions,
        RuntimeFailure,
        StepResult,
        TransportOptions,
        VerifyError,
        emulate,
        plain_step,
        split,
    )
    from penstock.schedule import Op, Placement, Schedule, ScheduleError, check, parse
    from penstock.simulation import Blocking, Timeline, footprint, simulate

__version__ = "0.2.0"


__all__ = [
    "AdaptOptions",
    "BatchRules",
    "Blocking",
    "Branch",
    "CostError",
    "Costs",
    "Links",
    "Mesh",
    "NewOp",
    "Op",
    "ParallelOptions",
    "Pipeline",
    "Placement",
    "Plan",
    "PrecisionOptions",
    "Program",
    "Rules",
    "RuntimeFailure",
    "Schedule",
    "ScheduleError",
    "StepResult",
    "Timeline",
    "TransportOptions",
    "VerifyError",
    "WHOLE",
    "breadth_first",
    "build",
    "check",
    "depth_first",
    "emulate",
    "footprint",
    "load",
    "parse",
    "placements",
    "plain_step",
    "plan",
    "save",
    "simulate",
    "split",
]


_HOMES = ("schedule", "cost", "simulation", "program", "library", "planning", "formats", "runtime")
"""Submodules that the names above come from, in the order in which they import one another."""


def __getattr__(name: str) -> Any:
    if name in _submodules():
        return import_module(f"penstock.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        home = next(each for each in (import_module(f"penstock.{home}") for home in _HOMES) if name in each.__all__)
    except ModuleNotFoundError as error:
        said = what_to_install(error) or error
        raise ModuleNotFoundError(f"ps.{name}: {said}", name=error.name) from None
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_submodules()})


@cache
def _submodules() -> set[str]:
    return {each.name for each in iter_modules(__path__) if not each.name.startswith("_")}
