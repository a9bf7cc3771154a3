"""Compiles a module of plain functions with numba, leaving the module itself as it is.

The same source serves twice: uncompiled for the runtime, small simulations and users' own rules (no wait
for numba), compiled for large ones. Numba's disk cache makes the compiling happen once a machine.

Two traps of that cache are met here. It loads only functions whose module can be imported by name, so the
twin is registered. And it forgets to look at the functions a function calls, so that an edit of `decider`
would leave an old `event_loop` in use: the cache's folder carries a digest of all sources that take part.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import pickle
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
    with _caching(module) as compile_function:
        for attribute, value in list(vars(twin).items()):
            if inspect.isfunction(value) and value.__module__ == twin.__name__:
                setattr(twin, attribute, compile_function(value))
            elif inspect.isfunction(value) and attribute in replaced:
                setattr(twin, attribute, replaced[attribute])
    return twin


def ready(module: ModuleType) -> ModuleType:
    """The compiled twin where its machine code is there, in this process or on disk, and else the module as it is.

    So nothing waits for the compiler, and what is compiled meanwhile, by whatever process, is used from then on.
    """
    return compiled(module) if is_compiled(module) else module


def is_compiled(module: ModuleType) -> bool:
    """Whether the machine code of `module` is there: all of it, as `compiling` noted for this kind of processor."""
    if module in _READY:
        return True
    folder = cache_folder(module)
    if folder is not None and (folder / _note(module)).exists():
        _READY.add(module)
    return module in _READY


@contextmanager
def compiling(module: ModuleType) -> Iterator[None]:
    """Within it the compiled twin is used, and so compiled. At its end all that is used of it has been: that is noted
    for other processes too, where numba keeps the machine code on disk."""
    _READY.add(module)
    try:
        yield
    except BaseException:
        _READY.discard(module)
        raise
    folder = cache_folder(module)
    if folder is not None:
        (folder / _note(module)).touch()


_READY: set[ModuleType] = set()


@functools.cache
def _note(module: ModuleType) -> str:
    """The name of the file that says that machine code of `module` for this processor lies beside it.

    Numba takes none that was made for another processor, by another version, or from a source at another path.
    """
    from importlib.metadata import version

    from llvmlite import binding

    processor = binding.get_default_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    made_by = *processor, version("numba"), sys.version, os.path.abspath(str(module.__file__))
    return f"compiled-{hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]}"


def _sources(module: ModuleType) -> list[bytes]:
    """The source of `module` and of all it is compiled with."""
    found = [Path(str(module.__file__)).read_bytes()]
    for sibling in getattr(module, "COMPILED_WITH", ()):
        found += _sources(sibling)
    return found


@functools.cache
def cache_folder(module: ModuleType) -> Path | None:
    """Where the machine code of `module` is kept: a folder named by the digest of its sources, in the first of these
    that can be written to. None where none can.

    They are NUMBA_CACHE_DIR, where that is set, the folder of the module's bytecode, and the user's own cache.
    """
    digest = hashlib.sha256(b"\0".join(_sources(module))).hexdigest()[:16]
    here = Path(str(module.__file__)).parent / "__pycache__"
    given = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock"
    for parent in (Path(given) if given else here, user):
        folder = parent / f"numba-{digest}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            _clear_what_cannot_be_read(folder)
            return folder
    return None


def _clear_what_cannot_be_read(folder: Path) -> None:
    """Removes machine code for arguments of a type that is no longer there: numba would fail to read its index."""
    for index in folder.rglob("*.nbi"):
        try:
            with index.open("rb") as file:
                pickle.load(file)  # numba's version
                pickle.loads(file.read())
        except (AttributeError, ImportError):
            for each in (*folder.glob("compiled-*"), *index.parent.glob("*.nb*")):
                each.unlink(missing_ok=True)
        except (OSError, EOFError, pickle.UnpicklingError):
            continue


@contextmanager
def _caching(module: ModuleType) -> Iterator[Callable[[Any], Any]]:
    """Yields numba's decorator, which keeps machine code in `cache_folder`; nowhere where there is none."""
    import numba
    from numba.core import config as numba_config

    config: Any = numba_config
    folder, before = cache_folder(module), config.CACHE_DIR
    if folder is not None:
        config.CACHE_DIR = str(folder)

    def compile_function(function: Any) -> Any:
        return numba.njit(cache=folder is not None, **getattr(module, "OPTIONS", {}))(function)

    try:
        yield compile_function
    finally:
        config.CACHE_DIR = before
