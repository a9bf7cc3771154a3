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
from penstock.runtime.migrate import Placed
from penstock.runtime.tensors.dtensor import whole
from processes import run_ranks
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

NUM_MICROBATCHES = 4
STEPS = 5


def stages(num_stages: int, width: int = 8) -> list[nn.Module]:
    """Dropout draws by the number of steps; statistics are buffers; the first and the last stage share a weight."""
    torch.manual_seed(7)
    made: list[nn.Module] = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2))
        for _ in range(num_stages)
    ]
    made[-1][0].weight = made[0][0].weight  # type: ignore[index, union-attr]
    return made


def maker(pp: int, schedule: str, made: list[nn.Module] | None = None, **options: Any) -> Any:
    def make(device_mesh: Any) -> ps.Pipeline:
        return ps.Pipeline(
            stages(pp) if made is None else made,
            ps.build(schedule, pp, NUM_MICROBATCHES),
            loss_fn=nn.MSELoss(),
            optimizer=torch.optim.AdamW,
            mesh=device_mesh,
            timeout=PATIENCE,
            **packed(clip_norm=0.5, **options),
        )

    return make


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 8, generator=generator), torch.randn(24, 8, generator=generator)


def numbers(placed: Placed, moves: dict[int, tuple[ps.Mesh, Any]]) -> tuple[list[Any], list[int]]:
    """Losses, norms and last the parameters of every step; and what each move fetched. Before steps 1 and 3 gradients
    are left waiting for the next one."""
    told: list[Any] = []
    received = []
    for step in range(STEPS):
        if step in moves:
            placed.move(*moves[step])
            received.append(placed.received)
        result = placed.pipe.step(*batch(step), update=step not in (0, 2))
        told += [result.loss, result.grad_norm]
    named = {name: whole(p.detach()).clone() for name, p in placed.pipe.named_parameters()}
    everything = {name: p for part in placed.pipe.gather(named) for name, p in part.items()}
    told += [everything[name] for name in sorted(everything)]
    told += [placed.pipe.num_steps, placed.pipe.num_updates, placed.pipe.evaluate(*batch(9)).loss]
    return told, received


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def moved_and_not(rank: int, sizes: tuple[int, int], sharding: str, places: list[Any]) -> Any:
    pp, dp = sizes
    stays = Placed(maker(pp, "zb-h1", sharding=sharding), ps.Mesh(pp, dp))
    expected, _ = numbers(stays, {})
    stays.pipe.close()
    goes = Placed(maker(pp, "zb-h1", sharding=sharding), ps.Mesh(pp, dp))
    moves = {step: (ps.Mesh(pp, dp, nodes=nodes), maker(pp, name, sharding=sharding)) for step, nodes, name in places}
    found, received = numbers(goes, moves)
    return same(found, expected), received


SQUARE = [(1, (0, 2, 1, 3), "zb-h1"), (4, (3, 1, 0, 2) if KEEPS_ORDER else (0, 1, 2, 3), "1f1b")]
LINE = [(1, (0, 3, 2, 1), "1f1b"), (3, (2, 0, 3, 1), "zb-h1")]
"""A line of nodes has no other order where torch sorts groups."""


@pytest.mark.parametrize(
    ("sizes", "places", "sharding"),
    [
        ((2, 2), SQUARE, "none"),
        ((2, 2), SQUARE, "zero1"),
        ((2, 2), SQUARE, "fsdp"),
        *([((4, 1), LINE, "none")] if KEEPS_ORDER else []),
    ],
)
def test_losses_are_those_of_the_run_that_stayed(sizes: tuple[int, int], places: list[Any], sharding: str) -> None:
    outcomes = run_ranks(4, moved_and_not, sizes, sharding, places)
    for outcome in outcomes:
        assert outcome.code == 0, outcome.text
        assert outcome.value[0], "it went on otherwise"
    first = [outcome.value[1][0] for outcome in outcomes]
    before, after = ps.Mesh(*sizes), ps.Mesh(*sizes, nodes=places[0][1])
    fetching = {node for node, _ in before.fetching(after)}
    assert all(first[node] > 0 for node in fetching)
    if sharding == "none":
        assert {node for node in range(4) if first[node]} == fetching, "who keeps its rank fetches nothing"


def refused(rank: int) -> list[str]:
    said = []
    placed = Placed(maker(2, "1f1b"), ps.Mesh(2))
    placed.pipe.step(*batch(0))
    other: Any = lambda mesh: ps.Pipeline(  # noqa: E731
        [nn.Linear(8, 8), nn.Linear(8, 4)],
        ps.build("1f1b", 2, 4),
        optimizer=torch.optim.AdamW,
        mesh=mesh,
        timeout=PATIENCE,
    )
    kept = stages(2)
    again = maker(2, "1f1b", kept)
    turned = ps.Mesh(2, nodes=(1, 0) if KEEPS_ORDER else (0, 1))
    placed.move(ps.Mesh(2), again)
    for then, make in ((ps.Mesh(1, 2), None), (turned, other), (ps.Mesh(2), again)):
        with pytest.raises(RuntimeFailure) as failure:
            placed.move(then, make)
        said.append(str(failure.value))
    loss = placed.pipe.step(*batch(1)).loss  # it goes on where it is
    stays = Placed(maker(2, "1f1b"), ps.Mesh(2))
    assert [stays.pipe.step(*batch(step)).loss for step in (0, 1)][1] == loss
    with pytest.raises(RuntimeFailure) as failure:
        Placed(maker(2, "1f1b"), ps.Mesh(3))
    said.append(str(failure.value))
    with pytest.raises(RuntimeFailure) as failure:  # torch's own mesh would call process 1 the second of its pipeline
        maker(2, "1f1b")(DeviceMesh("cpu", torch.tensor([[1], [0]]), mesh_dim_names=("pp", "dp")))
    return [*said, str(failure.value)]


def test_what_cannot_be_moved_is_refused_everywhere_alike() -> None:
    for outcome in run_ranks(2, refused):
        assert outcome.code == 0, outcome.text
        sizes, model, fresh, processes, order = outcome.value
        assert "from a mesh of 2 x 1 x 1 to one of 1 x 2 x 1: nodes can change places, not sizes" in sizes
        assert "of the same model" in model or "build both from one model" in model
        assert "build fresh stages in `make`" in fresh
        assert "has 3 processes, torch.distributed has 2" in processes
        assert "build the mesh with ps.runtime.device_mesh(ps.Mesh(pp, dp, tp, nodes=...))" in order


def sorted_groups(rank: int) -> list[Any]:
    """As where torch sorts groups: what is refused changes nothing, and a move that keeps the order works."""
    stays = Placed(maker(2, "1f1b"), ps.Mesh(2, 2))
    expected, _ = numbers(stays, {})
    stays.pipe.close()
    mesh_nodes.KEEPS_ORDER = False
    placed = Placed(maker(2, "1f1b"), ps.Mesh(2, 2))
    before, said, made = placed.pipe, [], 0
    new_group = dist.new_group

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return new_group(*arguments, **options)

    turned = ps.Mesh(2, 2, nodes=(0, 3, 1, 2))  # its rings ascend, and one of its pipelines doesn't
    costs = ps.Costs(f=(2.0, 2.0), i=(2.0, 2.0), w=(2.0, 2.0), gradient_bytes=(8.0, 8.0))
    job = ps.control.Job(costs, ps.control.Configuration(before.schedule, "frozen", caps=(8.0, 8.0)))
    dist.new_group = counted
    for call in (
        lambda: placed.move(turned),
        lambda: placed.watch(ps.control.Orchestrator(job, ps.Mesh(2, 2))),
        lambda: before.reconfigure(replace(before.configuration, nodes=turned.nodes)),
        lambda: ps.runtime.device_mesh(turned),
    ):
        with pytest.raises(RuntimeFailure) as failure:
            call()
        said.append(str(failure.value))
    dist.new_group = new_group
    assert placed.pipe is before
    found, _ = numbers(placed, {1: (ps.Mesh(2, 2, nodes=(0, 2, 1, 3)), None)})
    return [said, made, same(found, expected)]


def test_where_torch_sorts_groups_another_order_is_refused_before_anything_changes() -> None:
    for outcome in run_ranks(4, sorted_groups):
        assert outcome.code == 0, outcome.text
        said, made, is_same = outcome.value
        sorts = f"torch {torch.__version__} sorts the processes of a group; install a torch whose"
        for each in (said[0], *said[2:]):
            assert f"nodes can't lie so that processes [3, 2] are a group in this order: {sorts}" in each
        assert f"watching would move nodes, which can't lie in any order here: {sorts}" in said[1]
        assert made == 0
        assert is_same


def without_replicas(rank: int) -> str:
    with maker(2, "1f1b")(None) as pipe, pytest.raises(RuntimeFailure) as failure:
        pipe.reconfigure(replace(pipe.configuration, nodes=(1, 0)))
    return str(failure.value)


def test_nodes_of_a_pipeline_without_replicas_stay() -> None:
    for outcome in run_ranks(2, without_replicas):
        assert outcome.code == 0, outcome.text
        assert "nodes can't lie at (1, 0): only those of a mesh with replicas change places" in outcome.value
