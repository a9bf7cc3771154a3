"""Case 4: a model in one stage has the plain model's names, so checkpoints of 1 to 4 stages load in all pairs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from tiers import others_nightly

WIDTH = 6


class Net(nn.Module):
    """A forward of its own, with a parameter and buffers beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.full((WIDTH,), 0.25))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.e(x) * self.scale + self.offset
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x) * self.mask)


class Tied(nn.Module):
    """Its head is defined first and used last, it has the weight of its first layer, and it counts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.first.weight
        self.calls = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = x + layer(x).tanh()
        return self.head(x).mean(1, keepdim=True)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Row(nn.Sequential):
    """A sequential with a forward of its own, which is traced where it has several stages."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def row(kind: Callable[..., nn.Module] = nn.Sequential) -> nn.Module:
    return kind(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.ReLU(), nn.Linear(WIDTH, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "module": Net,
    "sequential": row,
    "own sequential": lambda: row(Row),
    "tied": Tied,
}


def given(form: str, num_stages: int) -> Any:
    """A model as it is given to `ps.Pipeline`."""
    torch.manual_seed(3)
    model = MODELS.get(form, Net)()
    if form != "list":
        return model
    return [model] if num_stages == 1 else list(ps.split(model, num_stages))


def pipeline(form: str, num_stages: int, **options: Any) -> tuple[Any, ps.Pipeline]:
    model = given(form, num_stages)
    options = {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.01), **options}
    return model, ps.Pipeline(model, ps.build("1f1b", num_stages, 4), loss_fn=nn.MSELoss(), **options)


def train(pipe: ps.Pipeline, steps: range) -> list[float]:
    found = []
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        found.append(float(pipe.step(x, x.sum(1, keepdim=True)).loss))
    return found


@pytest.mark.parametrize("form", [*MODELS, "list"])
def test_one_stage_has_the_plain_names(form: str) -> None:
    model, pipe = pipeline(form, 1)
    plain = model[0] if form == "list" else model
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(mine is own for (_, mine), own in zip(pipe.named_parameters(), plain.parameters(), strict=True))


def test_a_function_makes_the_only_stage_with_plain_names() -> None:
    pipe = ps.Pipeline([Net], ps.build("1f1b", 1, 4), loss_fn=nn.MSELoss())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in Net().named_parameters()]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_module_that_is_one_layer_trains_as_it_does_in_a_plain_loop(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    pipe = ps.Pipeline(model, ps.build(schedule, 1, 4), loss_fn=nn.MSELoss())
    x = torch.randn(8, WIDTH)
    pipe.step(x, x.sum(1, keepdim=True), update=False)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    pipe.zero_grad()
    for part, target in zip(x.chunk(4), x.sum(1, keepdim=True).chunk(4), strict=True):
        (nn.MSELoss()(model(part), target) / 4).backward()
    assert [name for name, _ in pipe.named_parameters()] == ["weight", "bias"]
    assert all(torch.equal(mine, p.grad) for mine, p in zip(grads, model.parameters(), strict=True))


PAIRS = [(form, a, b) for form in [*MODELS, "list"] for a, b in product(range(1, 5), repeat=2)]
BY_DAY = [
    ("module", 1, 2),
    ("module", 3, 1),
    ("sequential", 1, 4),
    ("own sequential", 2, 1),
    ("tied", 1, 3),
    ("tied", 2, 1),
    ("list", 1, 3),
]


@pytest.mark.parametrize(("form", "saved", "loaded"), others_nightly(PAIRS, BY_DAY))
def test_a_checkpoint_goes_on_under_another_number_of_stages(
    form: str, saved: int, loaded: int, tmp_path: Path
) -> None:
    _, pipe = pipeline(form, saved)
    train(pipe, range(2))
    folder = pipe.save(tmp_path)
    model, after = pipeline(form, loaded)
    _, other = pipeline(form, loaded)
    if isinstance(model, Tied):
        model.calls = 7
    train(after, range(5, 6))
    after.load(folder)
    pipe.hand_over(other)
    want = train(pipe, range(2, 4))
    assert train(after, range(2, 4)) == train(other, range(2, 4)) == want
    if isinstance(model, Tied):
        assert model.calls == 3
