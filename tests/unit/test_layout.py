"""The layout of the package: no circular imports, no class name twice, and a page that says where things lie."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "penstock"
WHERE = ROOT / "docs" / "where.md"
ROW = re.compile(
    r"\| (?P<question>[^|]+\?) \| `(?P<folder>[^`|]+/)` \| `(?P<file>[^`|]+\.py)` \| `(?P<name>[^`|]+)` \|"
)

DRAWN = re.compile(r"--|->|\| |==")


@cache
def trees() -> dict[str, ast.Module]:
    """The package's modules by name."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(
            path.read_text(encoding="utf-8")
        )
    return found


def imported_at_once(name: str) -> set[str]:
    """The package's modules that importing this one imports, itself: not in a function, nor for types alone."""
    found: set[str] = set()
    todo: list[ast.stmt] = list(trees()[name].body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If):
            todo += [] if "TYPE_CHECKING" in ast.unparse(node.test) else [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            todo += [*node.body, *(each for handler in node.handlers for each in handler.body)]
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in trees()}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = (SRC.parent / Path(*name.split("."))).is_dir()
                parts = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in trees() else base)
    return {each for each in found if each in trees() and each != name}


@pytest.mark.slow
def test_modules_import_each_other_in_no_circle() -> None:
    try:
        order = list(TopologicalSorter({name: imported_at_once(name) for name in trees()}).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")
    assert order.index("penstock.runtime.errors") < order.index("penstock.runtime.pipeline")


@pytest.mark.slow
def test_no_two_classes_of_the_package_bear_one_name() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(module)
    assert {name: sorted(modules) for name, modules in where.items() if len(modules) > 1} == {}


def test_every_folder_of_the_runtime_draws_what_it_does() -> None:
    for path in sorted((SRC / "runtime").rglob("__init__.py")):
        folder = path.parent.relative_to(SRC)
        said = ast.get_docstring(trees()[".".join(("penstock", *folder.parts))]) or ""
        assert DRAWN.search(said), f"{folder}/__init__.py has no drawing"
        modules = [each.stem for each in path.parent.glob("*.py") if each != path]
        named = [module for module in modules if re.search(rf"\b{module}\b", said)]
        assert len(named) > len(modules) / 2, f"{folder}/__init__.py says what {named} do, of {sorted(modules)}"


def defined(path: Path, name: str) -> bool:
    """Whether a file defines a function, a class, or a class with a method."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def test_where_answers_thirty_questions_with_what_is_there() -> None:
    lines = WHERE.read_text(encoding="utf-8").splitlines()
    rows = [ROW.fullmatch(line) for line in lines if line.startswith("| ") and "?" in line]
    assert None not in rows
    questions = [row["question"] for row in rows if row]
    assert len(set(questions)) == len(questions) >= 30
    missing = [
        (row["file"], row["name"])
        for row in rows
        if row and not ((at := SRC / row["file"]).is_file() and defined(at, row["name"]))
    ]
    assert missing == []
    assert [row["file"] for row in rows if row and row["file"].rpartition("/")[0] + "/" != row["folder"]] == []
    assert not defined(SRC / "runtime" / "pipeline.py", "Pipeline.stepp")


def test_no_function_that_a_package_offers_bears_the_name_of_a_module_in_it() -> None:
    """Or `import penstock.x.y` gives a function, or the module, by what was imported before."""
    twice = []
    for module in trees():
        package, _, name = module.rpartition(".")
        if package and inspect.isfunction(getattr(importlib.import_module(package), name, None)):
            twice.append(module)
    assert twice == []
