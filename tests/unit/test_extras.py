"""What messages tell people to install."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from penstock.extras import EXTRAS, what_to_install

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", EXTRAS)
def test_an_extra_is_installed_from_a_checkout(module: str) -> None:
    """Regression: messages named `penstock[torch]`, which no package index has."""
    said = what_to_install(ModuleNotFoundError(name=f"{module}.inner"))
    assert f"{module} is not installed; in a checkout" in str(said)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert str(said).partition("'.[")[2].removesuffix("]'") in extras


def test_no_message_installs_penstock_from_an_index() -> None:
    wrong = [path for path in (ROOT / "src").rglob("*.py") if "penstock[" in path.read_text(encoding="utf-8")]
    assert wrong == []
