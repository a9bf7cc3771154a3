"""Parameters and buffers of every kind that replicas, pipelines and ties hold: complex, empty, frozen, strided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.runtime.tensors.dtensor import whole
from processes import run_ranks_to_end

pytestmark = pytest.mark.multiproc

WIDTH, NUM = 6, 4
SHARDINGS = ("none", "zero1", "fsdp")


class Odd(nn.Module):
    """A layer with one of each."""

    mask: Tensor
    count: Tensor
    table: Tensor

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH)) if weight is None else weight
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.still = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.precise = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight + self.still + self.table) * self.scale
        x = x @ self.turned / self.count + self.nothing.sum() + self.precise.float()
        return (torch.complex(x, -x) * self.turn).imag * self.mask


def model(by_name: bool) -> list[nn.Module]:
    """Four stages of which the first and the last share a weight: the object, or one to be made one by its name."""
    torch.manual_seed(0)
    first = Odd()
    last = Odd() if by_name else Odd(first.weight)
    return [first, Odd(), Odd(), last]


def trained(name: str, ranks: int, split: tuple[int, int] | None, sharding: str, by_name: bool) -> list[Any]:
    """Losses and parameters after two updates, the second of two steps; between processes where there is a split."""
    stages = model(by_name)
    if split is not None:
        rank, replica = torch.distributed.get_rank(), torch.distributed.get_rank() % split[1]
        # Everyone is to begin with the values of those who own a stage: the first replica, and the first pipeline's.
        own = {id(p) for p in stages[rank].parameters()} if split[1] == 1 else set()
        with torch.no_grad():
            for parameter in {p for stage in stages for p in stage.parameters()}:
                if replica or (split[1] == 1 and id(parameter) not in own):
                    parameter.mul_(2)
    mesh = None if split is None else init_device_mesh("cpu", split, mesh_dim_names=("pp", "dp"))
    pipe = ps.Pipeline(
        stages,
        ps.build(name, ranks, NUM if split is None else NUM // split[1]),
        loss_fn=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        mesh=mesh,
        parallel=ps.ParallelOptions(sharding=sharding, tied=[("0.weight", "3.weight")] if by_name else []),
    )
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = [pipe.step(x, x.roll(1, 1), update=step != 1).loss for step in range(3)]
    found = {n: whole(p).detach().clone() for n, p in pipe.named_parameters()}
    pipe.close()
    return [torch.stack(losses), found]


CASES = [
    *[("interleaved-1f1b", 2, (2, 2), sharding, by_name) for sharding in SHARDINGS for by_name in (False, True)],
    *[("chimera", 4, (4, 1), sharding, by_name) for sharding in ("none", "copies") for by_name in (False, True)],
]


def run_cases(rank: int) -> list[list[Any]]:
    return [trained(*case) for case in CASES]


@pytest.mark.slow
def test_every_kind_of_parameter_over_replicas_and_pipelines() -> None:
    outcomes = run_ranks_to_end(4, run_cases)
    for number, (name, ranks, split, sharding, by_name) in enumerate(CASES):
        alone, kept = trained(name, ranks, None, sharding, by_name)
        exact = split[1] == 1
        for losses, found in (o.value[number] for o in outcomes):
            assert_like(losses, alone, exact)
            for key, value in found.items():
                assert_like(value, kept[key], exact)


def assert_like(found: Tensor, expected: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(found, expected)
    else:  # replicas add up in another order
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
