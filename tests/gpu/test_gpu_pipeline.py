"""On a GPU: the same numbers as the plain loop on that GPU, all ranks in one process or sharing the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from compatibility_cells import Cell, run_cell
from fuzz_runs import between_processes
from gpu_cases import build_batch, build_model
from packed import packed
from penstock.runtime.execute.launched_ops import MOST_LAUNCHED_OPS, LaunchedOps
from plain_loop import plain_step
from processes import run_ranks_to_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SCHEDULES = ["1f1b", "interleaved-1f1b", "zb-v", "zb"]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


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
    outcomes = run_ranks_to_end(2, share_one_device, name, dispatch)
    found = {key: value for o in outcomes for key, value in o.value.items()}
    assert found.pop("loss") == [float(loss)]
    assert found == {key: g.flatten().tolist() for key, g in gradients.items()}


@pytest.mark.parametrize("transport", ["host", "gloo"])
@pytest.mark.parametrize("sharding", ["copies", "none"])
def test_updates_of_several_pipelines_whose_processes_share_one_device(sharding: str, transport: str) -> None:
    """Gradients of another pipeline's copy, which came in host memory, could not be added to the owner's once."""
    cell = Cell("amdp", "pp 4", sharding, transport=transport, tied=True, precision="clipped", device="cuda")
    outcomes = between_processes(4, [cell], run_cell)
    assert [(outcome.kind, outcome.detail) for outcome in outcomes] == [("same", "bitwise")]


def test_peak_memory_and_timeline_are_measured_on_the_device() -> None:
    pipe = ps.Pipeline(build_model(), ps.build("zb-v", 4, 8), loss_fn=nn.functional.mse_loss)
    pipe.step(*build_batch(), update=False)
    timeline = pipe.timeline()
    assert len(timeline.ops) == pipe.schedule.num_ops
    assert all(timed.end >= timed.start for timed in timeline.ops)
    assert torch.cuda.max_memory_allocated() > 0


def refuse(device: object = None) -> None:
    raise AssertionError("a step waited for the whole device")


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_no_op_waits_for_the_device(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those of the plain loop, though one op at least is launched behind another."""
    loss, gradients = expected()
    model, most = build_model(), [0]
    launch = LaunchedOps.launch

    def counted(self: LaunchedOps, op: ps.schedule.Op, run: Callable[[], Any]) -> Any:
        outputs = launch(self, op, run)
        most[0] = max(most[0], self.num_launched - self.num_ended)
        return outputs

    monkeypatch.setattr(LaunchedOps, "launch", counted)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    pipe = ps.Pipeline(model, ps.build("zb-v", 4, 8), loss_fn=nn.functional.mse_loss, dispatch=dispatch)
    result = pipe.step(*build_batch(), update=False)
    monkeypatch.undo()
    assert torch.equal(result.loss, loss.cpu())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[key]), key  # type: ignore[arg-type]
    assert most[0] == MOST_LAUNCHED_OPS


def test_events_say_when_ops_ran() -> None:
    """Ops that one process gives a device lie one after the other, as its ranks go by one reading of the clock, and
    none takes no time."""
    pipe = ps.Pipeline(build_model(), ps.build("1f1b", 4, 8), loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        pipe.step(*build_batch(), update=False)
    ops = sorted(pipe.timeline().ops, key=lambda timed: timed.start)
    assert all(timed.end > timed.start for timed in ops)
    overlaps = [before.end - after.start for before, after in pairwise(ops)]
    assert max(overlaps) <= 1e-9, max(overlaps)  # ms


TRANSPORTS = [{"transport": "host"}, {"transport": "gloo"}, {"transport": "gloo", "dispatch": "dynamic"}]


def by_every_transport(rank: int) -> list[dict[str, list[float]]]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    found = []
    for options in TRANSPORTS:
        given = packed(loss_fn=nn.functional.mse_loss, device="cuda:0", **options)  # type: ignore[arg-type]
        with ps.Pipeline(build_model(), ps.build("zb-v", 2, 8), **given) as pipe:
            for _ in range(3):
                pipe.zero_grad()
                result = pipe.step(*build_batch(), update=False)
            grads = {key: p.grad.flatten().tolist() for key, p in pipe.named_parameters() if p.grad is not None}
            found.append({"loss": [float(result.loss)], **grads})
    return found


def test_messages_leave_with_what_their_op_wrote() -> None:
    """Three steps by each transport: a message that left too early would have what was there before."""
    outcomes = run_ranks_to_end(2, by_every_transport, deadline=100.0)
    for each in range(len(TRANSPORTS)):
        found = {key: value for o in outcomes for key, value in o.value[each].items()}
        assert found.keys() > {"loss"}
        assert all(torch.isfinite(torch.tensor(value)).all() for value in found.values())
    for rank in range(2):
        assert outcomes[rank].value[0] == outcomes[rank].value[1] == outcomes[rank].value[2]
