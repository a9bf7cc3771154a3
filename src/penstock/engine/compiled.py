"""Compiles a module of plain functions with numba, leaving the module itself as it is.

The same source serves twice: uncompiled for the runtime, small simulations and users' own rules (no wait
for numba), compiled for large ones. Numba's disk cache makes the compiling happen once a machine.

Two traps of that cache are met here. It loads only functions whose module can be imported by name, so the
twin is registered. And it forgets to look at the functions a function calls, so that an edit of `core`
would leave an old `engine` in use: the cache's folder carries a digest of all sources that take part.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


@functools.cache
def compiled(module: ModuleType) -> ModuleType:
    """A twin of `module` in which every function defined there, or imported from a sibling that is
    compiled the same way (listed in its `COMPILED_WITH`), is compiled on first use."""
    name = f"{module.__name__}__compiled"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    if spec is None or spec.loader is None:
        raise ImportError(f"the source of {module.__name__} is needed to compile it")
    twin = importlib.util.module_from_spec(spec)
    sys.modules[name] = twin
    spec.loader.exec_module(twin)
    siblings: tuple[ModuleType, ...] = getattr(module, "COMPILED_WITH", ())
    replaced: dict[str, Any] = {}
    for sibling in siblings:
        replaced |= {n: f for n, f in vars(compiled(sibling)).items() if not n.startswith("_") and callable(f)}
    with _cache_folder(module) as compile_function:
        for attribute, value in list(vars(twin).items()):
            if inspect.isfunction(value) and value.__module__ == twin.__name__:
                setattr(twin, attribute, compile_function(value))
            elif inspect.isfunction(value) and attribute in replaced:
                setattr(twin, attribute, replaced[attribute])
    return twin


def _sources(module: ModuleType) -> list[bytes]:
    """The source of `module` and of all it is compiled with."""
    found = [Path(str(module.__file__)).read_bytes()]
    for sibling in getattr(module, "COMPILED_WITH", ()):
        found += _sources(sibling)
    return found


@contextmanager
def _cache_folder(module: ModuleType) -> Iterator[Callable[[Any], Any]]:
    """Yields numba's decorator, its cache beside the module's bytecode in a folder named by the sources' digest.

    Where nothing can be written there, numba's own places serve, and where there are none, no cache.
    """
    import numba
    from numba.core import config as numba_config

    config: Any = numba_config
    digest = hashlib.sha256(b"\0".join(_sources(module))).hexdigest()[:16]
    folder = Path(str(module.__file__)).parent / "__pycache__" / f"numba-{digest}"
    before = config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.CACHE_DIR = str(folder)
    except OSError:
        pass

    def compile_function(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **getattr(module, "OPTIONS", {}))(function)
        except RuntimeError:  # numba found no folder it may write to
            return numba.njit(function)

    try:
        yield compile_function
    finally:
        config.CACHE_DIR = before
