"""What experiments and benchmarks import from Penstock is there: most run by hand, and mypy reads src alone."""

import ast
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["experiments", "benchmarks"])
def test_bug_an_emulated_mesh_imported_a_function_that_was_gone(folder):
    missing = []
    for path in (CHECKOUT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "penstock":
                try:
                    exec(ast.unparse(node), {})
                except ImportError as error:
                    missing.append(f"{path.relative_to(CHECKOUT)}:{node.lineno}: {error}")
    assert missing == []
