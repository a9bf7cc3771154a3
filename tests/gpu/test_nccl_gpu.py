"""Messages by NCCL from GPU to GPU: the plain loop's numbers, also where ranks pick their ops by what has come in.

Where there is one device, ranks share it (see `run_ranks`).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from gpu_cases import build_batch, build_model
from penstock.runtime.transport.nccl import MOST_QUEUES
from plain_loop import plain_step
from processes import Outcome, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

NUM_STEPS = 3
"""Receives posted ahead once left two ranks standing still in the first of them."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def train(rank: int, name: str, dispatch: str) -> dict[str, list[float]]:
    with ps.Pipeline(
        build_model(),
        ps.build(name, torch.distributed.get_world_size(), 8),
        loss_fn=nn.functional.mse_loss,
        dispatch=dispatch,
        transport="nccl",
        parallel=ps.ParallelOptions(device="cuda:0"),
    ) as pipe:
        for _ in range(NUM_STEPS):
            pipe.zero_grad()
            result = pipe.step(*build_batch(), update=False)
        found = {key: p.grad.flatten().tolist() for key, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": [float(result.loss)], **found}


def ended(outcomes: list[Outcome]) -> dict[str, list[float]]:
    texts = "\n".join(outcome.text for outcome in outcomes)
    if "Duplicate GPU" in texts:
        pytest.skip("this NCCL takes no two ranks on one GPU, whatever host they say that they are")
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), texts
    return {key: value for outcome in outcomes for key, value in outcome.value.items()}


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 2), ("zb-v", 2), ("interleaved-1f1b", 2), ("zb", 4)])
def test_ranks_that_send_by_nccl_are_the_plain_loop(name: str, num_ranks: int, dispatch: str) -> None:
    """The numbers of the last of several steps, in which dropout draws alike and buffers are used again."""
    model = build_model()
    loss = plain_step(model, *build_batch(), 8, nn.functional.mse_loss, step=NUM_STEPS)
    outcomes = run_ranks(num_ranks, train, name, dispatch, deadline=100.0, shares_gpu=True, gpu_queues=MOST_QUEUES)
    found = ended(outcomes)
    assert found.pop("loss") == [float(loss)]
    assert found == {key: p.grad.flatten().tolist() for key, p in model.named_parameters() if p.grad is not None}
