"""Case 7: state in an optimizer's attributes, or in optimizers within it, is saved, or refused when saving."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

import penstock as ps
from lookahead_runs import Lookahead as ByPosition
from penstock.runtime import RuntimeFailure
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


class Lookahead(torch.optim.AdamW):
    """A count of steps, and slow weights by parameter."""

    def __init__(self, params: Parameters, by_id: bool = False) -> None:
        params = list(params)
        super().__init__(params, lr=0.05)
        self.num_steps, self.by_id = 0, by_id
        self.slow: dict[Any, Tensor] = {}
        self.params_by_size = sorted(params, key=lambda p: p.numel())

    def step(self, closure: Any = None) -> None:
        for p in self.params_by_size:
            self.slow.setdefault(id(p) if self.by_id else p, p.detach().clone())
        super().step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for p in self.params_by_size:
                slow = self.slow[id(p) if self.by_id else p]
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)


class Counted(Optimizer):
    """Numbers, a tensor, an array and a list in attributes."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.05})
        self.t, self.scale = 0, torch.ones(())
        self.table, self.recent = np.ones(3), [1.0]
        self.log, self.rule, self.device = logging.getLogger("x"), partial(max, 1), torch.device("cpu")

    def step(self, closure: Any = None) -> None:
        self.t += 1
        self.scale.mul_(0.9)
        self.table = self.table * 0.95
        self.recent.append(float(self.scale))
        rate = 0.05 * float(self.scale) * self.table[0] * sum(self.recent) / self.t
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-rate)


KINDS: dict[str, Callable[[Parameters], Optimizer]] = {
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


class Remembering(Counted):
    """Has a dict that is empty at first."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.seen: dict[str, int] = {}

    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen["steps"] = self.t


@pytest.mark.parametrize("by_hand", [False, True])
def test_bug_a_dict_that_was_empty_at_first_stayed_as_it_was_in_a_load(by_hand: bool, tmp_path: Path) -> None:
    new, pipe, after = (pipeline(Remembering, num_stages) for num_stages in (2, 2, 3))
    train(pipe, range(3))
    for before, seen in ((pipe, {"steps": 3}), (new, {})):
        if by_hand:
            before.hand_over(after)
        else:
            before.save(tmp_path / str(len(seen)))
            after.load(tmp_path / str(len(seen)))
        assert cast(Remembering, after.optimizer).seen == seen


def test_an_optimizer_over_the_model_has_its_inner_ones_stepped() -> None:
    net, plain = model(), model()
    optimizer, beside = Both(list(net.parameters())), Both(list(plain.parameters()))
    pipe = ps.Pipeline(net, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), optimizer=optimizer)
    for step in range(2):
        train(pipe, range(step, step + 1))
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(4):
            (nn.MSELoss()(plain(part), part.sum(1, keepdim=True)) / 4).backward()
        beside.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_optimizers_within_one_that_get_other_parameters_are_refused() -> None:
    """Updates as ops step masters, which only the groups of the optimizer itself would have."""
    net = model()
    with pytest.raises(RuntimeFailure, match=r"Nested\.muon is an optimizer with other parameters"):
        ps.Pipeline(
            net, ps.build("pipedream", 2, 4, window=1), loss_fn=nn.MSELoss(), optimizer=Nested(net.parameters())
        )


class Nested(torch.optim.AdamW):
    """Has an optimizer with groups of its own."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.muon = torch.optim.SGD(params, lr=0.1)


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
        (Paired, r"attribute pairs of Paired holds tensors beside parameters.*in the state of a parameter"),
        (Learned, r"attribute net of Learned"),
        (Both, r"Both holds another optimizer \(muon\).* one optimizer with a group for each"),
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
    with pytest.raises(CheckpointError, match=r"Masters holds another optimizer \(inner\)"):
        pipe.save(tmp_path)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_list_of_tensors_by_position_trains_in_one_process(schedule: str) -> None:
    """Only a process that steps a part of the parameters refuses it: tests/multiproc/field/test_case_25."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = ByPosition(model.parameters())
    with ps.Pipeline(model, ps.build(schedule, 2, 2), loss_fn=nn.MSELoss(), optimizer=optimizer) as pipe:
        before = model[0].weight.detach().clone()
        pipe.step(torch.ones(4, WIDTH), torch.zeros(4, WIDTH))
        assert not torch.equal(before, model[0].weight)
