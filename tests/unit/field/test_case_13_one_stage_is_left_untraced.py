"""The only stage of a model that draws nothing is not traced, so no cache of the user keeps a stand-in."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

import penstock as ps


@functools.lru_cache
def rates(num: int) -> Tensor:
    return torch.arange(num) / 10.0


CACHE: dict[str, Tensor] = {}


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if "t" not in CACHE:
            CACHE["t"] = torch.arange(8.0).to(x)
        for block in self.blocks:
            x = block(x) + rates(8) + CACHE["t"]
        return self.head(x)


def test_one_stage_trains_with_tables_in_caches() -> None:
    torch.manual_seed(0)
    model, x, y = Rotary(), torch.randn(8, 8), torch.randn(8, 1)
    plain = copy.deepcopy(model)
    with ps.Pipeline(model, ps.build("1f1b", 1, 4), loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(x, y, update=False).loss
    want = sum(nn.MSELoss()(plain(a), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4), strict=True))
    assert torch.equal(loss, want.detach())
    assert type(CACHE["t"]) is Tensor
