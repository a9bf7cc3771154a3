"""One process a rank: what each finds out about its stages' split backward, all ranks know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from processes import run_ranks

pytestmark = pytest.mark.multiproc


def two_stages(rank: int) -> dict[str, Any]:
    slot_module.MERGE_WORK = 100
    torch.manual_seed(0)
    stages = [nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 4)), nn.Linear(4, 1)]
    pipe = ps.Pipeline(stages, ps.build("zb", 3, 2), loss_fn=nn.MSELoss())
    before = pipe.notices
    for _ in range(2):
        pipe.step(torch.randn(20, 4), torch.randn(20, 1))
    shares = {stage: share.share for stage, share in pipe.deferred_share().items()}
    found = {"before": before, "after": pipe.notices, "shares": shares}
    pipe.close()
    return found


def test_notices_and_shares_are_those_of_all_ranks() -> None:
    found = [outcome.value for outcome in run_ranks(3, two_stages)]
    assert found[0] == found[1] == found[2]
    (stage_0,) = found[0]["before"]
    assert stage_0.startswith("stage 0: the stage has no linear, convolution or embedding")
    assert [notice.split()[0] for notice in found[0]["after"]] == ["stage", "W"]
    assert found[0]["shares"] == {0: 0.0, 1: 160 / (160 + 40 + 40), 2: 0.0}
