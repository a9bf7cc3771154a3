"""Messages by NCCL from GPU to GPU: the plain loop's numbers, also where ranks pick their ops by what has come in.

Where there is one device, ranks share it (see `run_ranks`).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from gpu_cases import build_batch, build_model
from labs import needs_lab
from penstock.runtime.transport.nccl import MOST_QUEUES
from plain_loop import plain_step
from processes import Outcome, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults" / "links.py"
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


ROUTES: list[tuple[tuple[int, int], ...]] = [(), ((0, 1),), ((0, 1),), (), ((0, 1),), ()]
"""The links that delegates carry in each step; NCCL carries the others."""


def move(rank: int, name: str, dispatch: str) -> tuple[dict[str, list[float]], list[int]]:
    """Loss and gradients of the last step; in each step, the messages that came in by the delegate."""
    options = ps.TransportOptions(
        "nccl",
        delegates=ps.runtime.DelegateOptions(host_memory=64 << 20),  # pinned, by each rank
        links=ps.Links({(0, 1): "latency:4ms"}),
    )
    by_delegate, before = [], 0
    with ps.Pipeline(
        build_model(),
        ps.build(name, torch.distributed.get_world_size(), 8),
        loss_fn=nn.functional.mse_loss,
        dispatch=dispatch,
        transport=options,
        parallel=ps.ParallelOptions(device="cuda:0"),
    ) as pipe:
        for delegated in ROUTES:
            pipe.reconfigure(replace(pipe.configuration, delegated=delegated))
            pipe.zero_grad()
            result = pipe.step(*build_batch(), update=False)
            counters = pipe._local.choice.seen(pipe._local.transport)[1]
            assert counters is not None
            by_delegate.append(counters["messages"] - before)
            before = counters["messages"]
        found = {key: p.grad.flatten().tolist() for key, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": [float(result.loss)], **found}, by_delegate


@pytest.mark.parametrize(
    ("name", "num_ranks", "dispatch"),
    [("1f1b", 2, "frozen"), ("zb-v", 2, "dynamic"), ("1f1b", 4, "dynamic")],
)
def test_a_link_over_nccl_could_not_go_by_delegates_nor_come_back(name: str, num_ranks: int, dispatch: str) -> None:
    """Delegates were refused over NCCL. A line that rested carries messages again, and every number is the same."""
    model = build_model()
    loss = plain_step(model, *build_batch(), 8, nn.functional.mse_loss, step=len(ROUTES))
    outcomes = run_ranks(num_ranks, move, name, dispatch, deadline=100.0, shares_gpu=True, gpu_queues=MOST_QUEUES)
    texts = "\n".join(outcome.text for outcome in outcomes)
    if "Duplicate GPU" in texts:
        pytest.skip("this NCCL takes no two ranks on one GPU, whatever host they say that they are")
    assert [outcome.code for outcome in outcomes] == [0] * num_ranks, texts
    found = {key: value for outcome in outcomes for key, value in outcome.value[0].items()}
    assert found.pop("loss") == [float(loss)]
    assert found == {key: p.grad.flatten().tolist() for key, p in model.named_parameters() if p.grad is not None}
    for rank, outcome in enumerate(outcomes):
        assert [num > 0 for num in outcome.value[1]] == [bool(each) and rank < 2 for each in ROUTES]


class EndsItsProcess(nn.Module):
    """A layer at whose second call nothing is left of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def loses_its_peer(rank: int) -> tuple[str, float]:
    """What is told, and the seconds until the groups are gone, though nobody takes what is left on the GPU."""
    torch.manual_seed(0)
    stages = [nn.Linear(4096, 4096), nn.Sequential(nn.Linear(4096, 4096), EndsItsProcess())]
    x = torch.randn(8 * 4096, 4096, device="cuda")
    with (
        pytest.raises(ps.runtime.PeerLost) as caught,
        ps.Pipeline(
            stages,
            ps.build("gpipe", 2, 8),
            loss_fn=nn.functional.mse_loss,
            transport="nccl",
            timeout=60.0,
            parallel=ps.ParallelOptions(device="cuda:0"),
        ) as pipe,
    ):
        pipe.step(x, x, update=False)
    said, begun = str(caught.value), time.monotonic()
    torch.distributed.destroy_process_group()
    torch.cuda.synchronize()
    return said, time.monotonic() - begun


def test_a_rank_whose_peer_was_killed_says_so_and_can_end() -> None:
    left, killed = run_ranks(2, loses_its_peer, deadline=100.0, shares_gpu=True)
    assert killed.code == -signal.SIGKILL
    assert left.code == 0, left.text
    said, seconds = left.value
    assert "rank 0 lost its connection to rank 1" in said
    assert seconds < 30.0, "torch's watchdog was waited for"


@needs_lab
@pytest.mark.parametrize("how", ["interface", "silent"])
def test_messages_go_on_by_gloo_where_the_network_of_nccl_is_cut(how: str) -> None:
    spec = importlib.util.spec_from_file_location("links_over_nccl", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    links = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = links  # dataclasses look their module up
    spec.loader.exec_module(links)
    row = links.cell("nccl", "pp", 1, how, 1)
    assert not row["error"]
    assert [each["equal"] for each in row["runs"]] == [True, True]
    assert row["runs"][1]["in_transfer"]
    assert any("nothing was lost" in notice for notice in row["runs"][1]["notices"])
