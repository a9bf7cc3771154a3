"""Case 8: groups made by any function train, save and load under every sharding, and so do no-decay groups by shape.

Beside it the processes' side of case 6 (groups in another order), of case 7 (attributes, alike and apart) and of
case 15 (one process alone finds that a gradient is not finite).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter
from torch.optim import Adagrad, AdamW, Optimizer

import penstock as ps
from penstock.runtime.tensors.dtensor import local, whole
from processes import run_ranks
from tiers import chosen
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

WIDTH = 6
SHARDINGS = ("none", "copies", "zero1", "fsdp")
Parameters = list[Parameter]


def groups_of(params: Parameters, *kinds: Callable[[Parameter], bool], keep_empty: bool = False) -> list[Any]:
    """A group for each kind, with another weight decay; the empty ones are dropped."""
    found = [[p for p in params if kind(p)] for kind in kinds]
    return [{"params": part, "weight_decay": 0.3 / (k + 1)} for k, part in enumerate(found) if part or keep_empty]


class Slowing(AdamW):
    """Counts its steps, and goes by their number."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(groups_of(params, lambda p: p.ndim > 1, lambda p: p.ndim < 2), lr=0.02)
        self.num_steps, self.rank = 0, dist.get_rank() if dist.is_initialized() else 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + self.num_steps)
        super().step()


class Averaging(AdamW):
    """Draws each parameter to an average of its own, in a dict by parameter."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, lr=0.02)
        self.average: dict[Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            average = self.average.setdefault(p, p.detach().clone())
            average.lerp_(p.detach(), 0.3)
            p.lerp_(average, 0.5)


FUNCTIONS: dict[str, Callable[[Parameters], Optimizer]] = {
    "one group": partial(AdamW, lr=0.02),
    "each by itself": lambda params: AdamW([{"params": [p], "weight_decay": 0.1 * p.ndim} for p in params], lr=0.02),
    "by ndim": lambda params: AdamW(groups_of(params, lambda p: p.ndim > 1, lambda p: p.ndim < 2), lr=0.02),
    "empty kept": lambda params: AdamW(
        groups_of(params, lambda p: p.ndim > 1, lambda p: p.ndim < 2, lambda p: p.ndim > 7, keep_empty=True), lr=0.02
    ),
    "by shape": lambda params: AdamW(groups_of(params, lambda p: p.shape[0] == 1, lambda p: p.shape[0] > 1), lr=0.02),
    "by size": lambda params: AdamW(groups_of(params, lambda p: p.numel() > 6, lambda p: p.numel() <= 6), lr=0.02),
    "in reverse": lambda params: AdamW([{"params": [p], "lr": 0.01} for p in reversed(params)], lr=0.02),
    "first and rest": lambda params: AdamW(
        [{"params": params[:1], "lr": 0.03}, *([{"params": params[1:]}] if params[1:] else [])], lr=0.02
    ),
    "state at once": lambda params: Adagrad(groups_of(params, lambda p: p.ndim > 1, lambda p: p.ndim < 2), lr=0.02),
    "steps counted": Slowing,
    "state by parameter": Averaging,
}
BY_DAY = ["each by itself", "by ndim", "steps counted", "state by parameter"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, 1)
    )


def pipeline(make: Any, sharding: str, pp: int, dp: int, **options: Any) -> ps.Pipeline:
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    parallel = ps.ParallelOptions(sharding=sharding)
    order = ps.build("1f1b", pp, 4 // dp)
    return ps.Pipeline(
        model(),
        order,
        loss_fn=nn.MSELoss(),
        optimizer=make,
        mesh=mesh,
        timeout=PATIENCE,
        parallel=parallel,
        **options,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def train(pipe: ps.Pipeline, steps: range) -> None:
    for step in steps:
        pipe.step(*batch(step))


def values(pipe: ps.Pipeline) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in pipe.named_parameters()}


def shared_folder() -> str:
    name: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return str(name[0])


def trained_and_resumed(rank: int, pp: int, dp: int, names: list[str], shardings: tuple[str, ...]) -> Any:
    """By function and sharding: the weights of a run, whether a resumed run has them, and who has which names."""
    found = {}
    for name in names:
        for sharding in shardings:
            make = FUNCTIONS[name]
            with pipeline(make, sharding, pp, dp) as pipe, pipeline(make, sharding, pp, dp) as after:
                train(pipe, range(2))
                after.load(pipe.save(shared_folder()))
                train(pipe, range(2, 4))
                train(after, range(2, 4))
                one, other = values(pipe), values(after)
                assert all(torch.equal(one[key], other[key]) for key in one), (name, sharding)
                found[name, sharding] = one
    return found


def alone(name: str) -> dict[str, Tensor]:
    net = model()
    optimizer = FUNCTIONS[name](list(net.parameters()))
    for step in range(4):
        x, y = batch(step)
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.MSELoss()(net(part), target) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.nightly)])
def test_groups_of_any_function_train_and_resume_under_every_sharding(pp: int, dp: int) -> None:
    names = list(chosen(FUNCTIONS, BY_DAY))
    outcomes = run_ranks(pp * dp, trained_and_resumed, pp, dp, names, SHARDINGS)
    for outcome in outcomes:
        assert outcome.code == 0, outcome.text
    for name in names:
        # "first and rest" goes by what a process holds: over two stages, there are two first ones.
        want = None if name == "first and rest" and pp > 1 else alone(name)
        for outcome in outcomes:
            for sharding in SHARDINGS:
                for key, value in outcome.value[name, sharding].items():
                    assert want is None or torch.allclose(value, want[key], atol=1e-5), (name, sharding, key)


class Apart(Slowing):
    """An attribute that differs between processes."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen = dist.get_rank()


def by_ndim(params: Parameters, *, is_swapped: bool = False) -> Optimizer:
    groups = groups_of(params, lambda p: p.ndim > 1, lambda p: p.ndim < 2)
    return AdamW(groups[::-1] if is_swapped else groups, lr=0.02)


def several(rank: int) -> Any:
    """What else two processes do."""
    found: dict[str, Any] = {}
    folder = shared_folder()
    with pipeline(by_ndim, "zero1", 1, 2) as pipe:
        train(pipe, range(2))
        pipe.save(folder)
        train(pipe, range(2, 4))
        want = values(pipe)
    for sharding, pp, dp in (("zero1", 2, 1), ("fsdp", 1, 2), ("none", 1, 2)):
        with pipeline(partial(by_ndim, is_swapped=True), sharding, pp, dp) as pipe:
            pipe.load(folder)
            train(pipe, range(2, 4))
            found[f"swapped {sharding}"] = all(
                torch.allclose(value, want[key], atol=1e-5) for key, value in values(pipe).items()
            )
    with pipeline(Apart, "none", 2, 1) as pipe:
        train(pipe, range(1))
        folder = shared_folder()
        pipe.save(folder)
        pipe.optimizer.seen = 7
        pipe.load(folder)
        found["apart"] = pipe.optimizer.seen
    with pipeline(by_ndim, "none", 2, 1, precision=ps.PrecisionOptions(skip_not_finite=True)) as pipe:
        before = values(pipe)
        pipe.step(*batch(0), update=False)
        if rank == 1:
            local(next(p.grad for p in pipe.parameters() if p.grad is not None)).view(-1)[0] = float("inf")
        pipe.update()
        same = all(torch.equal(before[key], value) for key, value in values(pipe).items())
        found["left out"] = (same, pipe.num_updates, pipe.step(*batch(1)).skipped, pipe.num_updates)
    x, y = batch(0)
    y[0] = float("nan")  # one replica alone has it
    for sharding in SHARDINGS:
        with pipeline(by_ndim, sharding, 1, 2, precision=ps.PrecisionOptions(None, 1.0, None, True)) as pipe:
            before = values(pipe)
            is_skipped = pipe.step(x, y).skipped
            same = all(torch.equal(before[key], value) for key, value in values(pipe).items())
            found[f"left out {sharding}"] = (is_skipped, same, pipe.step(*batch(1)).skipped, pipe.num_updates)
    return found


@pytest.mark.slow
def test_groups_in_another_order_attributes_that_differ_and_steps_left_out_by_one() -> None:
    outcomes = run_ranks(2, several)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, outcome.text
        found = outcome.value
        assert all(found[f"swapped {sharding}"] for sharding in ("zero1", "fsdp", "none"))
        assert found["apart"] == rank
        assert found["left out"] == (True, 0, False, 1)
        assert all(found[f"left out {sharding}"] == (True, True, False, 1) for sharding in SHARDINGS)
