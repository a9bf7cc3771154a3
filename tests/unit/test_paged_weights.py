"""The weights of a model of one's own in a file: what a constructor draws and reads stays the same to the bit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.train.tasks.paged_weights import IS_POSSIBLE, PagedWeights

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not IS_POSSIBLE, reason="pages of a file are let go of on Linux alone"),
]

WIDTH = 160  # a weight has 100 KiB, more than the smallest that moves


class Draws(nn.Module):
    """Does in its constructor what might go wrong if its weights lay elsewhere than it thinks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, WIDTH)
        layer = nn.Linear(WIDTH, WIDTH)
        self.copies = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 320, batch_first=True), 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 300)
        self.head.weight = self.embedding.weight
        drawn = torch.randn(WIDTH, WIDTH)
        self.mine = nn.Parameter(drawn)
        nn.init.orthogonal_(drawn)  # which is the parameter's memory
        self.register_buffer("table", torch.rand(WIDTH, WIDTH))
        self.scale = float(self.copies[0].weight.norm())  # what was drawn is read
        self.apply(self.again)

    def again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            with torch.no_grad():
                module.weight[0].zero_()

    def forward(self, tokens: Tensor) -> Any:
        x = self.encoder(self.normed(self.embedding(tokens)) * self.scale)
        for each in self.copies:
            x = each(x) + x @ self.table @ self.mine
        return self.head(x)


def made(paged: PagedWeights | None) -> Draws:
    torch.manual_seed(3)
    if paged is None:
        return Draws()
    with paged.making():
        return Draws()


def in_file(model: nn.Module, paged: PagedWeights) -> set[str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if paged.holds(tensor)}


def test_what_is_drawn_is_the_same_to_the_bit() -> None:
    plain, after = made(None), torch.get_rng_state()
    paged = PagedWeights(most_resident=1 << 16)  # so that pages are let go of all the time
    model = made(paged)
    assert torch.equal(torch.get_rng_state(), after)
    assert model.scale == plain.scale
    theirs = plain.state_dict()
    assert theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embedding.weight
    held = in_file(model, paged)
    assert {"embedding.weight", "copies.2.weight", "encoder.layers.1.linear1.weight", "table"} <= held
    assert "mine" not in held  # another tensor had its memory, and drew into it
    assert "head.bias" not in held  # too small

    tokens = torch.arange(12).reshape(3, 4)
    with paged.running(), torch.no_grad():
        model.eval()
        plain.eval()
        assert torch.equal(model(tokens), plain(tokens))


def test_what_is_taken_is_trained_in_memory() -> None:
    paged = PagedWeights()
    model, plain = made(paged), made(None)
    first = list(model.parameters())
    paged.take(model.copies.parameters())
    assert not any(name.startswith("copies.") for name in in_file(model, paged))
    assert "embedding.weight" in in_file(model, paged)
    assert all(a is b for a, b in zip(first, model.parameters()))
    tokens = torch.arange(12).reshape(3, 4)
    for net in (model, plain):
        torch.manual_seed(0)
        net(tokens).square().mean().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()  # also what still lies in the file
    paged.let_go()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def test_a_full_disk_leaves_the_weights_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    paged = PagedWeights()
    model = made(paged)
    assert not in_file(model, paged)
    assert paged.num_bytes == 0
    theirs = made(None).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in model.state_dict().items())


def test_the_file_has_no_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    paged = PagedWeights()
    model = made(paged)
    assert in_file(model, paged)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_is_made_and_run_in_less_memory_than_it_has_weights() -> None:
    script = """
import torch
from torch import nn
from penstock.train.tasks.paged_weights import PagedWeights

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(64))
        self.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def most():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

with torch.no_grad():
    nn.Linear(64, 64)(torch.zeros(1, 64))
    before, paged = most(), PagedWeights()
    with paged.making():
        model = Deep()
    with paged.running():
        model(torch.zeros(1, 1024))
print(most() - before, sum(p.nbytes for p in model.parameters()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    resident, whole = map(int, done.stdout.split())
    assert whole > 250 << 20
    assert resident < 0.5 * whole
