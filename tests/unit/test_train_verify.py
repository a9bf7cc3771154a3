"""`penstock train --verify` checks the contract on the first batch, and changes nothing of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.train.checks import SettingsError
from penstock.train.job import order_of

SMALL = "--ranks 2 --microbatches 4 --batch 8 --depth 4 --width 16 --heads 2 --context 8 --threads 1 --steps 2"
OWN = """
import torch
from torch import nn


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def net():
    return nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def data():
    x = torch.randn(64, 8)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


loss_fn = nn.MSELoss()
"""


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text to learn, which is read faster than Python's library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} and {number * 7 % 10} are digits.\n" for number in range(2000)))
    return str(path)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["--in-process --set dropout=0.1", "--dp 2 --ranks 1"])
def test_a_run_is_verified_first_and_learns_the_same(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    options = ["train", *SMALL.split(), *where.split(), "--data", text]
    assert main([*options, "--out", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    assert main([*options, "--verify", "--out", str(tmp_path / "verified")]) == 0
    said = capsys.readouterr().err
    if "in-process" in where:  # ranks print to this process's own standard error
        assert "the microbatches, and the batch in one piece            same" in said
    assert losses(tmp_path / "verified") == losses(tmp_path / "plain")


@pytest.mark.slow
def test_a_model_that_breaks_the_contract_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = f"--model {tmp_path}/own.py:net --data {tmp_path}/own.py:data --schedule 1f1b --ranks 2 --microbatches 4"
    assert main(["train", *own.split(), *["--batch", "8", "--steps", "2", "--in-process", "--verify"]]) == 1
    assert "sentence 7 of the contract" in capsys.readouterr().err


def test_updates_within_the_order_are_refused_with_the_way_out() -> None:
    given = {"schedule": "amdp", "ranks": 4, "microbatches": 4, "window": 4}
    with pytest.raises(SettingsError, match="--schedule 1f1b --verify"):
        order_of(given, None, None, None, False, verify=True)
