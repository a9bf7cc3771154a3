"""`penstock tune` with a model of one's own: what is measured, printed and refused."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import own_batches
from penstock.cli import main
from penstock.formats.profile import KINDS
from penstock.runtime import split
from penstock.train.settings import Settings
from penstock.train.tasks.own import built
from penstock.tune.errors import TuneError
from penstock.tune.layers import NO_LAYER, RankShare, measure_layers
from penstock.tune.tuned_model import tuned_model
from train_runs import penstock

pytestmark = pytest.mark.unit

FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from own_batches import Batches


class Net(nn.Module):
    '''Skips, a layer without weights, a weight that the first and the last layer share.'''

    def __init__(self, depth=3, norm=False):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.act, self.norm = nn.Tanh(), nn.BatchNorm1d(6) if norm else nn.Identity()
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, mask):
        first = x = self.words(tokens) * mask[..., None]
        for block in self.blocks:
            x = x + self.act(block(x))
        return self.head(self.norm(x + first))


def loss_fn(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def data(train=True):
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (32, 6), generator=draws)
    return TensorDataset(tokens, torch.ones(32, 6), tokens.roll(1, 1))

def batches():
    rows = data().tensors
    return Batches([tuple(row[k : k + 4] for row in rows) for k in range(0, 32, 4)])
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(own_batches.__file__, tmp_path)
    (tmp_path / "net.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "net.py"


def settings_of(net: Path, data: str = "data", **more: Any) -> Settings:
    given = {"batch": 8, "microbatches": 1, "ranks": 1, "threads": 1, **more}
    return Settings(model=f"{net}:Net", data=f"{net}:{data}", **given)


@pytest.mark.parametrize("recompute", [False, True])
def test_every_layer_is_measured(net: Path, recompute: bool) -> None:
    settings = settings_of(net)
    model = tuned_model(settings)
    found = measure_layers(RankShare(settings, 2, recompute, 0, 1, 0.0), lambda: None)
    cut = split(built(settings.model, {}, 0), example=(torch.zeros(2, 6, dtype=torch.long), torch.ones(2, 6)))
    assert list(model.layers) == [path for paths in cut.layers for path in paths]
    assert found["layers"] == list(range(model.num_layers)) == list(range(9))
    kinds = {(layer, kind) for layer in found["layers"] for kind in (*KINDS, "update")}
    assert {tuple(key.split()) for key in found["times"]} == {
        (str(layer), kind) for layer, kind in kinds | {(NO_LAYER, kind) for kind in (*KINDS, "update")}
    }
    weights = [found["bytes"][str(layer)]["weight"] for layer in found["layers"]]
    assert weights == [4.0 * count for count in cut.num_parameters]
    assert found["tied"] == 4 * 20 * 8
    state = [found["bytes"][str(layer)]["state"] for layer in found["layers"]]
    assert all((kept > 0) == (weight > 0) for kept, weight in zip(state, weights, strict=True))
    assert all(found["bytes"][str(layer)]["output"] > 0 for layer in found["layers"][:-1])
    kept = [found["bytes"][str(layer)]["activation"] for layer in found["layers"]]
    assert all(each > 0 for each, weight in zip(kept, weights, strict=True) if weight)
    assert (max(each["transient"] for each in found["bytes"].values()) > 0) == recompute


INPLACE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    '''As torchvision's ResNets begin: the third layer changes in place what the second returns.'''

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)

    def forward(self, images):
        x = self.relu(self.norm(self.conv(images)))
        return self.head(self.pool(x).flatten(1))


loss_fn = nn.CrossEntropyLoss()


def data(train=True):
    return TensorDataset(torch.randn(32, 3, 6, 6), torch.zeros(32, dtype=torch.long))
"""


def test_a_layer_that_changes_its_input_in_place_is_measured(net: Path) -> None:
    net.write_text(INPLACE)
    found = measure_layers(RankShare(settings_of(net), 2, False, 0, 1, 0.0), lambda: None)
    assert found["layers"] == list(range(5))
    assert found["bytes"]["2"]["weight"] == 0  # the relu
    assert found["bytes"]["2"]["activation"] == found["bytes"]["2"]["output"] == 2 * 4 * 4 * 4 * 4


@pytest.mark.slow
def test_another_file_or_other_arguments_are_measured_anew(net: Path) -> None:
    first = tuned_model(settings_of(net)).digest
    assert tuned_model(settings_of(net)).digest == first
    assert tuned_model(settings_of(net, model_options={"depth": 4})).digest != first
    assert tuned_model(settings_of(net, batch=4)).digest == first
    net.with_name("other.py").write_text(FILE.replace("torch.tanh", "torch.relu").replace("Tanh", "ReLU"))
    assert tuned_model(settings_of(net.with_name("other.py"))).digest != first


def test_microbatches_larger_than_a_batch_of_the_data_are_refused(net: Path) -> None:
    settings = settings_of(net, "batches", batch=4)
    with pytest.raises(TuneError, match="batches of 4 samples, and microbatches of 5"):
        measure_layers(RankShare(settings, 5, False, 0, 1, 0.0), lambda: None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("tune --profile-only --model nothing.py:Net --data net.py:data", "nothing.py:Net: there is no file"),
        ("tune --model net.py:Nett --data net.py:data", "has no 'Nett'"),
        ("tune --profile-only --model clip", "--model clip has a chain of layers for each tower"),
        ("tune --profile-only --data net.py:data", "makes batches for a model of your own"),
        (
            "tune --model net.py:Net --data net.py:data --config deep.toml",
            "net.py:Net: a model of your own takes its sizes by --model-options",
        ),
        (
            "tune --profile-only --model net.py:Net --data net.py:data --ranks 20",
            "Net has 9 layers, too few for 20 ranks",
        ),
    ],
)
def test_what_is_refused_says_why(net: Path, line: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    net.with_name("deep.toml").write_text("depth = 3")
    assert main(line.split()) == 2
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_file_beside_that_of_the_model_changed_and_old_measurements_were_taken(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What measurements go by was the file of the model alone, and not what it imports from its folder."""
    parts = net.parent / "parts_of_net"
    parts.mkdir()
    (parts / "__init__.py").write_text("")
    (parts / "acts.py").write_text("from torch.nn import Tanh as Act\n")
    net.write_text(f"from parts_of_net.acts import Act\n{FILE.replace('nn.Tanh()', 'Act()')}")
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys, "path", [*sys.path])
    first = tuned_model(settings_of(net)).digest
    assert tuned_model(settings_of(net)).digest == first
    (parts / "acts.py").write_text("from torch.nn import Tanh as Act  # slower by now\n")
    assert tuned_model(settings_of(net)).digest != first


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_profile(net: Path) -> None:
    line = "tune --profile-only --model net.py:Net --data net.py:data --microbatch-size 2 --seconds 0.05 --json"
    (profile,) = penstock(line.split(), net.parent).json["profiles"]
    assert profile["layers"][0] == "words"
    assert profile["model"] == "Net"


@pytest.mark.nightly
@pytest.mark.multiproc
def test_the_closing_line_trains(net: Path) -> None:
    """With the best verified, which ranks in processes of their own ran."""
    net.with_name("deep.toml").write_text(
        "model = 'net.py:Net'\ndata = 'net.py:batches'\nmodel-options = {depth = 4}"
    )
    line = "tune --config deep.toml --ranks 2 --pp 2 --microbatch-size 1 --seconds 0.05 --verify 1 --json"
    ended = penstock(line.split(), net.parent)
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["batch"] == 4, "the data's own"
    assert found["choice"]["measured"]["step_ms"] > 0
    program, *words = shlex.split(found["train"])
    assert program == "penstock"
    report = penstock([*words, "--steps", "2", "--out", "run", "--in-process", "--json"], net.parent).json
    assert (report["steps"], report["num_ranks"]) == (2, 2)
