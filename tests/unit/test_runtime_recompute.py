"""Forwards that are run again before their backward: the same loss, gradients and buffers, and less memory."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from backends import Backend, processes
from penstock.passes import recompute
from penstock.runtime.errors import RuntimeFailure
from plain_loop import differences, gradients, plain_step
from recomputed import with_recompute
from runtime_cases import CASES, compare
from tiers import chosen, in_turn

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS = [
    ("1f1b", 1, "frozen", False, 1),
    ("1f1b", 4, "dynamic", False, 1),
    ("1f1b", 3, "frozen", False, 2),
    ("zb-h1", 3, "frozen", True, 1),
    ("zb-v", 2, "dynamic", True, 2),
    ("interleaved-1f1b", 2, "frozen", False, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_as_the_plain_loop(name: str) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        number = list(CASES).index(name)
        for schedule, ranks, dispatch, defer, every in in_turn(RUNS, number, 2):
            built = with_recompute(ps.build(schedule, ranks, 4), every)
            found += [f"{schedule} {ranks} {dispatch} {every}: {d}" for d in compare(name, built, dispatch, defer)]
    assert not found, "\n".join(found)


BETWEEN = [("zb-v", "frozen", True, 1), ("1f1b", "dynamic", False, 2)]
SAMPLE = chosen(CASES, list(CASES)[::2])
"""Half of the cases run between processes by day; all run in one process."""


def run_cases(rank: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    return {
        f"{name}, {schedule}, {dispatch}": compare(
            name, with_recompute(ps.build(schedule, 2, 4), every), dispatch, defer
        )
        for number, name in enumerate(SAMPLE)
        for schedule, dispatch, defer, every in in_turn(BETWEEN, number)
    }


@pytest.mark.parametrize("backend", [processes(2)])
def test_forwards_run_again_from_messages_that_came_from_another_process(backend: Backend) -> None:
    assert not backend.wrong(run_cases)


class Counting(nn.Module):
    """Its buffers change with every forward, and its output depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) * self.mask + self.last * (1 + self.seen)
        self.seen += 1
        self.last = out.detach().mean(0)
        return out


class Scaling(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5)


def normalised() -> list[nn.Module]:
    """Stages that draw, change buffers, and change their input in place."""
    return [
        nn.Sequential(Scaling(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
        nn.Sequential(Scaling(), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
        nn.Sequential(Counting(), nn.Dropout(0.3), nn.Linear(4, 4)),
    ]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_buffers_change_once_and_draws_are_drawn_again(name: str, dispatch: str) -> None:
    torch.manual_seed(1)
    plain = normalised()
    torch.manual_seed(1)
    piped = normalised()
    schedule = with_recompute(ps.build(name, 3, 4))
    pipe = ps.Pipeline(piped, schedule, loss_fn=nn.MSELoss(), dispatch=dispatch)
    for step in (1, 2):
        x, y = torch.randn(12, 4), torch.randn(12, 4)
        want = plain_step(plain, x.clone(), y, 4, nn.MSELoss(), step=step)
        assert torch.equal(want, pipe.step(x.clone(), y, update=False).loss)
    assert not differences(gradients(plain), gradients(piped))
    want_buffers, buffers = dict(nn.ModuleList(plain).named_buffers()), dict(nn.ModuleList(piped).named_buffers())
    assert set(want_buffers) == set(buffers)
    assert len(buffers) == 9
    assert all(torch.equal(want_buffers[place], buffer) for place, buffer in buffers.items())


DEPTH = 3


class Watched(nn.Module):
    """Counts how many of its intermediate results are alive at once; each `sin` keeps one until its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(DEPTH))
        self.kept: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            inner = layer(x)
            self.kept.add(inner)
            self.peak = max(self.peak, len(self.kept))
            x = inner.sin()
            del inner
        return x


@pytest.mark.parametrize(("name", "limit"), [("gpipe", 3), ("1f1b", 2), ("zb-h1", 2)])
def test_no_more_is_held_than_the_limit(name: str, limit: int) -> None:
    schedule = ps.build(name, 3, 6)
    costs = ps.Costs.uniform(3, freed_by_input=1.0)
    lighter = recompute(schedule, costs, limit)
    stages = [Watched() for _ in range(3)]
    pipe = ps.Pipeline(stages, lighter, loss_fn=nn.MSELoss())
    x = torch.randn(6, 4)
    gc.disable()  # nothing may hang on a cycle
    try:
        pipe.step(x, x)
        # While a forward runs that keeps nothing, one intermediate result is there besides what is kept.
        assert DEPTH < max(stage.peak for stage in stages) <= DEPTH * limit + 1
        assert sum(len(stage.kept) for stage in stages) == 0
    finally:
        gc.enable()
    assert max(ps.simulate(lighter, costs).peak_activations) <= limit
    assert max(ps.simulate(schedule, costs).peak_activations) > limit


class Force(nn.Module):
    """Adds the gradient of an energy by its input, as models of molecules do."""

    def __init__(self, creates_graph: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.creates_graph = creates_graph

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.creates_graph)
        return x + force


@pytest.mark.parametrize("creates_graph", [False, True])
def test_a_forward_that_asks_for_a_gradient_of_its_own(creates_graph: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Force(creates_graph) for _ in range(4)))
    plain, x, y = copy.deepcopy(model), torch.randn(8, 6), torch.randn(8, 6)
    with ps.Pipeline(model, with_recompute(ps.build("1f1b", 2, 4)), loss_fn=nn.MSELoss()) as pipe:
        result = pipe.step(x, y, update=False)
    losses = []
    for x_m, y_m in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = nn.MSELoss()(plain(x_m), y_m) / 4
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(result.losses, torch.stack(losses))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_buffers_are_as_they_were_where_a_forward_asks_for_a_gradient_of_its_own() -> None:
    class Counted(nn.Module):
        """Changes a buffer in place, and another one by replacing it, before it asks for a gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.5 * self.mean + x.detach().mean(0)
            (force,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
            return x + force * self.mean / self.calls

    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), Counted()]
    plain = copy.deepcopy(stages)
    pipe = ps.Pipeline(stages, with_recompute(ps.build("1f1b", 2, 4)), loss_fn=nn.MSELoss())
    for step in (1, 2):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        want = plain_step(plain, x, y, 4, nn.MSELoss(), step=step)
        assert torch.equal(want, pipe.step(x, y, update=False).loss)
    assert not differences(gradients(plain), gradients(stages))
    assert all(map(torch.equal, plain[1].buffers(), stages[1].buffers()))
    assert stages[1].calls == 8


class ChangingLater(nn.Module):
    """Its buffer changes in place in one microbatch only, and not the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            self.level += 1
        return x * (1 + self.level)


def test_a_buffer_that_changes_unforeseen_is_refused() -> None:
    pipe = ps.Pipeline(
        [nn.Sequential(ChangingLater(), nn.Linear(2, 2))],
        with_recompute(ps.build("gpipe", 1, 2)),
        loss_fn=nn.MSELoss(),
    )
    x = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    with pytest.raises(RuntimeFailure, match="'level' of ChangingLater changed in a forward and in none before"):
        pipe.step(x, x)
