"""What several ranks run together, between processes: shared stages, whole and cut, gathers, asynchronous ones."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gang_runs as runs
import penstock as ps
from penstock.runtime.mesh.peers import groups_of_processes
from processes import appears, run_ranks
from tiers import chosen
from waiting import PATIENCE, shorten

pytestmark = pytest.mark.multiproc
SHARED = [(False, False, "host", "frozen"), (False, True, "host", "dynamic"), (True, True, "direct", "frozen")]
TOWERS = [
    (False, False, "frozen", "host"),
    (True, True, "dynamic", "delegate"),
    (True, True, "frozen", "host"),
    (True, False, "dynamic", "direct"),
]


def ran(function: Any, *args: Any) -> list[Any]:
    outcomes = run_ranks(runs.NUM_RANKS, function, *args)
    assert all(outcome.value is not None for outcome in outcomes), outcomes[0].text
    return [pickle.loads(outcome.value) for outcome in outcomes]


def gpt(rank: int) -> bytes:
    """All the ways to share stages, in one start of the processes."""
    made = [
        runs.train_gpt(ps.build("mllm", runs.NUM_RANKS, runs.NUM), tied, cut, transport=transport, dispatch=dispatch)
        for tied, cut, transport, dispatch in SHARED
    ]
    return pickle.dumps(made)


@pytest.mark.slow
def test_a_gpt_whose_embedding_and_head_are_on_all_ranks() -> None:
    torch.set_num_threads(1)
    plain = ps.build("gpipe", runs.NUM_RANKS + 2, runs.NUM)
    want = [runs.train_gpt(plain, tied, False) for tied in (False, False, True)]
    for found in ran(gpt):
        for place, ((steps, told), (wanted, evaluated)) in enumerate(zip(found, want, strict=True)):
            assert not runs.differences(wanted, steps, exact=place == 0), place
            assert told == pytest.approx(evaluated, rel=1e-5)
            assert any("layers.0" in name for name in steps[0][1])


def towers(rank: int) -> bytes:
    made = []
    for asynchronous, split, dispatch, transport in TOWERS:
        program = runs.towers(asynchronous, split)
        steps, timeline = runs.train_towers(program, dispatch=dispatch, transport=transport)
        made.append((steps, timeline.executed().order, [[t.op for t in row] for row in timeline.streams]))
    return pickle.dumps(made)


@pytest.mark.slow
def test_towers_whose_loss_a_gather_makes() -> None:
    torch.set_num_threads(1)
    want = runs.plain_towers()
    for found in ran(towers):
        for (asynchronous, split, dispatch, _), (steps, order, streams) in zip(TOWERS, found, strict=True):
            schedule = runs.towers(asynchronous, split).build()
            assert not runs.differences(want, steps), (asynchronous, split, dispatch)
            if dispatch == "frozen":
                assert order == schedule.order
            gathers = [ps.Op("GATHER", 1, k) for k in range(runs.NUM // runs.EVERY)] if asynchronous else []
            assert streams == [[], gathers, [], gathers]


def emulated(rank: int) -> bytes:
    found = []
    for schedule, costs in runs.emulations():
        run = ps.emulate(schedule, costs, timeout=PATIENCE)
        measured, simulated = run.timelines[0], run.simulated[0]
        same = [
            [timed.op for timed in row] == [timed.op for timed in other]
            for row, other in zip(
                [*measured.rows, *measured.streams], [*simulated.rows, *simulated.streams], strict=True
            )
        ]
        found.append((all(same), measured.makespan >= 0.98 * simulated.makespan))
    return pickle.dumps(found)


@pytest.mark.slow
def test_emulated_ranks_meet_for_what_they_run_together() -> None:
    for found in ran(emulated):
        assert found == [(True, True)] * len(found)


def hindered(rank: int, asynchronous: bool, stands_still: bool, folder: Path) -> None:
    """A step in which one of a gather's ranks fails, or stands still until another one has given up."""
    program = runs.towers(asynchronous)
    functions = dict(program.callables)

    def hinder(call: ps.runtime.OpCall) -> None:
        if not stands_still:
            raise ValueError("no gather here")
        appears(folder / "gave up")

    if rank == 3:
        functions["GATHER"] = hinder
    pipe = ps.Pipeline(runs.tower_stages(), program.build(), ops=functions, timeout=PATIENCE)
    if stands_still and rank != 3:
        shorten(pipe, 2.0)
    try:
        pipe.step(runs.pairs())
    finally:
        (folder / "gave up").touch()


@pytest.mark.slow
@pytest.mark.parametrize(("asynchronous", "stands_still"), [(False, False), (True, True)])
def test_a_rank_that_fails_or_stands_still_is_told_of(asynchronous: bool, stands_still: bool, tmp_path: Path) -> None:
    outcomes = run_ranks(runs.NUM_RANKS, hindered, asynchronous, stands_still, tmp_path)
    assert [outcome.code for outcome in outcomes] == [1] * runs.NUM_RANKS
    assert ("no gather here" in outcomes[3].text) == (not stands_still)
    for outcome in outcomes[:3]:  # whose own deadline is not the first loses another rank
        assert "PeerLost" in outcome.text or (stands_still and "DeadlineExceeded" in outcome.text)
    assert not stands_still or any("DeadlineExceeded" in outcome.text for outcome in outcomes)


def over_meshes(rank: int) -> bytes:
    """Pipelines that cut embedding and head over their two ranks, or have both whole on each, one after another."""
    made = {}
    for name, (tied, cut, sharding, dispatch) in OVER_MESHES.items():
        shape = (2, 1, 2) if name.startswith("shards") else (2, 2, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        schedule = ps.build("mllm", 2, runs.NUM // shape[1])
        options: dict[str, Any] = {"mesh": mesh, "sharding": sharding, "dispatch": dispatch}
        made[name] = runs.train_gpt(schedule, tied, cut, dropout_of(name), **options)
    return pickle.dumps(made)


OVER_MESHES = chosen(
    {
    "replicas": (False, True, "none", "frozen"),
    "replicas, tied, whole": (True, False, "none", "frozen"),
    "replicas, zero1, tied": (True, True, "zero1", "frozen"),
    "replicas, fsdp": (False, True, "fsdp", "frozen"),
    "replicas, fsdp, whole": (False, False, "fsdp", "frozen"),
    "replicas, fsdp, tied": (True, True, "fsdp", "frozen"),
    "replicas, fsdp, tied, whole, dynamic": (True, False, "fsdp", "dynamic"),
    "shards": (False, True, "none", "frozen"),
    "shards, tied": (True, True, "none", "frozen"),
    "shards, tied, dynamic": (True, True, "none", "dynamic"),
    },
    by_day=[
        "replicas, fsdp, tied, whole, dynamic", "shards, tied, dynamic",
    ],
)  # fmt: skip
"""Whether embedding and head are one, whether they are cut; sharding and dispatch."""


def dropout_of(name: str) -> float:
    return (
        0.0 if name.startswith("shards") else runs.CONFIG.dropout
    )  # each shard's heads drop out numbers of their own


@pytest.mark.slow
def test_shared_stages_over_meshes() -> None:
    torch.set_num_threads(1)
    plain = ps.build("gpipe", 4, runs.NUM)
    expected = {
        name: runs.train_gpt(plain, tied, False, dropout_of(name)) for name, (tied, _, _, _) in OVER_MESHES.items()
    }
    for found in ran(over_meshes):
        for name, (steps, evaluated) in found.items():
            want, told = expected[name]
            assert not runs.differences(want, steps), name
            assert evaluated == pytest.approx(told, rel=1e-5), name


def groups_of_some_then_of_all(rank: int) -> int:
    groups_of_processes({"some": [1, 3]}, PATIENCE, whole=True)
    made = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=PATIENCE), use_local_synchronization=True)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=made)
    return int(total)


def test_a_group_of_some_ranks_does_not_keep_later_ones_from_meeting() -> None:
    """Torch names a group that its members make after how many groups they know, which must be alike."""
    outcomes = run_ranks(4, groups_of_some_then_of_all)
    assert [o.value for o in outcomes] == [6] * 4, outcomes[0].text
