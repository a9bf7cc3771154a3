"""What can be wrong with a model or data of one's own is said before anything starts: file, line, rule, remedy."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from train_runs import error_in

pytestmark = pytest.mark.unit

NETS = """import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

class Wide(Net):
    def __init__(self, width, depth):
        super().__init__(width)

class Broken(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4, sideways=True)

class Sure(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0:
                break
        return x

class Asks(Net):
    def forward(self, x, *, mask):
        return super().forward(x) * mask

class Five(Net):
    def __init__(self):
        super().__init__(5)

kept = Net()

def same():
    return kept

def number():
    return 3

class Batches(list):
    '''Batches in order, again and again, with a position that a checkpoint can have.'''
    position = 0
    def __iter__(self):
        if self.position >= len(self):
            self.position = 0
        while self.position < len(self):
            self.position += 1
            yield self[self.position - 1]
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

table = {"x": 1}
loss_fn = nn.MSELoss()

def data(batch=16):
    return Batches([(torch.randn(batch, 4), torch.randn(batch, 4))] * 3)

def sixteen():
    return Batches([(torch.randn(16, 4), torch.randn(16, 4))])

class fails(Batches):
    def __iter__(self):
        yield torch.randn(16, 4), torch.randn(16, 4)
        raise OSError("the disk is gone")

class Stream(IterableDataset):
    def __iter__(self):
        yield torch.randn(4), torch.randn(4)

def unlike():
    return Batches([(torch.randn(16, 4), torch.randn(15, 4))])

def single():
    return Batches([torch.randn(16, 4)])

def nothing():
    return Batches([])

def few():
    return TensorDataset(torch.randn(12, 4), torch.randn(12, 4))

def loader():
    return DataLoader(few(), batch_size=16)

def small():
    return Batches([(torch.randn(4, 4), torch.randn(4, 4))])

def dicts():
    return Batches([{"y": torch.randn(16, 4), "z": torch.randn(16, 4)}])

once = Batches([(torch.randn(16, 4), torch.randn(16, 4))])

def needs(path):
    return Batches([])
"""
OTHER = "from nets import Net, data, unlike\n"
WITH_CLASS = "from nets import Net, data\nclass loss_fn:\n    pass\n"
SHAPED = "from nets import Net, data\ndef loss_fn(output, targets):\n    return output - targets\n"
LEARNS = "from nets import *\nloss_fn = nn.Sequential(nn.Linear(4, 1))\n"
RAISES = (
    "from nets import *\ndef loss_fn(output, targets):\n    return nn.functional.mse_loss(output, targets[:, :3].T)\n"
)
KWARGS = """from nets import *
del loss_fn
class Own(Net):
    def forward(self, x):
        return {"out": super().forward(x)}
def extra():
    return Batches([{"x": torch.randn(16, 4), "idx": torch.randn(16, 1)}])
def only():
    return Batches([{"x": torch.randn(16, 4)}])
"""
RENAMED = "from nets import *\ndel loss_fn\ncriterion = nn.MSELoss()\n"

BAD: dict[str, tuple[str, list[str]]] = {
    "no file": ("--model gone.py:Net", ["there is no file", "gone.py", "nets.py:Net"]),
    "no name": ("--model nets.py", ["which name in it", "nets.py:NAME", "Net, Wide"]),
    "another name": ("--model nets.py:Nett", ["has no 'Nett'", "did you mean Net?"]),
    "no such name": ("--model other.py:Zzz", ["has no 'Zzz'", "it defines"]),
    "a syntax error": ("--model syntax.py:Net", ["can't be imported", "syntax.py:2: def broken(", "SyntaxError"]),
    "a missing package": (
        "--model lacks.py:Net",
        ["can't be imported", "lacks.py:1: import no_such_package_anywhere", "ModuleNotFoundError"],
    ),
    "a file that ends": ("--model ends.py:Net", ["can't be imported", "ends.py:2", "SystemExit"]),
    "no module": ("--model nets.py:table", ["is a dict", "a class of modules"]),
    "a function of another": ("--model nets.py:number", ["makes a int, not an nn.Module", "return the module"]),
    "arguments missing": (
        "--model nets.py:Wide",
        ["nets.py:14) needs width, depth", "--model-options '{\"width\": ...}'", "takes nothing"],
    ),
    "unknown arguments": (
        "--model nets.py:Net --model-options '{\"depth\": 3}'",
        ["--model-options", "has no 'depth'", "it takes width"],
    ),
    "arguments of an instance": ("--model nets.py:kept --model-options '{\"a\": 3}'", ["is made already", "leave"]),
    "no JSON": ("--model nets.py:Net --model-options a=3", ["--model-options 'a=3' is not JSON"]),
    "no object": ("--model nets.py:Net --model-options 3", ["give a JSON object", '{"depth": 4}']),
    "arguments of ours": ("--model gpt --model-options '{\"a\": 3}'", ["a model of your own, FILE.py:NAME"]),
    "it raises when made": ("--model nets.py:Broken", ["nets.py:21: self.other", "TypeError"]),
    "it cannot be cut": (
        "--model nets.py:Sure",
        ["Sure cannot be cut as it is", "values of a tensor", "nets.py:27", "x.mean() > 0"],
    ),
    "more stages than layers": ("--model nets.py:Net --ranks 6", ["6 stages", "4 layers", "layers.0"]),
    "another cut": ("--model nets.py:Net --cut 1,1", ["sizes 1, 1", "each of the 2 stages", "4 layers"]),
    "the forward needs more": ("--model nets.py:Asks", ["the forward of nets.py:Asks", "mask", "TypeError"]),
    "shapes do not fit": ("--model nets.py:Five", ["forward of nets.py:Five fails", "nets.py:11", "RuntimeError"]),
    "depth": ("--model nets.py:Net --depth 3", ["--depth", "your own", "--model-options"]),
    "tokenizer": ("--model nets.py:Net --tokenizer a.json", ["--tokenizer", "its batches are made already"]),
    "tensor parallel": ("--model nets.py:Net --tp 2", ["--tp 2", "your own", "parallelize"]),
    "shared stages": ("--model nets.py:Net --schedule mllm", ["mllm has stages that several", "your own"]),
    "whole documents": ("--model nets.py:Net --packing planned", ["--packing planned", "leave --packing out"]),
    "no loss": ("--model kwargs.py:Own --data kwargs.py:only", ["has no loss", "def loss_fn(output, targets)"]),
    "text for a model of something else": (
        "--model nets.py:Net --data text.txt",
        ["the forward of nets.py:Net fails", "integers of shape (samples, 128)", "give --data FILE.py:NAME"],
    ),
    "a loss of another name": (
        "--model renamed.py:Net --data renamed.py:data",
        ["the forward of renamed.py:Net fails: TypeError", "has a loss_fn; name the loss loss_fn if there is one"],
    ),
    "a loss that is a class": ("--model withclass.py:Net", ["loss_fn in withclass.py is no function"]),
    "a loss of another shape": ("--model shaped.py:Net", ["a tensor of shape (2, 4)", "one number"]),
    "a loss with parameters": ("--model learns.py:Net", ["in learns.py has parameters", "nothing would train"]),
    "a loss that fails": ("--model raises.py:Net", ["loss_fn of raises.py:Net fails", "raises.py:3", "RuntimeError"]),
    "a folder to export to": ("--export .", ["--export", "is a folder; give a file"]),
    "no data file": ("--data gone.py:data", ["--data", "there is no file"]),
    "data of another name": ("--data nets.py:dota", ["has no 'dota'", "did you mean data?"]),
    "data that needs arguments": ("--data nets.py:needs", ["needs path", "takes nothing"]),
    "data that is none": ("--data nets.py:table", ["is a dict", "name a Dataset"]),
    "data of a number": ("--data nets.py:number", ["is a int", "name a Dataset"]),
    "a stream of samples": ("--data nets.py:Stream", ["is a Stream", "StatefulDataLoader"]),
    "data that runs once": ("--data nets.py:once", ["a loader with a state", "a function that makes it"]),
    "inputs unlike targets": ("--data nets.py:unlike", ["15, 16 samples in dimension 0"]),
    "no targets": ("--data nets.py:single", ["without targets", "(inputs, targets)"]),
    "no batch": ("--data nets.py:nothing --batch 16", ["gives no batch"]),
    "few samples": ("--data nets.py:few", ["has 6 samples to train on", "a batch 16", "smaller --batch"]),
    "a loader without a state": (
        "--data nets.py:loader",
        ["is a DataLoader", "collate_fn in the file", "StatefulDataLoader"],
    ),
    "few microbatches": ("--data nets.py:small", ["a batch of 4 can't be cut into 8 microbatches"]),
    "another batch": ("--data nets.py:sixteen --batch 32", ["batches of 16 samples, not 32", "leave out --batch"]),
    "keys that nobody takes": ("--data nets.py:dicts", ["has y, z", "needs x", "name the keys as the forward does"]),
    "keys too many": ("--model kwargs.py:Own --data kwargs.py:extra", ["has idx", "does not take", "leave it out"]),
    "own batches for ours": ("--model gpt --data nets.py:data", ["with --model gpt: it makes batches for a model"]),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "nets": NETS, "other": OTHER, "withclass": WITH_CLASS, "shaped": SHAPED, "learns": LEARNS, "raises": RAISES,
        "kwargs": KWARGS, "renamed": RENAMED, "syntax": "x = 1\ndef broken(\n",
        "lacks": "import no_such_package_anywhere\n",
        "ends": "import sys\nsys.exit(3)\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "text.txt").write_text("a rank runs its ops in order. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name in files:
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_told(place: Path, capfd: Any, options: str, words: list[str]) -> None:
    before = sorted(place.rglob("*.json")), sorted(place.glob("runs"))
    line = "--model nets.py:Net --data nets.py:data --ranks 2 --steps 2 --in-process"
    code = main(["train", *shlex.split(line), *shlex.split(options)])
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err
    err = error_in(err)
    assert err.startswith("penstock: ")
    assert "bug in penstock" not in err
    assert len(err.splitlines()) <= 3, err
    for word in words:
        assert word in err, err
    assert (sorted(place.rglob("*.json")), sorted(place.glob("runs"))) == before


def test_data_that_fails_in_a_later_batch_names_its_line(place: Path, capfd: Any) -> None:
    line = "--model nets.py:Net --data nets.py:fails --ranks 2 --steps 3 --in-process --out run"
    assert main(["train", *line.split()]) == 2
    said = capfd.readouterr().err
    for word in ("batch 1 of nets.py:fails", "nets.py:", "OSError: the disk is gone"):
        assert word in said


def test_what_a_file_prints_does_not_mix_with_the_report(place: Path, capfd: Any) -> None:
    (place / "says.py").write_text(
        "from nets import *\nprint('hello')\ndef more():\n    print('more')\n    return Net()\n"
    )
    line = "--model says.py:more --data nets.py:data --ranks 2 --steps 1 --in-process --out run --json"
    assert main(["train", *line.split()]) == 0
    out = capfd.readouterr().out
    assert json.loads(out)["steps"] == 1


def test_a_module_that_is_made_already_begins_anew_in_each_run(place: Path, capfd: Any) -> None:
    """And a function that returns one module again and again is refused, as its second run would be another."""
    losses = []
    for name in ("one", "two"):
        line = f"--model nets.py:kept --data nets.py:data --ranks 2 --steps 2 --in-process --out {name} --json"
        assert main(["train", *line.split()]) == 0
        losses.append(json.loads(capfd.readouterr().out)["loss"])
    assert losses[0] == losses[1]
    for code in (0, 2):
        line = f"--model nets.py:same --data nets.py:data --ranks 2 --steps 2 --in-process --out same-{code}"
        assert main(["train", *line.split()]) == code
    assert "the same module again" in capfd.readouterr().err
