"""On a GPU: the same numbers as the plain loop on that GPU, all ranks in one process or sharing the device."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import penstock as ps
from plain_loop import plain_step
from processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SCHEDULES = ["1f1b", "interleaved-1f1b", "zb-v", "zb"]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64)]
    return nn.Sequential(*layers).cuda()


def build_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(30, 64, device="cuda"), torch.randn(30, 64, device="cuda")


def expected(autocast: torch.dtype | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build_model()
    loss = plain_step(model, *build_batch(), 8, nn.functional.mse_loss, autocast=autocast)
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_one_process_equals_the_plain_loop(name: str, dispatch: str) -> None:
    loss, gradients = expected()
    model = build_model()
    pipe = ps.Pipeline(model, ps.build(name, 4, 8), loss_fn=nn.functional.mse_loss, dispatch=dispatch)
    result = pipe.step(*build_batch(), update=False)
    assert torch.equal(result.loss, loss.cpu())
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[key]), key


def share_one_device(rank: int, name: str, dispatch: str) -> dict[str, list[float]]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    pipe = ps.Pipeline(
        build_model(),
        ps.build(name, 2, 8),
        loss_fn=nn.functional.mse_loss,
        dispatch=dispatch,
        parallel=ps.ParallelOptions(device="cuda:0"),
    )
    result = pipe.step(*build_batch(), update=False)
    found = {key: p.grad.flatten().tolist() for key, p in pipe.named_parameters() if p.grad is not None}
    return {"loss": [float(result.loss)], **found}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_two_processes_share_one_device_through_host_memory(name: str, dispatch: str) -> None:
    loss, gradients = expected()
    outcomes = run_ranks(2, share_one_device, name, dispatch)
    assert [o.code for o in outcomes] == [0, 0], "\n".join(o.text for o in outcomes)
    found = {key: value for o in outcomes for key, value in o.value.items()}
    assert found.pop("loss") == [float(loss)]
    assert found == {key: g.flatten().tolist() for key, g in gradients.items()}


def test_peak_memory_and_timeline_are_measured_on_the_device() -> None:
    pipe = ps.Pipeline(build_model(), ps.build("zb-v", 4, 8), loss_fn=nn.functional.mse_loss)
    pipe.step(*build_batch(), update=False)
    timeline = pipe.timeline()
    assert len(timeline.ops) == pipe.schedule.num_ops
    assert all(timed.end >= timed.start for timed in timeline.ops)
    assert torch.cuda.max_memory_allocated() > 0
