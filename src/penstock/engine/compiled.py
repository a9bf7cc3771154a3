"""Compiles a module of plain functions with numba, leaving the module itself as it is.

The same source serves twice: uncompiled for the runtime, small simulations and users' own rules (no wait
for numba), compiled for large ones. Numba's disk cache makes the compiling happen once a machine.

Three traps of that cache are met here. It loads only functions whose module can be imported by name, so the
twin is registered. It forgets to look at the functions a function calls, so that an edit of `decider` would
leave an old `event_loop` in use: the cache's folder carries a digest of all sources that take part. And it
knows a named tuple by the name of its class, so that code made for other fields would read the wrong ones: which
fields they had is noted beside the code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
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
    """Whether the machine code of `module` is there: all of it, as `compiling` noted for this kind of processor, and
    made for named tuples that still have the same fields."""
    if module in _READY:
        return True
    folder = cache_folder(module)
    if folder is None:
        return False
    try:
        noted: dict[str, list[str]] = json.loads((folder / _note(module)).read_text())
    except FileNotFoundError:  # also where another process removes it just now, with what it speaks of
        return False
    if all(_fields_of(name) == fields for name, fields in noted.items()):
        _READY.add(module)
    return module in _READY


@contextmanager
def compiling(module: ModuleType) -> Iterator[None]:
    """Within it the compiled twin is used, and so compiled. At its end all that is used of it has been: that is noted
    for other processes too, where numba keeps the machine code on disk."""
    compiled(module)  # which removes what cannot be used, if that has not been seen to
    _READY.add(module)
    try:
        yield
    except BaseException:
        _READY.discard(module)
        raise
    folder = cache_folder(module)
    if folder is not None and not _NOT_KEPT:
        begun = folder / f"begun-{os.getpid()}"
        try:
            begun.write_text(json.dumps(_taken_by(compiled(module))))
            begun.replace(folder / _note(module))
        except OSError:  # the disk is full: others will compile for themselves
            with suppress(OSError):
                begun.unlink()


_READY: set[ModuleType] = set()
_NOT_KEPT: set[str] = set()
"""Functions whose machine code the disk did not take."""


@functools.cache
def _note(module: ModuleType) -> str:
    """The name of the file that says that machine code of `module` for this processor lies beside it, and for which
    named tuples.

    Numba takes none that was made for another processor, by another version, or from a source at another path.
    """
    from importlib.metadata import version

    from llvmlite import binding

    processor = binding.get_default_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    made_by = *processor, version("numba"), sys.version, os.path.abspath(str(module.__file__))
    return f"compiled-for-{hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]}"


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
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    for parent in (Path(given) if given else here, Path(user, "penstock")):
        try:
            folder = parent.expanduser() / f"numba-{digest}"
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # a user without a home, as a container may have
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


def _fields_of(name: str) -> list[str] | None:
    """The fields of a class of named tuples, given as `module:name`; None where there is no such class now."""
    module, _, of = name.partition(":")
    try:
        return list(getattr(importlib.import_module(module), of)._fields)
    except (ImportError, AttributeError):
        return None


def _tuples(types: Iterable[Any]) -> Iterator[tuple[str, list[str]]]:
    """Of all classes of named tuples among numba's types, the name and the fields when that was compiled."""
    for each in types:
        if hasattr(each, "instance_class"):
            yield f"{each.instance_class.__module__}:{each.instance_class.__qualname__}", list(each.fields)
        yield from _tuples(getattr(each, "types", ()))


def _taken_by(twin: ModuleType) -> dict[str, list[str]]:
    """The classes of named tuples that the functions of a compiled twin have been called with, and their fields."""
    functions = [value for value in vars(twin).values() if hasattr(value, "py_func")]
    return dict(chain.from_iterable(_tuples(types) for function in functions for types in function.signatures))


def _clear_what_cannot_be_used(folder: Path) -> None:
    """Removes machine code for named tuples that are no longer there, of which numba would fail to read the index, or
    that have other fields now, which numba would take for the same."""
    for index in folder.rglob("*.nbi"):
        try:
            with index.open("rb") as file:
                pickle.load(file)  # numba's version
                _, compiled_for = pickle.loads(file.read())  # what it was made of, and a file for each signature
            taken = chain.from_iterable(_tuples(signature) for signature, *_ in compiled_for)
            usable = all(_fields_of(name) == fields for name, fields in taken)
        except (AttributeError, ImportError):
            usable = False
        except (OSError, EOFError, pickle.UnpicklingError):
            continue
        if not usable:
            for each in (*folder.glob("compiled-*"), *index.parent.glob("*.nb*")):
                each.unlink(missing_ok=True)


def _keep(save: Callable[..., None], name: str, *compiled_code: Any) -> None:
    """Keeps machine code on disk, if that takes it: what is compiled is used all the same."""
    try:
        save(*compiled_code)
    except OSError:
        _NOT_KEPT.add(name)


@contextmanager
def _caching(module: ModuleType) -> Iterator[Callable[[Any], Any]]:
    """Yields numba's decorator, which keeps machine code in `cache_folder`; nowhere where there is none."""
    import numba
    from numba.core import config as numba_config

    config: Any = numba_config
    folder, before = cache_folder(module), config.CACHE_DIR
    if folder is not None:
        if not is_compiled(module):
            _clear_what_cannot_be_used(folder)
        config.CACHE_DIR = str(folder)

    def compile_function(function: Any) -> Any:
        made: Any = numba.njit(cache=folder is not None, **getattr(module, "OPTIONS", {}))(function)
        if folder is not None:
            made._cache.save_overload = functools.partial(_keep, made._cache.save_overload, function.__qualname__)
        return made

    try:
        yield compile_function
    finally:
        config.CACHE_DIR = before
