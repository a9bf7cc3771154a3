"""The validation data of a run with samples of one's own: all of them count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.cli import main
from train_runs import losses

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


@pytest.mark.parametrize("schedule", ["1f1b --microbatches 4 --batch 8", "pipedream --microbatches 16 --batch 16"])
def test_bug_the_last_samples_that_fill_no_batch_were_left_out_of_the_validation_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """And an asynchronous run ended where they are fewer than its microbatches."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    command = f"train --model net.py:net --data net.py:samples --ranks 2 --schedule {schedule}"
    assert main([*command.split(), "--in-process", "--steps", "2", "--lr", "1e-30", "--out", "run"]) == 0
    found = json.loads(Path("run/report.json").read_text())["loss"]
    own: dict[str, object] = {}
    exec(NET, own)
    held = own["samples"](train=False)  # type: ignore[operator]
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(own["net"]()(held.x), held.y)  # type: ignore[operator]
    assert found == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("options", ["", "ignore_index=0", "weight=torch.tensor([1.0, 2.0, 3.0])", "reduction='sum'"])
def test_bug_the_loss_of_asynchronous_steps_weighed_microbatches_by_the_number_of_their_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """Where nothing is learnt, it is that of synchronous steps, whatever the loss counts."""
    monkeypatch.chdir(tmp_path)
    net = NET.replace("return self.x[i], self.y[i]", "return {'input': self.x[i], 'labels': self.y[i]}")
    Path("net.py").write_text(net.replace("CrossEntropyLoss()", f"CrossEntropyLoss({options})"))
    command = "train --model net.py:net --data net.py:samples --ranks 2 --microbatches 4 --batch 42 --lr 1e-30"
    for name in ("1f1b", "pipedream"):
        assert main(f"{command} --in-process --steps 4 --schedule {name} --out {name}".split()) == 0
    assert losses(Path("pipedream")) == pytest.approx(losses(Path("1f1b")), rel=1e-5)
