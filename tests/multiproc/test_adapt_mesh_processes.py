"""Adapting over a mesh: a late link of a ring is moved under PP and absorbed there, and the numbers stay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.control import Configuration, Prices, replay
from penstock.cost import Links, Ring
from penstock.cost.mesh import LinkGroup
from penstock.runtime.mesh import process_mesh as mesh_nodes
from penstock.runtime.tensors.dtensor import whole
from processes import run_ranks
from waiting import PATIENCE, keep_up

pytestmark = [pytest.mark.multiproc, pytest.mark.alone]
moves = pytest.mark.skipif(not mesh_nodes.KEEPS_ORDER, reason="needs ordered-groups: this torch sorts them")

NUM_MICROBATCHES, WIDTH = 6, 8
CORNER = "0:1=latency:40ms 0:2=latency:40ms 2:3=latency:40ms"
"""Late links of four nodes of which one must be used: both rings, and a link of the first pipeline."""
LONELY = " ".join(f"{node}:7=latency:60ms" for node in (0, 1, 2, 4, 5, 6))
"""One of eight nodes has a good link to node 3 alone: beside that in a ring, it needs a late link of a pipeline."""
RING = Ring(window=72, num_chunks=1)
"""So small that the gradients of a stage (288 bytes) take several turns."""


class Busy(nn.Module):
    """A layer that takes some milliseconds, so that there is something to overlap."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return self.dropout(torch.tanh(self.linear(x)))


def pipeline(sizes: tuple[int, int, int], schedule: str, **options: Any) -> ps.Pipeline:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    return ps.Pipeline(
        [partial(Busy, stage) for stage in range(sizes[0])],
        ps.build(schedule, sizes[0], NUM_MICROBATCHES),
        loss_fn=nn.MSELoss(),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        mesh=mesh,
        timeout=PATIENCE,
        precision=ps.PrecisionOptions(clip_norm=0.5),
        **options,
    )


def leave_whole(stage: nn.Module, mesh: Any) -> None:
    """Both shards hold all of a stage: what matters here is that they move together."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.cos()


def trained(
    pipe: ps.Pipeline,
    num_steps: int,
    before: Callable[[int], None] = lambda step: None,
    is_settled: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Losses, norms, and in the end all parameters and a validation loss. The rate falls by a schedule of torch's.

    Args:
        num_steps: the most there are. The run ends sooner, three steps after one at whose end it is settled.
    """
    left = 3
    rate = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.95)
    told: list[Any] = []
    for step in range(num_steps):
        before(step)
        result = pipe.step(*batch(step))
        told += [result.loss, result.grad_norm]
        rate.step()
        if not left:
            break
        left -= is_settled()
    named = {name: whole(p.detach()).clone() for name, p in pipe.named_parameters()}
    everything = {name: p for part in pipe.gather(named) for name, p in part.items()}
    return [*told, *(everything[name] for name in sorted(everything)), pipe.evaluate(*batch(99)).loss]


MOST_STEPS = 100
"""Steps within which nodes must move and the link be absorbed: they do after thirty, or later on a busy machine."""


def has_absorbed(pipe: ps.Pipeline, start: Configuration) -> bool:
    """Whether nodes have moved and something else changed too, which all ranks know at the end of the same step."""
    now = pipe.configuration
    was, then = ((each.dispatch, each.delegated, each.schedule.name) for each in (start, now))
    return now.nodes != start.nodes and was != then


def adapted(
    rank: int, sizes: tuple[int, int, int], schedule: str, links: str, folder: str, num_steps: int, sharding: str
) -> dict[str, Any]:
    """Trains over late links until nodes have moved and the link is absorbed, or for so many steps; then without."""
    parallel = ps.ParallelOptions(sharding=sharding, parallelize=leave_whole if sizes[2] > 1 else None)
    adapt = ps.AdaptOptions(
        folder=folder if rank == 0 else None, memory_limit=float(NUM_MICROBATCHES), ring=RING, prices=Prices(move=0.0)
    )
    late = ps.TransportOptions(links=Links.parse(links))
    with pipeline(sizes, schedule, parallel=parallel, transport=late, adapt=adapt) as pipe:
        pace = partial(keep_up, Path(folder)) if rank == 0 else lambda step: None
        found = trained(pipe, num_steps, pace, partial(has_absorbed, pipe, pipe.configuration))
        told = {
            "nodes": pipe.nodes,
            "number": pipe.number,
            "digest": pipe.configuration.digest,
            "decisions": pipe.decisions,
            "notices": pipe.notices,
        }
    with pipeline(sizes, schedule, parallel=parallel) as plain:
        expected = trained(plain, pipe.num_steps)
    return {**told, "same": [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]}


def adapted_where_torch_sorts(rank: int, *arguments: Any) -> dict[str, Any]:
    mesh_nodes.KEEPS_ORDER = False
    return adapted(rank, *arguments)


def agreed(outcomes: list[Any]) -> list[dict[str, Any]]:
    """What all ranks told, who must have run the same and have the numbers of the run without late links."""
    assert all(o.code == 0 for o in outcomes), next(o.text for o in outcomes if o.code != 0)
    told = [o.value for o in outcomes]
    for each in told:
        assert all(each["same"]), "losses and parameters are those of the run without late links"
        assert all(each[name] == told[0][name] for name in ("nodes", "number", "digest"))
    return told


@moves
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "sharding"), [("1f1b", "copies"), pytest.param("zb-h1", "zero1", marks=pytest.mark.nightly)]
)
def test_a_late_link_of_a_ring_is_moved_under_pp_and_absorbed_there(
    tmp_path: Path, schedule: str, sharding: str
) -> None:
    told = agreed(run_ranks(4, adapted, (2, 2, 1), schedule, CORNER, str(tmp_path), MOST_STEPS, sharding))
    require_moved_and_absorbed(tmp_path, told, schedule, (2, 2), [(0, 1), (0, 2), (2, 3)])


@moves
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "schedule", "links", "late"),
    [
        ((4, 2, 1), "1f1b", LONELY, [(node, 7) for node in (0, 1, 2, 4, 5, 6)]),
        ((2, 2, 2), "1f1b", CORNER, [(0, 1), (0, 2), (2, 3)]),
    ],
)
def test_so_it_is_in_meshes_of_eight_processes(
    tmp_path: Path, sizes: tuple[int, int, int], schedule: str, links: str, late: list[tuple[int, int]]
) -> None:
    told = agreed(run_ranks(8, adapted, sizes, schedule, links, str(tmp_path), MOST_STEPS, "copies"))
    require_moved_and_absorbed(tmp_path, told, schedule, sizes[:2], late)


def require_moved_and_absorbed(
    folder: Path, told: list[dict[str, Any]], schedule: str, sizes: tuple[int, int], late: list[tuple[int, int]]
) -> None:
    """No late link is a ring's any more, one is a pipeline's, and more than the places has changed for it."""
    lines = (folder / "control.jsonl").read_text().splitlines()
    decisions = replay(lines)
    moves = [each for each in decisions if each.action == "move nodes"]
    assert moves, (told[0]["notices"], lines[-1][:300])
    moved = ps.Mesh(*sizes, nodes=moves[0].configuration.nodes)
    uses = {moved.use(*link).group for link in late}
    assert LinkGroup.PP in uses
    assert LinkGroup.DP not in uses
    start = json.loads(lines[0])["controller"]["job"]["start"]
    then = [each.configuration for each in decisions if each.configuration.nodes == moves[0].configuration.nodes]
    assert any(
        each.dispatch != start["dispatch"] or each.delegated or each.schedule.name != schedule for each in then
    ), "and absorbed there"
    assert told[0]["nodes"] == moves[0].configuration.nodes


@moves
@pytest.mark.nightly
def test_of_four_ranks_and_two_replicas_nodes_move_from_a_late_ring(tmp_path: Path) -> None:
    told = agreed(run_ranks(8, adapted, (4, 2, 1), "zb", "6:7=latency:60ms", str(tmp_path), MOST_STEPS, "copies"))
    assert told[0]["number"] >= 1, told[0]["notices"]
    assert ps.Mesh(4, 2, nodes=told[0]["nodes"]).use(6, 7).group is not LinkGroup.DP


@pytest.mark.slow
def test_where_nodes_stay_their_links_are_still_measured_and_answered(tmp_path: Path) -> None:
    """Several pipelines: what an iteration takes with its rings is not predicted."""
    told = agreed(run_ranks(4, adapted, (2, 2, 1), "chimera", "0:2=latency:30ms", str(tmp_path), 12, "zero1"))
    assert told[0]["nodes"] == (0, 1, 2, 3)
    assert any("nodes stay where they lie" in notice for notice in told[0]["notices"])
    rows = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]
    assert rows[-1]["links"]["0:1"] >= 30, "of each link what the slowest replica says"


def adapts_without_an_optimizer(rank: int) -> list[str]:
    mesh = ps.runtime.device_mesh(ps.Mesh(pp=1, dp=2))
    schedule = ps.build("1f1b", 1, 2)
    with ps.Pipeline([partial(Busy, 0)], schedule, loss_fn=nn.MSELoss(), mesh=mesh, adapt=ps.AdaptOptions()) as pipe:
        return pipe.notices


def test_nodes_stay_where_no_optimizer_is_given() -> None:
    """An optimizer of the user's own kept the parameters of the old place, and from then on nothing was trained."""
    for outcome in run_ranks(2, adapts_without_an_optimizer):
        assert any("late: no optimizer is given" in notice for notice in outcome.value or ()), outcome.text


@pytest.mark.slow
def test_where_torch_sorts_groups_nodes_stay_and_a_notice_says_why(tmp_path: Path) -> None:
    """A late link of a ring, which would be moved under PP, and one of pipelines, which is measured as ever."""
    late = "0:1=latency:40ms 0:2=latency:40ms"
    told = agreed(run_ranks(4, adapted_where_torch_sorts, (2, 2, 1), "1f1b", late, str(tmp_path), 10, "copies"))
    assert told[0]["nodes"] == (0, 1, 2, 3)
    for each in told:
        (notice,) = (notice for notice in each["notices"] if "nodes stay where they lie" in notice)
        assert f"torch {torch.__version__} sorts the processes of a group; install a torch whose" in notice
        assert not any("could not move" in notice for notice in each["notices"])
    assert all(each["action"] != "move nodes" for each in told[0]["decisions"])
    rows = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]
    assert rows[-1]["links"]["0:1"] >= 30, "what adapting can still do, it does"
