"""Runs the engine's plain functions as C, where that has been built, and else as they stand.

`setup.py` builds the library that `to_c` writes, where there is a C compiler. Where the library is not there, or its
sources have changed since, as in a checkout, the first who needs it builds it into the user's cache.
Without a compiler the same functions run as Python, which is some hundred times slower, and that is said once.

The library holds no Python of any version: `ctypes` loads it. Its functions let other threads run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGE = Path(__file__).parents[1]
FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden")
"""No fast mathematics: results are those of Python to the last bit."""

KERNELS = {
    "penstock.engine.event_loop": ("run",),
    "penstock.engine.list_by_rules": ("run",),
    "penstock.engine.list_by_values": ("list_ops",),
    "penstock.engine.sweep": ("earliest",),
    "penstock.planning.forward_backward": ("trials", "shaken", "seed"),
    "penstock.planning.graph.sequence": ("placed", "walk", "seed"),
    "penstock.planning.longest_paths": ("heads", "jackson", "jackson_all"),
    "penstock.planning.ramps": ("idle_till", "with_both_ends"),
    "penstock.planning.building_blocks": ("squeezed", "walk", "seed"),
    "penstock.planning.row_walk": ("set_forms", "fits", "timed", "anneal", "seed"),
    "penstock.planning.destructive_bound": ("refuted",),
}
"""The functions that Python calls, by their modules."""
CALLED = ("penstock.planning.metropolis", "penstock.planning.problem")
"""Modules outside this folder of which C alone calls functions, or takes the forms of arrays."""


def is_compiled() -> bool:
    """Whether the library is there."""
    return _library() is not None


@functools.cache
def compiled(module: ModuleType) -> Any:
    """What a module has, with those of its functions that are in the library as C; the module itself where there is
    no library."""
    library = _library()
    if library is None:
        return module
    kernels = {name: _entry(library, module, name) for name in KERNELS[module.__name__]}
    return SimpleNamespace(**{**vars(module), **kernels})


def source() -> str:
    """All of the library's C."""
    from penstock.translate.to_c import translated  # whom only building needs

    return "\n".join([*translated(PACKAGE, KERNELS), f'EXPORTED const char digest[] = "{digest()}";\n'])


@functools.cache
def digest() -> str:
    """What tells a library that was built from these sources."""
    files = {PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in (*KERNELS, *CALLED)}
    files |= {each for folder in ("engine", "translate") for each in (PACKAGE / folder).glob("*.[hp]*")}
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]


def build(target: Path, *flags: str) -> None:
    """Builds the library.

    Args:
        flags: more that the compiler is told.

    Raises:
        OSError: there is no compiler, or it fails, or the folder can't be written to.
    """
    import shutil  # here, since only building needs them
    import subprocess
    import tempfile

    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        given, made = Path(folder, "core.c"), Path(folder, "core.so")
        given.write_text(source())
        command = [*compiler.split(), *FLAGS, *flags, "-fPIC", "-shared", str(given), "-o", str(made), "-lm"]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        if ran.returncode:
            raise OSError(ran.stderr)
        made.replace(target)


@functools.cache
def _library() -> ctypes.PyDLL | None:
    for path in sorted((PACKAGE / "engine").glob("_core*.so")):
        library = ctypes.PyDLL(str(path))
        if (ctypes.c_char * 16).in_dll(library, "digest").value.decode() == digest():
            return library
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        path = Path(cache).expanduser() / "penstock" / f"core-{digest()}-{os.uname().machine}.so"
        if not path.exists():
            build(path)
        return ctypes.PyDLL(str(path))
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"penstock plans and simulates in Python, a hundred times slower than in C, which could not be built: "
            f"{error}; install a C compiler (gcc or clang) and try again",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _entry(library: ctypes.PyDLL, module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of the library, which takes its arguments as the Python function does."""
    entry = getattr(library, f"call_{module.__name__.rpartition('.')[2]}_{name}")
    entry.restype, entry.argtypes = ctypes.py_object, [ctypes.py_object]
    signature = inspect.signature(getattr(module, name))
    count = len(signature.parameters)

    @functools.wraps(getattr(module, name))
    def call(*args: Any, **named: Any) -> Any:
        if len(args) < count:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            args = bound.args
        return entry(args)

    return call
