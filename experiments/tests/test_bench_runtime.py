"""The runtime benchmark at its smallest: it measures, it checks, and it says why when a rank fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.runtime import run as runtime
from benchmarks.runtime.rank import RankJob, difference, launch
from benchmarks.runtime.run import METRICS, SIDES

pytestmark = [pytest.mark.multiproc]


@pytest.mark.nightly
def test_both_runtimes_agree_and_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runtime.json"
    arguments = ["--gpt", "tiny", "--schedule", "zb-v", "--steps", "1", "--rounds", "2"]
    arguments += ["--transport", "host", "--no-memory", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [runtime.__file__, *arguments])
    runtime.main()
    assert "| tiny | zb-v |" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["command"].endswith("--steps 1 --rounds 2 --transport host --no-memory")
    assert {"processor", "num_processors", "torch", "python"} <= set(result["machine"])
    (row,) = result["rows"]
    assert max(row["largest_difference"].values()) < 1e-4
    assert set(row["ratios"]) == set(METRICS)
    assert [len(rank["blocks"]) for rank in row["raw"]] == [2] * 4
    assert set(row["raw"][0]["blocks"][0]) == set(SIDES)
    assert str(tmp_path) not in out.read_text()


@pytest.mark.nightly
def test_memory_is_measured_in_a_launch_of_one_side() -> None:
    job = RankJob("tiny", "1f1b", 2, 8, ("ours",), 1, 1)
    assert all(rank["peak_bytes"] > 0 for rank in launch(job))


@pytest.mark.nightly
def test_a_failing_rank_ends_the_launch_and_tells_why() -> None:
    job = RankJob("tiny", "1f1b", 1, 8, ("nobody's",), 1, 1)
    with pytest.raises(Exception, match="KeyError"):
        launch(job)


class Fake:
    """A side that gives what it is told."""

    def __init__(self, loss: float, gradient: float) -> None:
        self.loss, self.gradient = loss, gradient

    def run(self) -> Tensor:
        return torch.tensor(self.loss)

    def gradients(self) -> list[Tensor]:
        return [torch.full((3,), self.gradient)]

    def clear(self) -> None:
        pass


def test_sides_that_agree_may_be_compared() -> None:
    found = difference({"ours": Fake(2.0, 1.0), "torch": Fake(2.0, 1.0 + 1e-6)})
    assert found["loss"] == 0.0
    assert 0.0 < found["gradient"] < 1e-5


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(Fake(2.0, 1.0), Fake(2.1, 1.0)), (Fake(2.0, 1.0), Fake(2.0, 8.0)), (Fake(2.0, 0.0), Fake(2.0, 0.0))],
)
def test_sides_that_did_not_run_the_same_are_not_compared(ours: Fake, torchs: Fake) -> None:
    with pytest.raises(RuntimeError, match=r"can't be compared|left no gradients"):
        difference({"ours": ours, "torch": torchs})
