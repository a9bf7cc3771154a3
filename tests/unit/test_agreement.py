"""What of a parameter's changes between two steps is seen in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime import RuntimeFailure
from penstock.runtime.parameters.agreement import SAMPLED, Samples

LAID_OUT: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.zeros(30, 40).t(),
    "channels last": lambda: torch.zeros(8, 6, 5, 5).to(memory_format=torch.channels_last),
    "part of another": lambda: torch.zeros(30, 80)[:, ::2],
    "a column": lambda: torch.zeros(80, 9)[:, 3],
    "a cube": lambda: torch.zeros(4, 4, 8)[..., ::2],
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_bug_changes_through_data_of_a_parameter_that_is_not_contiguous_were_not_seen(name: str) -> None:
    parameter = nn.Parameter(LAID_OUT[name]())
    samples = Samples([nn.Parameter(torch.zeros(3)), parameter])
    assert samples.changed() == []
    parameter.data.add_(1)
    assert samples.changed() == [1]
    samples.note()
    assert samples.changed() == []


def looked_at(values: Tensor) -> int:
    """How many different numbers of a tensor would show a change."""
    values.copy_(torch.arange(values.numel()).view(values.shape))
    samples = Samples([values])
    return len({number for _, views in samples._views for view in views for number in view.flatten().tolist()})


@pytest.mark.parametrize("name", LAID_OUT)
def test_up_to_the_bound_numbers_of_a_tensor_are_looked_at_spread_over_all_of_it(name: str) -> None:
    assert SAMPLED / 4 < looked_at(LAID_OUT[name]()) <= SAMPLED


def test_all_numbers_of_a_tensor_with_no_more_than_the_bound_are_looked_at() -> None:
    for few in (torch.zeros(8, 9).t()[:8], torch.zeros(3, 40)[:, ::2], torch.zeros(4, 4, 8)[..., ::2]):
        assert looked_at(few) == few.numel()


def amdp() -> ps.Pipeline:
    """Two pipelines in one process."""
    torch.manual_seed(0)
    schedule = ps.build("amdp", 4, 8, window=4)
    layers = [nn.Linear(4, 4) for _ in range(schedule.num_stages)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return ps.Pipeline(nn.Sequential(*layers), schedule, loss_fn=nn.MSELoss(), optimizer=optimizer)


def test_bug_clearing_the_gradients_of_an_open_window_left_those_of_all_pipelines_but_one() -> None:
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    found = []
    for clear in (ps.Pipeline.zero_grad, lambda pipe: nn.ParameterList(pipe.parameters()).zero_grad()):
        pipe = amdp()
        pipe.step(x, y, update=False)
        clear(pipe)
        pipe.step(x, y)
        found.append([parameter.detach().clone() for parameter in pipe.parameters()])
    assert all(map(torch.equal, *found))


def test_bug_gradients_of_an_open_window_that_were_changed_were_those_of_one_pipeline() -> None:
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    pipe = amdp()
    pipe.step(x, y, update=False)
    torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.1)
    with pytest.raises(
        RuntimeFailure, match=r"0\.weight of stage 0 was changed while a window was open, and each of 2"
    ):
        pipe.step(x, y)
    pipe.zero_grad()
    pipe.step(x, y)
