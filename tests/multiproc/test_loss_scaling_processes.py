"""Loss scaling between processes, of which one alone finds that a gradient overflowed: all leave the update out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.runtime.tensors.dtensor import local, whole
from processes import run_ranks
from scaled_loop import ADAMW, NUM, ScaledLoop, new_scaler, scaled_batch, scaled_model
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

STEPS = range(8)
Found = tuple[list[Tensor], list[float], dict[str, Tensor], int]


def trained(rank: int, schedule: str, pp: int, dp: int, sharding: str, clip_norm: float | None) -> Found:
    """Losses, scales, this process's parameters and the number of updates."""
    scaler = new_scaler()
    pipe = ps.Pipeline(
        scaled_model(),
        ps.build(schedule, pp, NUM // dp),
        loss_fn=nn.MSELoss(),
        optimizer=ADAMW,
        mesh=init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp")),
        timeout=PATIENCE,
        precision=ps.PrecisionOptions(autocast=torch.float16, clip_norm=clip_norm, scaler=scaler),
        parallel=ps.ParallelOptions(sharding=sharding),
    )
    losses, scales = [], []
    for step in STEPS:
        losses.append(pipe.step(*scaled_batch(step), update=step != 5).loss)
        if step == 5:  # one process alone finds that a gradient is not finite; both, of what both hold
            both = schedule == "chimera" or (dp == 2 and sharding == "none")
            gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
            for gradient in gradients if both else gradients[:rank]:
                local(gradient).view(-1)[0] = float("inf")
            pipe.update()
        scales.append(scaler.get_scale())
    return losses, scales, {name: whole(p.detach()).clone() for name, p in pipe.named_parameters()}, pipe.num_updates


def trained_alone(clip_norm: float | None) -> Found:
    loop = ScaledLoop(scaled_model(), new_scaler(), clip_norm)
    losses, scales, num_updates = [], [], 0
    for step in STEPS:
        losses.append(loop.backward(*scaled_batch(step)))
        if step == 5:
            next(loop.model.parameters()).grad[0] = float("inf")  # type: ignore[index]
        loop.update()
        scales.append(loop.scaler.get_scale())
        num_updates += step not in (3, 5, 7)
    return losses, scales, {name: p.detach() for name, p in loop.model.named_parameters()}, num_updates


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "sharding", "clip_norm"),
    [
        ("1f1b", 2, 1, "none", None),
        ("zb-v", 2, 1, "none", 0.1),
        ("chimera", 2, 1, "copies", 0.1),
        ("1f1b", 1, 2, "none", None),
        ("1f1b", 1, 2, "zero1", 0.1),
        ("1f1b", 1, 2, "fsdp", None),
    ],
)
def test_an_overflow_in_one_process_leaves_the_update_out_in_all(
    schedule: str, pp: int, dp: int, sharding: str, clip_norm: float | None
) -> None:
    losses, scales, parameters, num_updates = trained_alone(clip_norm)
    outcomes: Any = run_ranks(2, trained, schedule, pp, dp, sharding, clip_norm)
    for outcome in outcomes:
        assert outcome.code == 0, outcome.text
        found_losses, found_scales, found, found_updates = outcome.value
        assert found_scales == scales
        assert found_updates == num_updates
        if dp == 1:
            assert all(map(torch.equal, found_losses, losses))
            assert all(torch.equal(found[name], parameters[name]) for name in found)
        else:  # replicas add up gradients in another order
            torch.testing.assert_close(found_losses, losses, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found, {name: parameters[name] for name in found}, rtol=1e-3, atol=1e-3)
    assert {name for outcome in outcomes for name in outcome.value[2]} == parameters.keys()
