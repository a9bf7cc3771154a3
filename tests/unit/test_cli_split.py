"""`penstock split FILE.py:NAME`: the cut as a table, as JSON, and the line that trains with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from documents import shown_files
from penstock.cli import main

pytestmark = pytest.mark.unit


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in shown_files().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "asks.py").write_text(
        "import net\nclass Asks(net.Net):\n    def forward(self, images, *, flip):\n"
        "        return super().forward(images.flip(3) if flip is None else images * flip)\n"
        "class Data(net.torch.utils.data.Dataset):\n    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, number):\n"
        "        return {'images': net.torch.randn(3, 4, 4), 'flip': net.torch.ones(1, 1, 1), 'y': number % 10}\n"
        "loss_fn = net.loss_fn\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def split(capfd: Any, options: str) -> dict[str, Any]:
    assert main(["split", *shlex.split(options), "--json"]) == 0, capfd.readouterr()
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_by_cost_and_by_name(net: Path, capfd: Any) -> None:
    found = split(capfd, "net.py:Net --stages 3")
    assert found["stages"][0]["layers"][0] == "stem"
    assert sum(each["cost"] for each in found["stages"]) == pytest.approx(1)
    assert (found["costs_are"], found["train"], found["stages"][0]["bytes"]) == ("parameters", None, None)
    found = split(capfd, "net.py:Net --stages 3 --data net.py:make_data --microbatches 4")
    assert [len(each["layers"]) for each in found["stages"]] == [3, 2, 3]
    assert [each["bytes"] for each in found["stages"]] == [4 * 16 * 16 * 16 * 4] * 2 + [0]
    assert found["costs_are"] == "operations"
    assert found["train"] == (
        "penstock train --model net.py:Net --data net.py:make_data --ranks 3 --microbatches 4 --cut 3,2,3"
    )
    found = split(capfd, "net.py:Net --model-options '{\"depth\": 2}'")
    assert [each["layers"] for each in found["stages"]] == [["stem"], ["blocks.0"], ["blocks.1"], ["head"]]


def test_the_line_that_it_prints_trains_with_that_cut(net: Path, capfd: Any) -> None:
    words = "net.py:Net --stages 3 --data net.py:make_data --microbatches 2"
    line = split(capfd, words)["train"]
    assert main([*shlex.split(line)[1:], "--steps", "1", "--in-process", "--out", "run", "--json"]) == 0
    by_rank = [rank["parameters"] for rank in json.loads(capfd.readouterr().out)["state"]]
    stages = split(capfd, words)["stages"]
    assert by_rank == [4 * each["parameters"] for each in stages]


def test_a_forward_that_does_not_say_what_it_takes_needs_data(net: Path, capfd: Any) -> None:
    assert main(["split", "asks.py:Asks", "--stages", "2"]) == 2
    said = capfd.readouterr().err
    assert "does not say how many tensors it takes" in said
    assert "--data FILE.py:NAME" in said
    assert len(split(capfd, "asks.py:Asks --stages 2 --data asks.py:Data")["stages"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("gpt", ["your own", "FILE.py:NAME"]),
        ("net.py:Net --stages 9", ["9 stages", "8 layers"]),
        ("net.py:Net --data net.py:loss_fn", ["is a CrossEntropyLoss", "name a Dataset"]),
    ],
)
def test_mistakes(net: Path, capfd: Any, options: str, words: list[str]) -> None:
    assert main(["split", *options.split()]) == 2
    said = capfd.readouterr().err
    assert "bug in penstock" not in said
    for word in words:
        assert word in said
