"""The layout of the package: no circular imports, no class name twice, and docs that name every file of a folder."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layout")  # what one worker has parsed, the other need not

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "penstock"

DRAWN = re.compile(r"--|->|\| |==")


@cache
def trees() -> dict[str, ast.Module]:
    """The package's modules by name."""
    found = {}
    gc.disable()  # it would look for garbage among a million nodes again and again, here and in all later tests
    try:
        for path in sorted(SRC.rglob("*.py")):
            parts = path.relative_to(SRC.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(
                path.read_text(encoding="utf-8")
            )
    finally:
        gc.freeze()
        gc.enable()
    return found


def named_by(node: ast.stmt | ast.expr, name: str) -> set[str]:
    """The package's modules that one statement or call in a module imports, other than itself."""
    found: set[str] = set()
    if isinstance(node, ast.Import):
        found = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            is_package = (SRC.parent / Path(*name.split("."))).is_dir()
            parts = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
            base = ".".join([*parts, *([node.module] if node.module else [])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            found.add(whole if whole in trees() else base)
    elif isinstance(node, ast.Call) and node.args and isinstance(what := node.args[0], ast.Constant):
        found = {what.value} if isinstance(what.value, str) and "import_module" in ast.unparse(node.func) else set()
    return {each for each in found if each in trees() and each != name}


def is_for_types(node: ast.If) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "TYPE_CHECKING" for part in ast.walk(node.test))


def imported_at_once(name: str) -> set[str]:
    """The modules that importing this one imports, itself: not those in a function, nor for types alone."""
    found: set[str] = set()
    todo: list[ast.stmt] = list(trees()[name].body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If):
            todo += node.orelse if is_for_types(node) else [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            todo += [*node.body, *(each for handler in node.handlers for each in handler.body)]
        else:
            found |= named_by(node, name)
    return found


def imported_ever(name: str) -> set[str]:
    """The modules that this one imports at once or in a function, but not those for types alone."""
    found: set[str] = set()
    todo: list[ast.AST] = [trees()[name]]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and is_for_types(node):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            found |= named_by(node, name)
        todo += ast.iter_child_nodes(node)
    return found


def circle_of(imports: dict[str, set[str]]) -> list[str]:
    """A circle among modules, each of which imports the next; none where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.slow
def test_modules_import_each_other_in_no_circle() -> None:
    imports = {name: imported_at_once(name) for name in trees()}
    assert circle_of(imports) == []
    order = list(TopologicalSorter(imports).static_order())
    assert order.index("penstock.runtime.errors") < order.index("penstock.runtime.pipeline")


@pytest.mark.slow
def test_no_import_in_a_function_closes_a_circle() -> None:
    """A module that another one needs and that needs it in turn is one idea in two places."""
    assert circle_of({name: imported_ever(name) for name in trees()}) == []


def test_a_circle_is_found_where_one_import_lies_in_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "penstock.one": "from penstock.two import there\n",
        "penstock.two": "def there():\n    from penstock.three import here\n",
        "penstock.three": "if TYPE_CHECKING:\n    import penstock.two\nimport penstock.four\n",
        "penstock.four": "import importlib\nback = lambda: importlib.import_module('penstock.two')\n",
    }
    parsed = {name: ast.parse(text) for name, text in modules.items()}
    monkeypatch.setitem(globals(), "trees", lambda: parsed)
    assert circle_of({name: imported_at_once(name) for name in parsed}) == []
    found = circle_of({name: imported_ever(name) for name in parsed})
    assert set(found) == {"penstock.two", "penstock.three", "penstock.four"}
    assert all(after in imported_ever(before) for before, after in pairwise(found))


STILL_SHARED = frozenset(
    [
        "Batch",
        "Copies",
        "Microbatches",
        "Names",
        "Needs",
        "Order",
        "Pair",
        "Shape",
        "Slots",
        "Task",
        "Tokenizer",
    ]
)
"""Names of classes that some other module still gives to a type of its own. None may be added."""


def aliases(tree: ast.Module) -> set[str]:
    """The names that a module gives to types: in CamelCase, and of what is neither a call nor another's name."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name) and re.fullmatch("[A-Z][a-z][A-Za-z]*", target.id)
    }


@pytest.mark.slow
def test_no_two_classes_of_the_package_bear_one_name_nor_a_type_alias_that_of_a_class() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(module)
    assert {name: sorted(modules) for name, modules in where.items() if len(modules) > 1} == {}
    for module, tree in trees().items():
        for name in aliases(tree) & where.keys():
            where[name].add(module)
    shared = {name: sorted(modules) for name, modules in where.items() if len(modules) > 1}
    assert shared.keys() == STILL_SHARED, shared


def test_every_folder_of_the_runtime_draws_what_it_does() -> None:
    for path in sorted((SRC / "runtime").rglob("__init__.py")):
        folder = path.parent.relative_to(SRC)
        said = ast.get_docstring(trees()[".".join(("penstock", *folder.parts))]) or ""
        assert DRAWN.search(said), f"{folder}/__init__.py has no drawing"
        modules = [each.stem for each in path.parent.glob("*.py") if each != path]
        named = [module for module in modules if re.search(rf"\b{module}\b", said)]
        assert len(named) > len(modules) / 2, f"{folder}/__init__.py says what {named} do, of {sorted(modules)}"


def test_no_function_that_a_package_offers_bears_the_name_of_a_module_in_it() -> None:
    """Or `import penstock.x.y` gives a function, or the module, by what was imported before."""
    twice = []
    for module in trees():
        package, _, name = module.rpartition(".")
        if package and inspect.isfunction(getattr(importlib.import_module(package), name, None)):
            twice.append(module)
    assert twice == []
