"""Pipelines over meshes of processes, set against the same model in one process.

for pp, dp, tp in splits(8): ...        every mesh of eight processes
numbers = over_mesh((2, 2, 1), case)    loss and whole gradients, in each of the four processes
numbers = in_one_process(case)          of the same batch in as many microbatches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.runtime.shards import whole

Split = tuple[int, int, int]
"""(pp, dp, tp)."""


def splits(num_processes: int) -> Iterator[Split]:
    """Every (pp, dp, tp) of that product."""
    for pp in range(1, num_processes + 1):
        for dp in range(1, num_processes // pp + 1):
            if num_processes % (pp * dp) == 0:
                yield pp, dp, num_processes // (pp * dp)


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        stages: makes the stages of a pipeline of so many.
        schedule: its name; built for a pipeline's ranks and microbatches of each replica.
        microbatches: of the whole batch.
    """

    stages: Callable[[int], list[Any]]
    batch: tuple[Any, Any]
    loss_fn: Callable[..., Tensor]
    schedule: str = "1f1b"
    microbatches: int = 8
    steps: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Numbers:
    """Losses of the steps, and after the last one whole gradients and parameters by name, and the norm."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    norm: float | None


def trained(pipe: ps.Pipeline, case: Case) -> Numbers:
    losses, norm = [], None
    for _ in range(case.steps):
        result = pipe.step(*case.batch, update=False)
        losses.append(result.loss)
        gradients = {n: whole(p.grad).clone() for n, p in pipe.named_parameters() if p.grad is not None}
        found = pipe.update()
        norm = None if found is None else float(found)
    parameters = {n: whole(p.detach()).clone() for n, p in pipe.named_parameters()}
    return Numbers(losses, gradients, parameters, norm)


def over_mesh(split: Split, case: Case) -> Numbers:
    """In each process its own pipeline's stages; parameters of others are other ranks'."""
    pp, dp, _ = split
    mesh = init_device_mesh("cpu", split, mesh_dim_names=("pp", "dp", "tp"))
    schedule = ps.build(case.schedule, pp, case.microbatches // dp)
    pipe = ps.Pipeline(
        case.stages(schedule.num_stages),
        schedule,
        loss_fn=case.loss_fn,
        optimizer=case.optimizer,
        mesh=mesh,
        **case.options,
    )
    try:
        return trained(pipe, case)
    finally:
        pipe.close()


def in_one_process(case: Case, num_stages: int = 1) -> Numbers:
    """The whole batch through a plain order in this process."""
    schedule = ps.build("gpipe", num_stages, case.microbatches)
    options = {name: value for name, value in case.options.items() if name not in ("sharding", "parallelize")}
    pipe = ps.Pipeline(
        case.stages(num_stages), schedule, loss_fn=case.loss_fn, optimizer=case.optimizer, mesh=None, **options
    )
    return trained(pipe, case)


class Scaled(nn.Module):
    """Has a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def linear_case(**options: Any) -> Case:
    """A small network of linears, with dropout, learned scales and a ragged last microbatch."""

    def stages(num: int) -> list[nn.Module]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Scaled(), nn.Dropout(0.3)) for _ in range(8)]
        layers[-1] = nn.Sequential(nn.Linear(6, 1))
        size = 8 // num
        return [nn.Sequential(*layers[k * size : (k + 1) * size]) for k in range(num)]

    torch.manual_seed(1)
    batch = torch.randn(23, 6), torch.randn(23, 1)
    return Case(stages, batch, nn.MSELoss(), options=options)
