"""The wheel: what it holds and requires. At night it is installed in an environment of its own, outside the checkout:
first without torch, then with it, which `.ci/wheel` does for every push."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).resolve().parents[2]
COUNTED_APART = ("numpy", "pip", "setuptools", "pkg_resources", "wheel")
MOST_BYTES = 60e6


def pip(python: str | Path, *arguments: str | Path, **variables: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        capture_output=True, text=True, check=False, env=outside() | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def outside() -> dict[str, str]:
    """The environment without what would find the checkout, and without a place where the engine's library could be
    built: the wheel has it."""
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PENSTOCK"))}
    return left | {"XDG_CACHE_HOME": os.devnull}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: building leaves folders beside the sources.
    copy = folder / "checkout"
    for name in ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, target], check=True)
    # With the setuptools that torch requires: for another one an environment would be made first.
    quick = folder / "cc"
    quick.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    quick.chmod(0o700)
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy, CC=str(quick))
    (made,) = folder.glob("penstock-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The folder of an environment with the wheel and what it requires, without extras."""
    folder = wheel.parent
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    pip(folder / "env/bin/python", "install", "-c", ROOT / "constraints.txt", wheel)
    return folder / "env"


def penstock(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [installed / "bin/penstock", *words],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        env=outside(),
    )


@pytest.mark.slow
def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    """Pages and scripts too, which only `package-data` puts there, and the engine's library."""
    package = ROOT / "src" / "penstock"
    there = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {".py", ".html", ".js", ".css", ".typed"} <= {path.suffix for path in there}
    with zipfile.ZipFile(wheel) as held:
        names = {name for name in held.namelist() if ".dist-info/" not in name}
    library = "penstock/engine/_core.abi3.so"
    assert names - {library} == {path.relative_to(package.parent).as_posix() for path in there} - {library}
    assert library in names or shutil.which("cc") is None


@pytest.mark.slow
def test_its_metadata_is_whole(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        held.extractall(tmp_path, [name for name in held.namelist() if ".dist-info/" in name])
    (found,) = tmp_path.glob("penstock-*.dist-info")
    metadata = PathDistribution(found).metadata
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert [
        each for each in metadata.get_all("Requires-Dist") or [] if 'extra == "torch"' in each and "torch>" in each
    ]
    assert len(metadata.get_all("Classifier") or []) > 5
    assert "penstock = penstock.cli:main" in (found / "entry_points.txt").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_it_plans_proves_and_draws_without_torch(installed: Path) -> None:
    planned = penstock(installed, "plan", "--ranks", "4", "--microbatches", "8", "--time", "1", "--out", "plan.json")
    assert planned.returncode == 0, planned.stderr
    assert penstock(installed, "check", "plan.json").stdout.startswith("plan.json: valid")
    for picture in ("plan.svg", "plan.html"):
        assert penstock(installed, "show", "plan.json", "--out", picture).returncode == 0
        assert (installed / picture).stat().st_size > 1000
    assert penstock(installed, "simulate", "zb-v", "--ranks", "4", "--microbatches", "8").returncode == 0
    refused = penstock(installed, "train", "--steps", "1")
    assert refused.returncode == 2
    assert refused.stderr == (
        "penstock: torch is not installed; in a checkout of Penstock, run: python -m pip install '.[torch]'\n"
    )


@pytest.mark.nightly
def test_what_it_requires_is_small(installed: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages")
    others = [each for each in site.iterdir() if not each.name.startswith((*COUNTED_APART, "penstock"))]
    held = sum(file.stat().st_size for each in others for file in [each, *each.rglob("*")] if file.is_file())
    assert 1e6 < held < MOST_BYTES


@pytest.mark.nightly
def test_it_trains_where_torch_is(installed: Path) -> None:
    """Torch is lent by this environment: to install it again would take minutes."""
    (site,) = installed.glob("lib/python*/site-packages")
    lent = site / "lent.pth"
    lent.write_text(sysconfig.get_path("purelib") + "\n")
    try:
        words = [
            "train",
            "--ranks",
            "2",
            "--steps",
            "2",
            "--preset",
            "nano",
            "--in-process",
            "--out",
            "run",
            "--json",
        ]
        done = penstock(installed, *words)
        where = subprocess.run(
            [installed / "bin/python", "-c", "import penstock, torch; print(penstock.__file__)"],
            capture_output=True, text=True, check=True, cwd=installed, env=outside(),
        )  # fmt: skip
    finally:
        lent.unlink()
    assert done.returncode == 0, done.stderr
    assert where.stdout.startswith(str(installed))
