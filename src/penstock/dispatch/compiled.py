"""Compiles a module of plain functions with numba, leaving the module itself as it is.

The same source serves twice: uncompiled for the runtime, small simulations and users' own rules (no wait
for numba), compiled for large ones. Numba's disk cache makes the compiling happen once a machine.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from types import ModuleType
from typing import Any


@functools.cache
def compiled(module: ModuleType) -> ModuleType:
    """A twin of `module` in which every function defined there, or imported from a sibling that is
    compiled the same way (listed in its `COMPILED_WITH`), is compiled on first use."""
    import numba

    spec = importlib.util.spec_from_file_location(f"{module.__name__}__compiled", module.__file__)
    if spec is None or spec.loader is None:
        raise ImportError(f"the source of {module.__name__} is needed to compile it")
    twin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(twin)
    siblings: tuple[ModuleType, ...] = getattr(module, "COMPILED_WITH", ())
    replaced: dict[str, Any] = {}
    for sibling in siblings:
        replaced |= {n: f for n, f in vars(compiled(sibling)).items() if not n.startswith("_") and callable(f)}
    for name, value in list(vars(twin).items()):
        if inspect.isfunction(value) and value.__module__ == twin.__name__:
            setattr(twin, name, numba.njit(cache=True)(value))
        elif inspect.isfunction(value) and name in replaced:
            setattr(twin, name, replaced[name])
    return twin
