"""Each network of a lab cut in the middle of a transfer, on every transport; benchmarks/faults/links.py does more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from labs import needs_lab

pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("lab"), needs_lab]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "mesh", "network", "how", "count"),
    [
        ("gloo", "pp", 0, "interface", 1),
        pytest.param("delegate", "pp x dp", 0, "interface", 1, marks=pytest.mark.nightly),
        pytest.param("gloo", "pp x dp", 0, "silent", 1, marks=pytest.mark.nightly),
        pytest.param("direct", "pp", 0, "silent", 1, marks=pytest.mark.nightly),
        pytest.param("direct", "pp x dp", 0, "interface", 1, marks=pytest.mark.nightly),
        pytest.param("late", "pp", 0, "interface", 1, marks=pytest.mark.nightly),
        pytest.param("late", "pp x dp", 0, "silent", 1, marks=pytest.mark.nightly),
        # In the second, the kernel does not end a connection with much under way by itself.
        pytest.param("delegate", "pp", 1, "silent", 2, marks=pytest.mark.nightly),
    ],
)
def test_training_goes_on_as_it_was(
    links: ModuleType, transport: str, mesh: str, network: int, how: str, count: int
) -> None:
    row = links.cell(transport, mesh, network, how, count)
    assert not row["error"]
    assert all(each["equal"] for each in row["runs"])
    assert len(row["runs"]) == 1 + count
    assert row["runs"][1]["before_the_end"], "the fault came too late to show anything"
    said = row["runs"][1]["notices"]
    assert any("nothing was lost" in notice for notice in said)
    changed = any("what ranks send and sum by gloo goes by" in notice for notice in said)
    assert changed == (network == 0)
    by_delegates = transport == "delegate" and mesh == "pp"
    assert max(each["repeats"] for each in row["runs"][1:]) <= (0 if by_delegates else 1)
