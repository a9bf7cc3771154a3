"""Activations that wait in host memory, on a GPU: the same gradients, and less memory held there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from offload_programs import offloaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

WIDTH, NUM_SAMPLES, DEPTH = 512, 4096, 6


def stages() -> list[nn.Module]:
    torch.manual_seed(5)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))]
    return [nn.Sequential(*layers)]


def test_gradients_are_the_same_and_less_is_held() -> None:
    """Of eight microbatches all but one are in pinned host memory when the backwards begin."""
    built = ps.build("gpipe", 1, 8)
    found = []
    for schedule in (built, offloaded(built)):
        model = stages()
        pipe = ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), parallel=ps.ParallelOptions(device="cuda"))
        torch.manual_seed(6)
        x, y = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH)
        pipe.step(x, y, update=False)
        pipe.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss = pipe.step(x, y, update=False).loss
        grads = [p.grad.cpu() for p in model[0].parameters() if p.grad is not None]
        found.append((loss.cpu(), grads, torch.cuda.max_memory_allocated(), pipe.host_memory()[0]))
    (loss, grads, most, none), (moved, again, less, host) = found
    assert torch.equal(loss, moved)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert none == 0
    assert host > 0
    assert less < most - host / 2


def test_a_running_pipeline_that_begins_to_offload_holds_less_on_the_device() -> None:
    """What a decision with host memory does: the schedule changes between two steps, and back."""
    built = ps.build("gpipe", 1, 8)
    pipe = ps.Pipeline(stages(), built, loss_fn=nn.MSELoss(), parallel=ps.ParallelOptions(device="cuda"))
    torch.manual_seed(6)
    x, y = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, WIDTH)
    found = []
    for schedule in (built, built, offloaded(built), offloaded(built), built):
        pipe.reconfigure(ps.control.Configuration(schedule, "frozen", (), (8.0,)))  # type: ignore[arg-type]
        torch.cuda.reset_peak_memory_stats()
        pipe.step(x, y, update=False)
        pipe.zero_grad()
        found.append((torch.cuda.max_memory_allocated(), pipe.host_memory()[0]))
    (_, none), (most, _), _, (less, host), (again, nothing) = found
    assert none == nothing == 0
    assert host > 0
    assert less < most - host / 2
    assert again > less
