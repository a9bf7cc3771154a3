"""Case 7: state in an optimizer's attributes, or in optimizers within it, is saved, or refused when saving."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

import penstock as ps
from lookahead_runs import Lookahead as ByPosition
from penstock.runtime.checkpoint import CheckpointError

WIDTH = 6
Parameters = list[Parameter]


class Both(Optimizer):
    """Muon and AdamW in attributes; the groups shown are theirs."""

    def __init__(self, params: Parameters) -> None:
        params = list(params)
        matrices = [p for p in params if p.ndim == 2]
        self.muon = torch.optim.Muon(matrices or [Parameter(torch.zeros(1, 1))], lr=0.02)
        self.adamw = torch.optim.AdamW([p for p in params if p.ndim < 2] or [Parameter(torch.zeros(1))], lr=0.01)
        super().__init__(params, {"lr": 0.01})
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.adamw.step()


class Shown(Both):
    """The same, with the state of both as its own and a state dict of both."""

    @property  # type: ignore[misc]
    def state(self) -> Any:
        return {**self.muon.state, **self.adamw.state}

    @state.setter
    def state(self, value: Any) -> None:
        pass

    def state_dict(self) -> Any:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}


class Container(Optimizer):
    """An optimizer for each part of a model, as trainers make them: a list, and a flat state dict."""

    def __init__(self, params: Parameters) -> None:
        params = list(params)
        self.optimizers = [torch.optim.AdamW([p], lr=0.01 * (1 + p.ndim)) for p in params]
        super().__init__(params, {"lr": 0.01})

    def __iter__(self) -> Any:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:
        for one in self:
            one.step()

    def state_dict(self) -> Any:
        return {f"{k}.{key}": value for k, one in enumerate(self) for key, value in one.state_dict().items()}


class Listed(Optimizer):
    """Optimizers in a list of pairs, with groups of their own."""

    def __init__(self, params: Parameters) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.01})
        half = len(params) // 2
        self.parts = [
            ("first", torch.optim.Adam(params[:half], lr=0.01)),
            ("second", torch.optim.SGD(params[half:], lr=0.02, momentum=0.9)),
        ]
        self.by_name = {"none": None}

    def step(self, closure: Any = None) -> None:
        for _, part in self.parts:
            part.step()


class Lookahead(Optimizer):
    """An optimizer within another, a count of steps, and slow weights by parameter."""

    def __init__(self, params: Parameters, by_id: bool = False) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.05})
        self.inner, self.num_steps, self.by_id = torch.optim.AdamW(params, lr=0.05), 0, by_id
        self.slow: dict[Any, Tensor] = {}
        self.params_by_size = sorted(params, key=lambda p: p.numel())

    def step(self, closure: Any = None) -> None:
        for p in self.params_by_size:
            self.slow.setdefault(id(p) if self.by_id else p, p.detach().clone())
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for p in self.params_by_size:
                slow = self.slow[id(p) if self.by_id else p]
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)


class Phase(enum.Enum):
    WARM = 1


@dataclass
class Clock:
    """An object with numbers of its own."""

    now: int = 0
    seen: list[float] = field(default_factory=list)
    phase: Phase = Phase.WARM


class Counted(Optimizer):
    """Numbers, a tensor, an array, a queue and an object in attributes."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.05})
        self.t, self.scale = 0, torch.ones(())
        self.table, self.recent, self.clock = np.ones(3), deque([1.0], maxlen=3), Clock()
        self.log, self.rule, self.device = logging.getLogger("x"), partial(max, 1), torch.device("cpu")

    def step(self, closure: Any = None) -> None:
        self.t += 1
        self.scale.mul_(0.9)
        self.table = self.table * 0.95
        self.recent.append(float(self.scale))
        self.clock.now += 2
        self.clock.seen.append(self.clock.now / 10)
        rate = (
            0.05
            * float(self.scale)
            * self.table[0]
            * sum(self.recent)
            / (self.t + self.clock.now + sum(self.clock.seen))
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-rate)


KINDS: dict[str, Callable[[Parameters], Optimizer]] = {
    "both": Both,
    "shown": Shown,
    "container": Container,
    "listed": Listed,
    "lookahead": Lookahead,
    "lookahead by id": partial(Lookahead, by_id=True),
    "counted": Counted,
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 1))


def pipeline(optimizer: Any, num_stages: int = 2) -> ps.Pipeline:
    return ps.Pipeline(model(), ps.build("1f1b", num_stages, 4), loss_fn=nn.MSELoss(), optimizer=optimizer)


def train(pipe: ps.Pipeline, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        pipe.step(x, x.sum(1, keepdim=True))


def equal(one: ps.Pipeline, other: ps.Pipeline) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(kind: str, by_hand: bool, tmp_path: Path) -> None:
    pipe, after = pipeline(KINDS[kind]), pipeline(KINDS[kind], 3)
    train(pipe, range(3))
    train(after, range(7, 9))  # what is there before a load must go
    if by_hand:
        pipe.hand_over(after)
    else:
        pipe.save(tmp_path)
        after.load(tmp_path)
    train(pipe, range(3, 6))
    train(after, range(3, 6))
    assert equal(pipe, after)


def test_an_optimizer_over_the_model_has_its_inner_ones_stepped(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        net = model()
        optimizer = Both(list(net.parameters()))
        found.append(ps.Pipeline(net, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), optimizer=optimizer))
    train(found[0], range(2))
    found[1].load(found[0].save(tmp_path))
    for pipe in found:
        train(pipe, range(2, 4))
    assert equal(*found)


class Noisy(Counted):
    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.source = torch.Generator()


class Paired(Counted):
    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.pairs = [(p, torch.zeros_like(p)) for p in self.param_groups[0]["params"]]


class Learned(Counted):
    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.net = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Noisy, r"attribute source of Noisy cannot be stored: .*Generator"),
        (Paired, r"attribute pairs of Paired holds tensors beside parameters.*stateful="),
        (Learned, r"attribute net of Learned"),
    ],
)
def test_what_cannot_be_stored_is_refused_when_saving(kind: Any, said: str, tmp_path: Path) -> None:
    pipe = pipeline(kind)
    train(pipe, range(1))
    with pytest.raises(CheckpointError, match=said):
        pipe.save(tmp_path)


class Masters(Optimizer):
    """Steps copies that it makes of its parameters."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.01})
        self.given = list(self.param_groups[0]["params"])
        self.param_groups[0]["params"] = [Parameter(p.detach().double()) for p in self.given]
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, master in zip(self.given, self.param_groups[0]["params"], strict=True):
            master.grad = None if p.grad is None else p.grad.double()
        self.inner.step()
        for p, master in zip(self.given, self.param_groups[0]["params"], strict=True):
            p.copy_(master)


def test_an_optimizer_that_steps_copies_trains_and_is_refused_when_saving(tmp_path: Path) -> None:
    pipe, plain = pipeline(Masters), pipeline(partial(torch.optim.AdamW, lr=0.01))
    train(pipe, range(3))
    train(plain, range(3))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(pipe.parameters(), plain.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"the optimizer holds a parameter .* that has no name"):
        pipe.save(tmp_path)


def test_an_optimizer_within_that_is_not_there_yet_is_refused(tmp_path: Path) -> None:
    class Late(Counted):
        def step(self, closure: Any = None) -> None:
            if not hasattr(self, "inner"):
                self.inner = torch.optim.AdamW(self.param_groups[0]["params"])
            self.inner.step()

    pipe = pipeline(Late)
    train(pipe, range(1))
    pipe.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds AdamW at inner of Late, this run has none.* at once"):
        pipeline(Late).load(tmp_path)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_list_of_tensors_by_position_trains_in_one_process(schedule: str) -> None:
    """Only a process that steps a part of the parameters refuses it: tests/multiproc/field/test_case_25."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = ByPosition(model.parameters())
    with ps.Pipeline(model, ps.build(schedule, 2, 2), loss_fn=nn.MSELoss(), optimizer=optimizer) as pipe:
        before = model[0].weight.detach().clone()
        pipe.step(torch.ones(4, WIDTH), torch.zeros(4, WIDTH))
        assert not torch.equal(before, model[0].weight)
