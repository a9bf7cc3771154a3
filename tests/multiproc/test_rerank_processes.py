"""A running pipeline whose nodes change places goes on with the numbers it would have had, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock as ps
from packed import packed
from penstock.runtime import RuntimeFailure
from penstock.runtime.mesh import process_mesh as mesh_nodes
from penstock.runtime.mesh.process_mesh import KEEPS_ORDER
from penstock.runtime.tensors.dtensor import whole
from processes import run_ranks_to_end
from tiers import others_nightly
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

NUM_MICROBATCHES = 4
STEPS = 5


def stage() -> nn.Module:
    """Dropout draws by the number of steps; statistics are buffers."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))


class Averaging(torch.optim.AdamW):
    """Keeps averages of the weights by parameter in an attribute, as docs/optimizers.md does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.average: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.average.setdefault(p, p.detach().clone()).lerp_(p, 0.1)


def pipeline(mesh: Any, sharding: str = "none") -> ps.Pipeline:
    """Two stages, which share a weight."""
    torch.manual_seed(7)
    return ps.Pipeline(
        [stage, stage],
        ps.build("zb-h1", 2, NUM_MICROBATCHES),
        loss_fn=nn.MSELoss(),
        optimizer=Averaging,
        mesh=mesh,
        timeout=PATIENCE,
        **packed(clip_norm=0.5, sharding=sharding, tied=[("0.0.weight", "1.0.weight")]),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 8, generator=generator), torch.randn(24, 8, generator=generator)


def numbers(pipe: ps.Pipeline, moves: dict[int, tuple[tuple[int, ...], str]]) -> list[Any]:
    """Losses, norms and last the parameters of every step, and averages of these. Before steps 1 and 3 gradients are
    left waiting for the next one.

    Args:
        moves: by step, where nodes lie from then on, and the schedule.
    """
    told: list[Any] = []
    for step in range(STEPS):
        if step in moves:
            nodes, name = moves[step]
            then = replace(pipe.configuration, nodes=nodes, schedule=ps.build(name, 2, NUM_MICROBATCHES))
            pipe.reconfigure(then)
        result = pipe.step(*batch(step), update=step not in (0, 2))
        told += [result.loss, result.grad_norm]
    named = {name: whole(p.detach()).clone() for name, p in pipe.named_parameters()}
    assert isinstance(pipe.optimizer, Averaging)
    names = {p: name for name, p in pipe.named_parameters()}
    named |= {f"average of {names[p]}": whole(average).clone() for p, average in pipe.optimizer.average.items()}
    everything = {name: p for part in pipe.gather(named) for name, p in part.items()}
    told += [everything[name] for name in sorted(everything)]
    told += [pipe.num_steps, pipe.num_updates, pipe.evaluate(*batch(9)).loss]
    return told


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def moved_and_not(rank: int, sharding: str) -> bool:
    mesh = ps.runtime.device_mesh(ps.Mesh(2, 2))
    with pipeline(mesh, sharding) as stays:
        expected = numbers(stays, {})
    last = (3, 1, 0, 2) if KEEPS_ORDER else (0, 1, 2, 3)
    with pipeline(mesh, sharding) as goes:
        return same(numbers(goes, {1: ((0, 2, 1, 3), "zb-h1"), 4: (last, "1f1b")}), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", others_nightly(["none", "zero1", "fsdp"], ["zero1", "fsdp"]))
def test_losses_are_those_of_the_run_that_stayed(sharding: str) -> None:
    for outcome in run_ranks_to_end(4, moved_and_not, sharding):
        assert outcome.value, "it went on otherwise"


def refused(rank: int) -> str:
    with pytest.raises(RuntimeFailure) as failure:  # torch's own mesh would call process 1 the second of its pipeline
        pipeline(DeviceMesh("cpu", torch.tensor([[1], [0]]), mesh_dim_names=("pp", "dp")))
    return str(failure.value)


def test_a_mesh_of_torch_in_another_order_is_refused() -> None:
    for outcome in run_ranks_to_end(2, refused):
        assert "build the mesh with ps.runtime.device_mesh(ps.Mesh(pp, dp, tp, nodes=...))" in outcome.value


def sorted_groups(rank: int) -> list[Any]:
    """As where torch sorts groups: what is refused changes nothing, and a move that keeps the order works."""
    mesh = ps.runtime.device_mesh(ps.Mesh(2, 2))
    with pipeline(mesh) as stays:
        expected = numbers(stays, {})
    mesh_nodes.KEEPS_ORDER = False
    pipe, said, made = pipeline(mesh), [], 0
    new_group = dist.new_group

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return new_group(*arguments, **options)

    turned = ps.Mesh(2, 2, nodes=(0, 3, 1, 2))  # its rings ascend, and one of its pipelines doesn't
    dist.new_group = counted
    for call in (
        lambda: pipe.reconfigure(replace(pipe.configuration, nodes=turned.nodes)),
        lambda: ps.runtime.device_mesh(turned),
    ):
        with pytest.raises(RuntimeFailure) as failure:
            call()
        said.append(str(failure.value))
    dist.new_group = new_group
    found = numbers(pipe, {1: ((0, 2, 1, 3), "zb-h1")})
    pipe.close()
    return [said, made, same(found, expected)]


def test_where_torch_sorts_groups_another_order_is_refused_before_anything_changes() -> None:
    for outcome in run_ranks_to_end(4, sorted_groups):
        said, made, is_same = outcome.value
        sorts = f"torch {torch.__version__} sorts the processes of a group; install a torch whose"
        for each in said:
            assert f"nodes can't lie so that processes [3, 2] are a group in this order: {sorts}" in each
        assert made == 0
        assert is_same


def without_replicas(rank: int) -> str:
    with pipeline(None) as pipe, pytest.raises(RuntimeFailure) as failure:
        pipe.reconfigure(replace(pipe.configuration, nodes=(1, 0)))
    return str(failure.value)


def test_nodes_of_a_pipeline_without_replicas_stay() -> None:
    for outcome in run_ranks_to_end(2, without_replicas):
        assert "only nodes of a mesh with replicas change places" in outcome.value
