"""Docstrings of all public names: every parameter is described, what is raised is said, and every example runs."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import enum
import inspect
import re
import textwrap
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from documents import ROOT

pytestmark = pytest.mark.unit

NAMES = [name for name in ps.__all__ if not isinstance(getattr(ps, name), types.ModuleType)]
NOT_MADE = (Exception, enum.Enum)
"""Classes that a caller only names or catches."""
ERRORS = {name for name in NAMES if isinstance(getattr(ps, name), type) and issubclass(getattr(ps, name), Exception)}

PACKAGE = Path(ps.__file__).parent
FOLDERS = sorted(
    file.parent.name for file in PACKAGE.glob("*/__init__.py") if "\n__all__ = " in file.read_text(encoding="utf-8")
)
REFERENCE = sorted(
    next(
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "docs" / "site" / "pages.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MODULES" and node.value is not None
    )
)
"""The folders that have a page in the reference; the others hold names for the command line and for pages."""
MADE_FOR_YOU = {"View", "OpCall", "Split", "Graph"}
"""Values that a user is given and does not make."""


def parameters(thing: Any) -> set[str]:
    """What a caller may give: the fields of a value, or the parameters of a call."""
    if isinstance(thing, type) and issubclass(thing, tuple):
        return set(thing._fields)
    if getattr(thing, "_is_protocol", False):
        return set(inspect.get_annotations(thing))
    if dataclasses.is_dataclass(thing):
        return {each.name for each in dataclasses.fields(thing) if each.init and not each.name.startswith("_")}
    return set(inspect.signature(thing).parameters) - {"self"} if callable(thing) else set()


def described(text: str) -> set[str]:
    """The names that the sections Args and Attributes describe."""
    found: set[str] = set()
    for section in re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n)+)", text + "\n", re.MULTILINE):
        for names in re.findall(r"^    (\w+(?:, \w+)*):", section, re.MULTILINE):
            found.update(names.split(", "))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_described(name: str) -> None:
    thing = getattr(ps, name)
    text = inspect.getdoc(thing)
    assert text
    assert "Examples:" in text
    if name not in ERRORS:
        assert parameters(thing) - described(text) == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_of_the_folders_describe_their_parameters(folder: str) -> None:
    module = import_module(f"penstock.{folder}")
    lacking = {}
    for name in set(module.__all__) - set(ps.__all__) - MADE_FOR_YOU:
        thing = getattr(module, name)
        if not inspect.isfunction(thing) and not (isinstance(thing, type) and not issubclass(thing, NOT_MADE)):
            continue  # an error, an enumeration, a module or a plain value
        if missing := parameters(thing) - described(inspect.getdoc(thing) or ""):
            lacking[name] = missing
    assert lacking == {}


@pytest.mark.slow
@pytest.mark.parametrize("folder", REFERENCE)
def test_examples_of_the_names_of_the_folders_run(folder: str) -> None:
    """Each in a docstring of its own; constants and unions of types have none."""
    module = import_module(f"penstock.{folder}")
    without, wrong = [], []
    for name in sorted(set(module.__all__) - set(ps.__all__)):
        thing = getattr(module, name)
        if not callable(thing) or isinstance(thing, types.GenericAlias):
            continue
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, f"ps.{folder}.{name}", None, 0)
        if not test.examples:
            without.append(name)
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=wrong.append)
    assert without == []
    assert not wrong, "".join(wrong)


def raised_by(thing: Any) -> set[str]:
    """The classes of errors in the raise statements of a function, or of what makes a value."""
    made_by = [getattr(thing, each, None) for each in ("__init__", "__post_init__")]
    bodies = made_by if isinstance(thing, type) else [thing]
    found = set()
    for body in map(inspect.unwrap, filter(inspect.isfunction, bodies)):
        if not body.__code__.co_filename.startswith(str(PACKAGE)):
            continue  # written by dataclasses, or by torch
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(body)))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                found.add(node.exc.func.id)
    return {name for name in found if not name.islower()}  # a function that makes the error names no class


@pytest.mark.parametrize("folder", REFERENCE)
def test_what_is_raised_is_said(folder: str) -> None:
    """As far as a function raises it itself: what it calls may raise more, and is no business of this test."""
    module = import_module(f"penstock.{folder}")
    lacking = {}
    for name in set(module.__all__) - MADE_FOR_YOU:
        thing = getattr(module, name)
        if isinstance(thing, types.ModuleType) or not callable(thing):
            continue
        if missing := {each for each in raised_by(thing) if each not in (inspect.getdoc(thing) or "")}:
            lacking[name] = missing
    assert lacking == {}


def test_every_docstring_begins_with_what_something_is() -> None:
    """Some began with the list of arguments or attributes."""
    sections = re.compile(r'"""(Args|Attributes|Returns|Raises):')
    assert not [file.name for file in PACKAGE.rglob("*.py") if sections.search(file.read_text(encoding="utf-8"))]


def test_the_folders_are_those_of_the_reference() -> None:
    assert set(FOLDERS) >= set(REFERENCE) >= {"schedule", "planning", "control", "runtime", "models", "data", "lab"}


@pytest.mark.parametrize("name", NAMES)
def test_every_example_runs(name: str) -> None:
    thing = getattr(ps, name)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, f"ps.{name}", None, 0)
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
