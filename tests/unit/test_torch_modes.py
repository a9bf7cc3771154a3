"""What torch is set to around a call of a pipeline, and would make its numbers wrong or no numbers at all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import RuntimeFailure

pytestmark = pytest.mark.unit


def made(name: str = "1f1b", **options: int) -> ps.Pipeline:
    torch.manual_seed(0)
    schedule = ps.build(name, 2, 4, **options)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(schedule.num_stages)))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return ps.Pipeline(layers, schedule, loss_fn=nn.MSELoss(), optimizer=sgd)


@pytest.mark.parametrize("name", ["step", "evaluate", "predict"])
def test_bug_steps_under_autocast_computed_with_casts_from_before_an_update(name: str) -> None:
    """Where updates are ops. Elsewhere nothing was wrong but the order of sums of tied weights."""
    pipe, x = made("pipedream", window=1), torch.randn(8, 4)
    said = rf"^{name}\(\) was called under torch.autocast, .*ps.PrecisionOptions\(autocast=torch.bfloat16\)"
    with pytest.raises(RuntimeFailure, match=said), torch.autocast("cpu", torch.bfloat16):
        getattr(pipe, name)(*((x,) if name == "predict" else (x, x)))
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        pipe.step(x, x)


@pytest.mark.slow
def test_bug_a_function_that_was_compiled_could_not_call_a_step() -> None:
    x = torch.randn(8, 4)
    compiled, plain = made(), made()
    loss = torch.compile(lambda x: compiled.step(x, x).loss, backend="eager")(x)
    assert torch.equal(loss, plain.step(x, x).loss)
