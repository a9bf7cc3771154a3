"""The scripts and notebooks of examples/ run from beginning to end, and print what they should."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
PRINTED = {
    "own_model": "weights equal to the plain loop's, to the last bit: True",
    "slow_link": "no order in that memory is shorter than",
    "own_schedule": "schedule by-function: 3 ranks",
    "fine_tune": "opened again, equal: True",
}


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    read = json.loads(notebook.read_text(encoding="utf-8"))
    assert (read["nbformat"], {cell["cell_type"] for cell in read["cells"]}) == (4, {"code", "markdown"})
    return ["".join(cell["source"]) for cell in read["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_run(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(str(script), run_name="__main__")
    assert PRINTED[script.stem] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs after those before it. What a cell ends with is shown, as a picture where it can draw itself."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "notebook"}
    pictures = 0
    for number, text in enumerate(cells(notebook)):
        *statements, last = ast.parse(text).body
        name = f"{notebook.name}, code cell {number}"
        if not isinstance(last, ast.Expr):
            exec(compile(text, name, "exec"), namespace)
            continue
        exec(compile(ast.Module(list(statements), []), name, "exec"), namespace)
        shown = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        pictures += "<svg" in getattr(shown, "_repr_html_", str)()
    assert pictures >= 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_what_they_showed(notebook: Path) -> None:
    read = json.loads(notebook.read_text(encoding="utf-8"))
    code = [cell for cell in read["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_site_shows_every_example() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [path.name for path in (*SCRIPTS, *NOTEBOOKS) if f"../examples/{path.name}" not in page] == []
    assert {script.stem for script in SCRIPTS} == set(PRINTED)
