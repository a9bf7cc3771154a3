"""What torch is set to around a call of a pipeline, and would make its numbers wrong or no numbers at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock as ps
from penstock.runtime import RuntimeFailure

pytestmark = pytest.mark.unit


def made(name: str = "1f1b", **options: int) -> ps.Pipeline:
    torch.manual_seed(0)
    schedule = ps.build(name, 2, 4, **options)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(schedule.num_stages)))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return ps.Pipeline(layers, schedule, loss_fn=nn.MSELoss(), optimizer=sgd)


def under_fakes(pipe: ps.Pipeline, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        pipe.step(x, x)


CALLS: dict[str, Callable[[ps.Pipeline, Tensor], object]] = {
    "grad": lambda pipe, x: torch.func.grad(lambda z: pipe.step(z, x).loss)(x),
    "grad of something else": lambda pipe, x: torch.func.grad(lambda z: pipe.evaluate(x, x).loss + z.sum())(x),
    "vmap": lambda pipe, x: torch.func.vmap(lambda z: pipe.predict(z)[0])(x[None]),
    "jvp": lambda pipe, x: torch.func.jvp(lambda z: pipe.step(z, x).loss, (x,), (x,)),
    "no numbers": under_fakes,
}


@pytest.mark.parametrize("name", CALLS)
def test_bug_calls_within_transforms_and_modes_of_torch_ended_with_its_errors(name: str) -> None:
    said = "in which tensors are made as FakeTensor" if name == "no numbers" else "within a transform of torch.func"
    pipe, x = made(), torch.randn(8, 4)
    with pytest.raises(RuntimeFailure, match=said):
        CALLS[name](pipe, x)
    pipe.step(x, x)


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
