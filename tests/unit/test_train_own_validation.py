"""The validation data of a run with samples of one's own: all of them count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.cli import main

pytestmark = pytest.mark.unit

NET = """
import torch

class Samples(torch.utils.data.Dataset):
    def __init__(self, num):
        generator = torch.Generator().manual_seed(num)
        self.x, self.y = torch.randn(num, 4, generator=generator), torch.randint(3, (num,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

def samples(train=True):
    return Samples(64 if train else 21)

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

loss_fn = torch.nn.CrossEntropyLoss()
"""


def test_bug_the_last_samples_that_fill_no_batch_were_left_out_of_the_validation_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    command = "train --model net.py:net --data net.py:samples --ranks 2 --microbatches 4 --batch 8"
    assert main([*command.split(), "--in-process", "--steps", "2", "--lr", "1e-30", "--out", "run"]) == 0
    found = json.loads(Path("run/report.json").read_text())["loss"]
    own: dict[str, object] = {}
    exec(NET, own)
    held = own["samples"](train=False)  # type: ignore[operator]
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(own["net"]()(held.x), held.y)  # type: ignore[operator]
    assert found == pytest.approx(float(want), rel=1e-5)
