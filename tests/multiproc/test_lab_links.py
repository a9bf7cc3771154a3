"""Each network of a lab cut in the middle of a transfer, on every transport; benchmarks/faults/links.py does more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from labs import needs_lab

pytestmark = [pytest.mark.multiproc, pytest.mark.alone, needs_lab]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults" / "links.py"


@pytest.fixture(scope="module")
def links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_links", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("transport", "mesh", "network", "how"),
    [
        ("gloo", "pp", 0, "interface"),
        pytest.param("delegate", "pp x dp", 0, "interface", marks=pytest.mark.nightly),  # the cut may come too late
        pytest.param("gloo", "pp x dp", 0, "silent", marks=pytest.mark.slow),
        pytest.param("delegate", "pp", 1, "silent", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_it_was(links: ModuleType, transport: str, mesh: str, network: int, how: str) -> None:
    row = links.cell(transport, mesh, network, how, count=1)
    assert not row["error"]
    assert [each["equal"] for each in row["runs"]] == [True, True]
    assert row["runs"][1]["before_the_end"], "the fault came too late to show anything"
    changed = any("nothing was lost" in notice for notice in row["runs"][1]["notices"])
    assert changed == (network == 0)  # where sums and agreements go
