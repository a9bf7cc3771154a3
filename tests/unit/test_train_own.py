"""`penstock train --model FILE.py:NAME`: models of one's own, as people bring them, through the same command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import penstock as ps
from own_loop import plain_evaluate, plain_step
from penstock.cli import main
from penstock.train.own_file import find
from penstock.train.settings import Settings
from plain_loop import cut
from train_runs import losses

pytestmark = pytest.mark.unit

Train = Callable[..., dict[str, Any]]
MODELS_FILE = Path(__file__).parents[1] / "own_models.py"

NETS = """
import sys
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from torch.utils.data import TensorDataset
import own_models
from own_batches import Batches
from own_models import MODELS, ResNet, EncoderDecoder, GPT, EarlyExit

N = 8

def draw(own, seed):
    torch.manual_seed(seed)
    return own.inputs(), own.targets()

def images(train=True):
    return Batches([draw(MODELS["resnet"], seed) for seed in range(4 if train else 1)])

resnet_loss = nn.CrossEntropyLoss()
"""

RESNET = "from nets import *\nloss_fn = nn.CrossEntropyLoss()\n"
SEQ2SEQ = """from nets import *
from own_models import _dict_loss as loss_fn

def batches():
    found = []
    for seed in range(3):
        pairs, labels = draw(MODELS["encoder-decoder"], seed)
        found.append({**pairs, "labels": labels})
    return Batches(found)
"""
OWN_LOSS = '''from nets import *

class Masked(nn.Module):
    """Its forward takes keywords and a mask, and returns its loss in a dict."""
    def __init__(self, width=12, depth=3, *, drop=0.0):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList(own_models.Block(width, drop) for _ in range(depth))
        self.head = nn.Linear(width, 20)

    def forward(self, *, ids, mask=None, labels=None):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x, mask=None if mask is None else mask[:, None, None, :].bool())
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

def batches(batch=8):
    torch.manual_seed(4)
    rows = []
    for _ in range(3):
        mask = torch.ones(batch, 6, dtype=torch.long)
        mask[::3, 4:] = 0
        rows.append({"ids": torch.randint(20, (batch, 6)), "mask": mask, "labels": torch.randint(20, (batch, 6))})
    return Batches(rows)
'''

APART = """from masked import *

class Apart(Masked):
    def forward(self, *, ids, mask=None):
        return super().forward(ids=ids, mask=mask)

def loss_fn(output, labels):
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "nets"
    folder.mkdir()
    (folder / "nets.py").write_text(NETS.format(tests=str(MODELS_FILE.parent)))
    for name, text in (("resnet", RESNET), ("seq2seq", SEQ2SEQ), ("masked", OWN_LOSS)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def train(place: Path, tmp_path: Path, capfd: Any) -> Iterator[Train]:
    """Trains in this process, into tmp_path/NAME; returns the one JSON object it prints."""
    before = torch.get_num_threads()

    def call(name: str, options: str) -> dict[str, Any]:
        out = "" if "--resume" in options else f"--out {tmp_path / name}"
        line = f"{out} --threads 1 --in-process --evaluate-every 0 {options} --json"
        assert main(["train", *shlex.split(line)]) == 0, capfd.readouterr()
        value: dict[str, Any] = json.loads(capfd.readouterr().out)
        return value

    yield call
    torch.set_num_threads(before)


def plain(model: nn.Module, layers: list[str], batches: list[Any], loss_fn: Any, steps: int, num: int) -> list[float]:
    """The losses of the plain loop over the same microbatches, with the command's optimizer and rates."""
    settings = Settings(steps=steps, lr=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        found.append(float(plain_step(model, layers, inputs, targets, num, loss_fn, step + 1)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def layers_of(model: nn.Module, inputs: Any, num: int) -> list[str]:
    return [path for paths in ps.split(model, 2, example=cut(inputs, num)[0]).layers for path in paths]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def same_as_plain(
    train: Train, tmp_path: Path, options: str, own: str, batches: list[Any], loss_fn: Any
) -> nn.Module:
    steps, num = 6, 4
    report = train(
        "run", f"{options} --steps {steps} --microbatches {num} --ranks 2 --clip 0 --export model.safetensors"
    )
    model = seeded(find(own, "--model")[1])
    want = plain(model, layers_of(model, batches[0][0], num), batches, loss_fn, steps, num)
    assert losses(tmp_path / "run") == want
    assert report["model"].endswith(own)
    assert report["tokens_per_second"] is None
    assert report["samples_per_second"] > 0
    exported = seeded(find(own, "--model")[1])
    exported.load_state_dict(load_file("model.safetensors"), strict=False)  # a tied weight is there once
    for name, tensor in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    return model


@pytest.mark.slow
def test_a_resnet_with_statistics_trains_as_the_plain_loop(train: Train, tmp_path: Path) -> None:
    options = "--model resnet.py:ResNet --data nets.py:images --schedule zb-h1"
    images = find("nets.py:images", "--data")[1]
    loss = nn.CrossEntropyLoss()
    model = same_as_plain(train, tmp_path, options, "resnet.py:ResNet", images(), loss)
    (inputs, targets) = images(train=False)[0]
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["loss"] == float(plain_evaluate(model, inputs, targets, 4, loss))
    assert report["unit"] == "on the batches of images(train=False)"


@pytest.mark.slow
def test_an_encoder_decoder_takes_a_dict_with_masks_and_the_rest_are_targets(train: Train, tmp_path: Path) -> None:
    found = find("seq2seq.py:batches", "--data")[0]
    batches = [({k: v for k, v in each.items() if k != "labels"}, each["labels"]) for each in found.batches()]
    options = "--model seq2seq.py:EncoderDecoder --data seq2seq.py:batches --schedule interleaved-1f1b --stages 4"
    same_as_plain(train, tmp_path, options, "seq2seq.py:EncoderDecoder", batches, found.loss_fn)
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["unit"] == "on 3 batches that it is trained on too (batches takes no `train`)"


@pytest.mark.slow
def test_the_loss_of_a_model_s_own_output_is_taken(train: Train, tmp_path: Path) -> None:
    batches = [(each, None) for each in find("masked.py:batches", "--data")[1](batch=8)]
    options = "--model masked.py:Masked --data masked.py:batches --schedule 1f1b --batch 8"
    same_as_plain(train, tmp_path, options, "masked.py:Masked", batches, lambda output, _: output["loss"])


@pytest.mark.slow
def test_a_model_that_returns_its_loss_trains_under_an_asynchronous_schedule(
    train: Train, place: Path, tmp_path: Path
) -> None:
    """It has no targets to cut. Losses are those of the same model with a loss_fn beside it."""
    (place / "apart.py").write_text(APART)
    options = "--batch 8 --schedule pipedream-2bw --microbatches 4 --ranks 2 --steps 4"
    own = train("own", f"--model masked.py:Masked --data masked.py:batches {options}")
    apart = train("apart", f"--model apart.py:Apart --data masked.py:batches {options}")
    assert losses(tmp_path / "own") == losses(tmp_path / "apart")
    assert own["loss"] == apart["loss"]


@pytest.mark.slow
def test_a_run_goes_on_where_its_data_stood(train: Train, place: Path, tmp_path: Path) -> None:
    """A loader with a state gets it back, and samples follow from the step. Under another schedule, too."""
    (place / "loaders.py").write_text(LOADERS)
    for data in ("samples", "Kept"):
        options = f"--model resnet.py:ResNet --data loaders.py:{data} --microbatches 4 --batch 8 --steps 7 --ranks 2"
        if data == "samples":  # saving changes no number
            train(f"whole-{data}", options)
        train(f"part-{data}", f"{options} --save-every 3 --set keep=4")
        part = tmp_path / f"part-{data}"
        whole = losses(part)
        assert data != "samples" or whole == losses(tmp_path / f"whole-{data}")
        for name in ("step-00000007", "step-00000006"):
            for file in (part / "checkpoints" / name).iterdir():
                file.unlink()
            (part / "checkpoints" / name).rmdir()
        train(data, f"--resume {part} --schedule zb-h1")
        assert losses(part) == whole
        assert len(set(whole)) == 7


LOADERS = '''from nets import *
import random

def dataset():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(5, (24,)))

def samples():
    return dataset()

class Kept:
    """Knows where it stands, and can't be drawn again up to there."""
    drawn = 0
    def __init__(self):
        self.position = 0
    def __iter__(self):
        if self.position >= 5:
            self.position = 0
        while self.position < 5:
            self.position += 1
            torch.manual_seed(self.position)
            yield torch.randn(8, 3, 8, 8), torch.randint(5, (8,))
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]
'''


def test_parts_of_replicas_are_refused_where_they_can_t_be_dealt(place: Path, capfd: Any) -> None:
    (place / "parts.py").write_text(PARTS)
    line = "train --model resnet.py:ResNet --data parts.py:parts --dp 2"
    for options, why in (
        ("--batch 15 --microbatches 4", "--batch 15 cannot be dealt to 2 replicas; give a multiple of 2"),
        ("--schedule vnag", "deals the microbatches of whole batches out"),
        ("--in-process", "in one process one pipeline runs the microbatches of all 2 replicas"),
    ):
        assert main([*line.split(), *options.split()]) == 2
        assert why in " ".join(capfd.readouterr().err.split())


PARTS = """from nets import *

def parts(replica, num_replicas):
    return Batches([draw(MODELS["resnet"], 10 * step + replica) for step in range(3)])
"""


@pytest.mark.slow
def test_text_goes_through_a_model_of_one_s_own(train: Train, place: Path) -> None:
    (place / "text.txt").write_text("a rank runs its ops in order. " * 200)
    (place / "lm.py").write_text(LM)
    options = (
        "--model lm.py:LM --model-options '{\"width\": 8}' --data text.txt --context 16 --batch 8 --microbatches 4"
    )
    report = train("text", f"{options} --steps 3 --ranks 2 --recompute")
    assert report["tokens_per_second"] > 0
    assert report["unit"].startswith("nats a token on the validation text")


LM = """from nets import *

class LM(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, width), nn.ModuleList(own_models.Block(width) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


def test_bug_a_short_last_batch_counted_as_a_whole_one_in_the_samples_a_second(train: Train, place: Path) -> None:
    part = "tuple(part[:num] for part in draw(MODELS['resnet'], num))"
    short = f"def short():\n    return Batches([{part} for num in (8, 3)])\n"
    (place / "short.py").write_text(RESNET + short)
    report = train("run", "--model resnet.py:ResNet --data short.py:short --steps 4 --ranks 2 --microbatches 2")
    assert report["samples_per_second"] * report["seconds"] == pytest.approx(8 + 3 + 8 + 3)
