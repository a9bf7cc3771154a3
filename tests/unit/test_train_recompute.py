"""`penstock train --recompute`: layers whose forwards change buffers train as they do without it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import penstock as ps
from penstock.train.tasks.layers import recomputed

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(nn.Module):
    """What it returns depends on how many tokens and which values came before, in a buffer changed in place and in
    one that is replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("tokens", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.tokens += len(x)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return torch.tanh(self.inner(x) / self.tokens.item() + self.mean)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "counters": Counting,
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()),
    "a parametrized weight": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "a weight replaced by a hook": lambda: spectral_norm(nn.Linear(8, 8)),
    "a weight replaced by a hook inside": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", LAYERS)
def test_buffers_change_once_and_gradients_are_those_of_the_first_forward(kind: str, schedule: str) -> None:
    torch.manual_seed(0)
    kept = nn.Sequential(*(LAYERS[kind]() for _ in range(3)), nn.Linear(8, 8))
    again = copy.deepcopy(kept)
    for layer in again:
        recomputed(layer)
    batches = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(3)]
    found = []
    for model in (kept, again):
        built = ps.build(schedule, 2, 4)
        with ps.Pipeline(model, built, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as pipe:
            found.append([pipe.step(*batch).losses for batch in batches])
    assert all(map(torch.equal, *found))
    for (name, one), (_, other) in zip(again.named_parameters(), kept.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    for (name, one), (_, other) in zip(again.named_buffers(), kept.named_buffers(), strict=True):
        assert torch.equal(one, other), name
