"""No module is imported while a forward is traced, and what a forward or layer imports by itself is not traced.

torch imports its compiler, 800 modules, at the first op of a mode. Inside a traced forward that took minutes.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock as ps

FORWARDS = '''
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


class Net(nn.Module):
    """A model with one line of its own between its layers."""

    def __init__(self, line):
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 100)
        self.norm, self.checkpointed = nn.BatchNorm1d(8), Checkpointed()
        self.line = line

    def forward(self, ids):
        return self.last(self.line(self, self.first(self.embed(ids)), ids))


LINES = {
    "compare": lambda net, x, ids: x * (ids != 0)[..., None],
    "masked": lambda net, x, ids: x.masked_fill(ids[..., None].eq(0), -1e9),
    "where": lambda net, x, ids: torch.where(ids[..., None] > 3, x, 0.0),
    "einsum": lambda net, x, ids: torch.einsum("btd,bsd,bse->bte", x, x, x),
    "attention": lambda net, x, ids: F.scaled_dot_product_attention(x, x, x, attn_mask=(ids != 0)[:, None]),
    "index": lambda net, x, ids: x[torch.arange(x.shape[0])[:, None], ids % 8],
    "batch norm": lambda net, x, ids: net.norm(x),
    "checkpoint": lambda net, x, ids: net.checkpointed(x),
    "random": lambda net, x, ids: F.dropout(x, 0.5, net.training) + torch.rand_like(x),
}


class Watcher:
    """Notes the modules that are looked for while a forward of this file runs."""

    found = []

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe()
        while frame is not None and frame.f_code is not Net.forward.__code__:
            frame = frame.f_back
        if frame is not None:
            self.found.append(name)


sys.meta_path.insert(0, Watcher())
for name, line in LINES.items():
    for given in ({}, {"example": torch.randint(0, 100, (4, 8))}):
        try:
            ps.split(Net(line), 2, **given)
        except ps.runtime.PartitionError as error:
            if given or "Give an example" not in str(error):
                raise
    if Watcher.found:
        sys.exit(f"{name}: {Watcher.found}")
'''

HELPER = """
value = None


def read():
    global value
    value = 2.0 if value is None else value


read()
isinstance(value, float)


def factor():
    return value
"""


class Importing(nn.Module):
    """A layer that imports in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        import case_12_of_layer  # type: ignore[import-not-found]

        result: Tensor = self.linear(x) * case_12_of_layer.factor()
        return result


class Net(nn.Module):
    """A model that does so between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Importing(), Importing(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        import case_12_of_forward  # type: ignore[import-not-found]

        for layer in self.layers:
            x = layer(x)
        result: Tensor = x * case_12_of_forward.factor()
        return result


@pytest.mark.slow
def test_no_module_is_imported_while_a_forward_is_traced(tmp_path: Path) -> None:
    script = tmp_path / "forwards.py"
    script.write_text(FORWARDS)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_module_that_a_forward_or_layer_imports_is_not_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("case_12_of_layer.py", "case_12_of_forward.py"):
        (tmp_path / name).write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    net, example = Net(), torch.randn(2, 4)
    stages = ps.split(net, 2, example=example)
    assert torch.equal(nn.Sequential(*stages)(example), net(example))
