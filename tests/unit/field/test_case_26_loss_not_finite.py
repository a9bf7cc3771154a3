"""A run whose loss became nan ended in json's ValueError, without report.json, and its page left the nan out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.report.run_story import read_record
from report_cases import Page

NETS = """
import torch
from torch import nn

def Net():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

def data(train=True):
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

loss_fn = nn.MSELoss()
"""
DIVERGES = (
    "--model divergent.py:Net --data divergent.py:data --ranks 2 --batch 8 --microbatches 2 --steps 6 "
    "--lr 1e20 --optimizer SGD --clip 0"
)
SAID = "the loss is not finite from step 2 on"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "divergent.py").write_text(NETS)
    return tmp_path


def strict(text: str) -> Any:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=no_constant)


@pytest.mark.parametrize("where", ["--in-process", pytest.param("", marks=pytest.mark.slow)])
def test_the_end_the_report_and_the_page_say_it(place: Path, capfd: Any, where: str) -> None:
    assert main(["train", "--schedule", "1f1b", "--out", "run", *DIVERGES.split(), *where.split()]) == 0
    end = capfd.readouterr().out
    assert "loss      nan" in end
    assert f"{SAID}; look at the data of that step, or give a lower --lr or --clip" in end
    report = strict((place / "run" / "report.json").read_text())
    assert report["loss"] is None
    assert report["train_loss"] is None
    lines = [strict(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines] == [False] + [True] * 5
    assert main(["report", "run"]) == 0
    headline = capfd.readouterr().out.splitlines()[0]
    assert f"to nan in 6 steps of 1f1b; {SAID}." in headline
    page = Page((place / "run" / "report.html").read_text())
    assert any(SAID in text for text in page.texts["p"] + page.texts.get("h1", []))
    assert "Loss" in page.texts["h2"]


def test_steps_without_a_finite_loss_in_between_are_counted() -> None:
    losses = ["1.0", "null", "NaN", "2.0"]
    record = read_record([f'{{"step": {k}, "loss": {loss}}}' for k, loss in enumerate(losses)], name="run")
    assert record is not None
    assert record.not_finite == "the loss is not finite in 2 steps, first in step 2"
