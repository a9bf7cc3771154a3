"""What a public host runs: the workflows, the wheel's script, and what the package index is shown."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
URL = "https://code.example/penstock/penstock"


def read(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_whole(path: Path) -> None:
    workflow = read(path.name)
    assert {"name", True, "permissions", "jobs"} <= set(workflow)  # YAML reads `on` as a yes
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        assert 0 < job["timeout-minutes"] <= 240
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        strategy = set(job.get("strategy", {}).get("matrix", {}))
        assert set(re.findall(r"matrix\.(\w+)", yaml.safe_dump(job))) <= strategy
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step["uses"])
        else:
            subprocess.run(["bash", "-n", "-c", step["run"]], check=True)
            for script in re.findall(r"\.ci/\w+(?:\.py)?", step["run"]):
                assert (ROOT / script).is_file()
                assert script.endswith(".py") or os.access(ROOT / script, os.X_OK)


def test_each_tier_has_a_job_and_python_versions_are_those_of_the_package() -> None:
    runs = " ".join(step["run"] for step in steps(read("ci.yml")) if "run" in step)
    assert {"push", "full", "nightly"} == set(re.findall(r"\.ci/run (\w+)", runs))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)}
    assert set(read("ci.yml")["jobs"]["push"]["strategy"]["matrix"]["python"]) == named


OLDEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["torch"][0][7:]

RELEASES = (OLDEST, "2.14", "2.15")


def oldest(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BASE": sys.executable, **variables}
    return subprocess.run([ROOT / ".ci" / "oldest", *arguments], env=environment, capture_output=True, text=True)


def test_the_sample_for_other_torches_is_there_and_runs_at_night() -> None:
    sample = re.findall(r"^ +(tests/\S+)$", (ROOT / ".ci" / "oldest").read_text(), re.MULTILINE)
    assert len(sample) > 10
    assert all((ROOT / path).is_file() for path in sample)
    assert '[ "$tier" != nightly ] || .ci/oldest' in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_where_other_torches_cannot_be_installed_it_says_why(tmp_path: Path) -> None:
    done = oldest(OLDEST_TORCH_INDEX=tmp_path.as_uri())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ERROR: ")[0] for line in lines] == [
        f"no test ran with torch {each}" for each in RELEASES
    ]


@pytest.mark.slow
def test_the_torch_that_all_tests_run_with_is_not_taken_for_another() -> None:
    torch = pytest.importorskip("torch")
    if torch.__version__.rpartition(".")[0] in RELEASES:
        pytest.skip("needs another-torch than those of .ci/oldest")
    done = oldest(sys.executable)
    assert done.returncode == 2
    assert done.stdout == f"{sys.executable} has torch {torch.__version__}; this is for torch {' '.join(RELEASES)}\n"


def test_publishing_keeps_no_password() -> None:
    workflow = read("publish.yml")
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "id-token" not in yaml.safe_dump(workflow["jobs"]["build"])
    assert "secrets." not in (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    assert publish["needs"] == "build"


def of_the_index() -> ModuleType:
    spec = importlib.util.spec_from_file_location("for_the_index", ROOT / ".ci" / "for_the_index.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_of_the_index_leads_into_the_repository() -> None:
    before = (ROOT / "README.md").read_text()
    after = of_the_index().readme(before, URL, "v1")
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", after, flags=re.DOTALL | re.MULTILINE))
    assert len(targets) > 10
    for target in targets:
        assert target.startswith("https://"), target
        if target.startswith(URL):
            way, path = re.fullmatch(rf"{URL}/(raw|blob)/v1/([^#]+)(?:#.*)?", target).groups()  # type: ignore[union-attr]
            assert (ROOT / path).exists(), path
            assert (way == "raw") == path.endswith(".svg")
    fences = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert fences.findall(after) == fences.findall(before)


def test_the_readme_renders_as_the_index_reads_it() -> None:
    markdown_it = pytest.importorskip("markdown_it")
    html = markdown_it.MarkdownIt("commonmark").render(
        of_the_index().readme((ROOT / "README.md").read_text(), URL, "v1")
    )
    assert html.startswith("<h1>Penstock</h1>")
    assert '<img src="https://' in html
    assert "](" not in re.sub(r"<code.*?</code>", "", html, flags=re.DOTALL)


def test_the_project_gets_its_addresses(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run([sys.executable, ROOT / ".ci" / "for_the_index.py", f"{URL}/", "v1", tmp_path], check=True)
    before = tomllib.loads((ROOT / "pyproject.toml").read_text())
    after = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert "urls" not in before["project"], "no host is known in the repository"
    assert after["project"].pop("urls")["Repository"] == URL
    assert after == before


def test_the_shell_completes_verbs_and_options() -> None:
    program = "import sys; from penstock.cli import main; sys.argv = ['penstock']; sys.exit(main())"
    for words, wanted in (("penstock sim", "simulate"), ("penstock train --sched", "--schedule")):
        environment = {
            **os.environ, "_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert wanted in done.stdout.split(), (words, done.stderr)
