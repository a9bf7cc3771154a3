"""Names in Python files of the user's, `FILE.py:NAME`: a model, or its data. Needs no torch.

Every process imports the file itself, once, with random numbers from the same seed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from penstock.train.checks import SettingsError
from penstock.unknown_names import did_you_mean


class OwnName(NamedTuple):
    """A name in a Python file. `name` is empty if none was given."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.name}"


def is_own(text: str | None) -> bool:
    """Whether a Python file is meant, with or without a name in it."""
    return text is not None and (text.endswith(".py") or text.rpartition(":")[0].endswith(".py"))


def own_name(text: str) -> OwnName:
    """The file and the name in it."""
    path, _, name = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    return OwnName(Path(path), name)


def find(text: str, option: str) -> tuple[ModuleType, Any]:
    """Imports the file, unless this process has imported it. Returns the module and what the name stands for.

    Args:
        option: the option that gave the name, for error messages.

    Raises:
        SettingsError: no such file or name, or a file that cannot be imported, with the line.
    """
    own = own_name(text)
    if not own.path.is_file():
        raise SettingsError(
            f"{option} {text}: there is no file {own.path} in {os.getcwd()}; give the path of a Python file and a "
            "name in it, like nets.py:Net"
        )
    module = _imported(own.path, option)
    there = f"it defines {', '.join(_names_in(module)) or 'nothing'}"
    if not own.name:
        raise SettingsError(f"{option} {text}: which name in it? Give {own.path.name}:NAME; {there}")
    if not hasattr(module, own.name):
        hint = did_you_mean(own.name, [name for name in vars(module) if name[0] != "_"], there)
        raise SettingsError(f"{option}: {own.path} has no {own.name!r}; {hint}")
    return module, getattr(module, own.name)


class ArgumentNames(NamedTuple):
    """The arguments of a function that may be given by name, those that have no default, and whether it takes any."""

    named: Sequence[str] = ()
    needed: Sequence[str] = ()
    takes_all: bool = False

    @classmethod
    def of(cls, found: Any) -> ArgumentNames:
        """None where the function does not say."""
        try:
            known = inspect.signature(found).parameters
        except (TypeError, ValueError):
            return cls()
        named = [n for n, each in known.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        by_place = [n for n, each in known.items() if each.kind is each.POSITIONAL_ONLY]
        needed = [name for name in (*named, *by_place) if known[name].default is inspect.Parameter.empty]
        return cls(named, needed, any(each.kind is each.VAR_KEYWORD for each in known.values()))


def made(
    found: Any, own: OwnName, option: str, given: Mapping[str, Any], others: Mapping[str, Any] | None = None
) -> Any:
    """Calls a class or function, and returns what it makes.

    Args:
        option: the option that named it. given: arguments by name; it must take all of them.
        others: further arguments; it gets those that it takes.

    Raises:
        SettingsError: it needs other arguments, or fails, with the line.
    """
    takes, options = ArgumentNames.of(found), f"{option}-options"
    if extra := [name for name in given if name not in takes.named and not takes.takes_all]:
        has = f"it takes {', '.join(takes.named)}" if takes.named else "it takes no arguments"
        raise SettingsError(f"{options}: {_at(found, own)} has no {extra[0]!r}; {has}")
    arguments = {name: value for name, value in (others or {}).items() if name in takes.named} | dict(given)
    if missing := [name for name in takes.needed if name not in arguments]:
        how = f"give {options} '{{\"{missing[0]}\": ...}}', or name" if option == "--model" else "name"
        raise SettingsError(
            f"{option}: {_at(found, own)} needs {', '.join(missing)}; {how} a function that takes nothing and "
            "returns it"
        )
    return called(lambda: found(**arguments), f"{option}: {own}", own.path)


def called(act: Callable[[], Any], what: str, path: Path, hint: str = "") -> Any:
    """Calls the user's code, and sends its prints to stderr. Raises SettingsError for any error, with the line.

    Args:
        hint: text to add to the error.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return act()
    except Exception as error:
        if type(error).__module__.startswith("penstock."):
            raise
        raise SettingsError(f"{what} fails: {told(error, path)}" + f"\n{hint}" * bool(hint)) from error


def told(error: BaseException, path: Path) -> str:
    """An error in one line, with the innermost line of the user's own code, in the file or in one beside it."""
    said = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}\n{type(error).__name__}: {error.msg}"
    folder = str(path.resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(folder + os.sep) and "site-packages" not in f.filename]
    if not own:
        return what
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}\n{what}"


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the random numbers of Python, numpy and torch, and restores their state afterwards."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _imported(path: Path, option: str) -> ModuleType:
    """The file as a module, imported once per process, as a model and its data may be in the same file."""
    path = path.resolve()
    known = _MODULES.get(path)
    if known is not None:
        return known
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"own_{name}_{len(_MODULES)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file whose name ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script: it may import the files beside it
    sys.modules[name] = module
    try:
        with seeded(0), contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise SettingsError(f"{option}: {path} can't be imported: {told(error, path)}") from error
    _MODULES[path] = module
    return module


def sources_of(path: Path) -> set[Path]:
    """A file of the user's, and those beside it or in folders there that this process has imported, by it or another.

    Installed packages are none of them.
    """
    path = path.resolve()
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    known = {Path(file).resolve() for file in files if isinstance(file, str) and os.path.isabs(file)}
    own = Path(__file__).resolve().parents[1]
    inside = {file for file in known if path.parent in file.parents and own not in file.parents}
    return {path, *(f for f in inside if f.is_file() and not {"site-packages", "dist-packages"} & {*f.parts})}


_MODULES: dict[Path, ModuleType] = {}
"""The files that this process has imported."""


def _names_in(module: ModuleType) -> list[str]:
    """The functions, classes and objects that a file itself defines, without what it imports and plain values."""

    def is_own(value: object) -> bool:
        if hasattr(value, "__name__"):
            return getattr(value, "__module__", "") == module.__name__
        return type(value).__module__ not in ("builtins", "__future__")

    return [name for name, value in vars(module).items() if not name.startswith("_") and is_own(value)]


def _at(found: Any, own: OwnName) -> str:
    """What is meant, with the line of the file that defines it."""
    try:
        path, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
    except (OSError, TypeError):
        return str(own)
    return f"{own.name} ({path}:{line})"
