"""Optimizers with a tensor for each parameter, kept by position or by parameter, and what processes train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import penstock as ps
from penstock.runtime import RuntimeFailure


class Lookahead(Optimizer):
    """Draws each parameter to a slow one, of which it has a list."""

    def __init__(self, params: Any) -> None:
        self.base = SGD([*params], lr=0.1)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups
        self.slow: Any = self.kept([p for group in self.param_groups for p in group["params"]])

    def kept(self, params: Any) -> Any:
        return [p.detach().clone() for p in params]

    def pairs(self) -> Any:
        return zip((p for group in self.param_groups for p in group["params"]), self.slow, strict=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for p, slow in self.pairs():
            slow += 0.5 * (p - slow)
            p.copy_(slow)


class ByGroup(Lookahead):
    """Keeps the list in each group."""

    def kept(self, params: Any) -> Any:
        for group in self.param_groups:
            group["slow"] = [p.detach().clone() for p in group["params"]]


class ByParameter(Lookahead):
    """Keeps the slow tensors by parameter, and a list of the parameters themselves."""

    def kept(self, params: Any) -> Any:
        self.mine = list(params)
        return {p: p.detach().clone() for p in params}

    def pairs(self) -> Any:
        return ((p, self.slow[p]) for group in self.param_groups for p in group["params"])


def trained(process: int | None, given: Callable[[Any], Any], sharding: str | None, num_replicas: int) -> Any:
    """The sum of what this process trains, or the error. `given` makes an optimizer of a module."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2)))
    mesh = ps.runtime.device_mesh(ps.Mesh(2 // num_replicas, num_replicas, 1)) if num_replicas > 1 else None
    stages = 1 if num_replicas > 1 else 2
    parallel = ps.ParallelOptions(**({} if sharding is None else {"sharding": sharding}))
    try:
        with ps.Pipeline(
            model,
            ps.build("1f1b", stages, 2),
            loss_fn=nn.MSELoss(),
            optimizer=given(model),
            mesh=mesh,
            parallel=parallel,
        ) as pipe:
            for _ in range(3):
                pipe.step(torch.ones(4, 3), torch.zeros(4, 3))
            return {name: p.detach().tolist() for name, p in pipe.named_parameters()}
    except RuntimeFailure as error:
        return str(error)


def all_trained(process: int, cases: list[Any]) -> list[Any]:
    return [trained(process, *case) for case in cases]


def an_object(kind: type[Lookahead], model: nn.Module) -> Any:
    return kind(model.parameters())


def a_function(kind: type[Lookahead], model: nn.Module) -> Any:
    return kind
