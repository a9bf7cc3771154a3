"""Case 4 over processes: what one stage in one process saves, two ranks load, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from processes import run_ranks

pytestmark = pytest.mark.multiproc

WIDTH = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.e(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x * self.scale


def go_on(rank: int, num_stages: int, load: str | None, save: str | None, first: int) -> list[float]:
    torch.manual_seed(0)
    order = ps.build("1f1b", num_stages, 4)
    with ps.Pipeline(Net(), order, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW) as pipe:
        if load is not None:
            pipe.load(load)
        losses = []
        for step in range(first, first + 2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            losses.append(float(pipe.step(x, x.roll(1, 1)).loss))
        if save is not None:
            pipe.save(save)
        return losses


def test_one_process_and_two_ranks_load_one_anothers_checkpoints(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    go_on(0, 1, None, one, 0)
    for outcome in run_ranks(2, go_on, 2, None, two, 0):
        assert outcome.code == 0, outcome.text
    alone = [go_on(0, 1, folder, None, 2) for folder in (one, two)]
    ranks = [run_ranks(2, go_on, 2, folder, None, 2)[0].value for folder in (one, two)]
    assert alone[0] == alone[1] == ranks[0] == ranks[1]
