"""What the passes make of a schedule trains as the plain loop does, to the last bit."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import penstock as ps
from penstock.passes import merge_gradients, recompute, retime, separate_gradients
from penstock.runtime.stage.recompute import dropping_activations
from runtime_cases import CASES, compare

pytestmark = pytest.mark.unit

LATE = ps.Links({(0, 1): 3.0})


def passed(name: str, num_ranks: int) -> list[ps.Schedule]:
    """The schedule separated, merged and retimed for a late link; and with less memory, then separated."""
    schedule = ps.build(name, num_ranks, 4)
    costs = ps.Costs.uniform(schedule.num_stages)
    separated = separate_gradients(schedule, costs, LATE)
    merged = merge_gradients(retime(separated, costs, LATE), costs)
    limit = 0.7 * max(ps.simulate(schedule, costs).peak_activations)
    lighter = recompute(schedule, costs, limit)
    return [separated, merged, separate_gradients(lighter, costs, LATE, memory_limit=limit)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "case",
    ["dropout_and_a_ragged_last_microbatch", "batch_norm", "convolutions", "one_layer_several_times_in_a_sequential"],
)
def test_as_the_plain_loop(case: str) -> None:
    assert case in CASES
    found, kinds = [], ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, num_ranks in (("1f1b", 3), ("gpipe", 2), ("interleaved-1f1b", 2)):
            for schedule in passed(name, num_ranks):
                kinds += "".join(op.kind for row in schedule.order for op in row)
                for dispatch in ("frozen", "dynamic"):
                    differing = compare(case, schedule, dispatch, True)
                    found += [f"{name} {dispatch}: {text}\n{schedule}" for text in differing]
    assert set(kinds) == set("FBIWR")
    assert not found, "\n".join(found)


class Force(torch.nn.Module):
    """Adds the gradient of an energy by its input, as models of molecules do."""

    def __init__(self, creates_graph: bool) -> None:
        super().__init__()
        self.energy = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        self.creates_graph = creates_graph

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.creates_graph)
        return x + force


@pytest.mark.parametrize("creates_graph", [False, True])
def test_a_forward_that_asks_for_a_gradient_of_its_own_is_recomputed(creates_graph: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Force(creates_graph) for _ in range(4)))
    plain, x, y = copy.deepcopy(model), torch.randn(8, 6), torch.randn(8, 6)
    schedule = ps.build("1f1b", 2, 4)
    costs = ps.Costs.uniform(schedule.num_stages)
    lighter = recompute(schedule, costs, 0.7 * max(ps.simulate(schedule, costs).peak_activations))
    assert any(op.kind == "R" for row in lighter.order for op in row)
    with ps.Pipeline(model, lighter, loss_fn=torch.nn.MSELoss()) as pipe:
        result = pipe.step(x, y, update=False)
    losses = []
    for x_m, y_m in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = torch.nn.MSELoss()(plain(x_m), y_m) / 4
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(result.losses, torch.stack(losses))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_a_gradient_through_a_forward_whose_activations_were_dropped_is_refused() -> None:
    layer = torch.nn.Linear(6, 6)
    with dropping_activations():
        loss = layer(torch.randn(2, 6)).tanh().sum()
    with pytest.raises(ps.RuntimeFailure, match="after that forward had ended"):
        torch.autograd.grad(loss, layer.weight)
