"""Stages that branch and join."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import branches_runs as runs
import penstock as ps
from backends import Backend
from packed import packed
from penstock.runtime import RuntimeFailure
from tiers import in_turn

WAYS = [("frozen", False), ("dynamic", True), ("frozen", True), ("dynamic", False)]
"""The dispatch, and whether backwards are split."""


def run_all(rank: int, ranks: int) -> dict[str, list[str]]:
    names = [name for name, graph in runs.GRAPHS.items() if graph.num_stages == ranks]
    return {
        f"{name} {dispatch} {split}": runs.wrong(name, dispatch, split, exact=name in runs.EVEN)
        for number, name in enumerate(names)
        for dispatch, split in in_turn(WAYS, number)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [(Backend(1), 4), (Backend(1), 5), *(pytest.param(Backend(n), n, marks=pytest.mark.multiproc) for n in (4, 5))],
)
def test_as_the_plain_loop(backend: Backend, ranks: int) -> None:
    assert not backend.wrong(run_all, ranks)


def pipeline(graph: ps.schedule.StageGraph, **options: object) -> ps.Pipeline:
    schedule = ps.Program(ps.placements.one_to_one(graph.num_stages), 8, stages=graph).build()
    stages = [runs.Joined() if len(sources) == 2 else runs.Plain() for sources in graph.sources]
    return ps.Pipeline(stages, schedule, loss_fn=runs.MSE, **packed(**options))


def test_a_branch_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match="stages 1, 2 feed no other stage, and the loss is one stage's; lead"):
        pipeline(ps.schedule.StageGraph(3, ((0, 1), (0, 2))))


def test_microbatches_that_do_not_match_are_refused() -> None:
    graph = ps.schedule.StageGraph(3, ((0, 2), (1, 2)), num_microbatches=(8, 6, 6))
    with pytest.raises(RuntimeFailure, match="stage 0 works on 8 microbatches and stage 2, which it feeds, on 6"):
        pipeline(graph)


def test_a_steered_run_may_branch() -> None:
    pipe = pipeline(runs.GRAPHS["a skip"], steering=ps.AdaptOptions())
    assert pipe.decisions == []
    pipe.close()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            torch.zeros(16, 6),
            r"goes into stages 0, 2; give the inputs as a dict with one entry for each, .* not Tensor",
        ),
        ({0: torch.zeros(16, 6)}, "not entries 0"),
        ({0: torch.zeros(16, 6), "image": torch.zeros(16, 6)}, "not entries 0, 'image'"),
    ],
)
def test_inputs_that_are_not_one_a_tower_are_refused(inputs: object, message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        pipeline(runs.GRAPHS["two towers"]).step(inputs, torch.zeros(16, 6))


def test_a_list_cannot_be_cut_again_for_the_loss() -> None:
    inputs, targets = runs.batch_of("a large loss", 1)
    listed = {stage: list(value.tensor_split(8)) for stage, value in inputs.items()}
    with pytest.raises(
        RuntimeFailure,
        match=r"inputs of stages 0, 2 have unknown \(cut already\).* samples; give all the same number, as tensors",
    ):
        pipeline(runs.GRAPHS["a large loss"]).step(listed, targets)


def test_towers_that_are_updated_in_the_order() -> None:
    """Updates as ops of a graph with branches, against the same windows one after the other."""
    schedule = ps.passes.repeat_windows(runs.schedule_of("two towers"), 2)
    torch.manual_seed(0)
    pipes = [
        ps.Pipeline(runs.stages_of("two towers"), each, loss_fn=runs.MSE, optimizer=runs.ADAM)
        for each in (schedule, runs.schedule_of("two towers"))
    ]
    for pipe in pipes:
        for stage in pipe._local.model.every_stage():
            stage.eval()
    (a, b), (x, y) = runs.batch_of("two towers", 1), runs.batch_of("two towers", 2)
    pipes[0].step({stage: torch.cat([a[stage], x[stage]]) for stage in a}, torch.cat([b, y]))
    pipes[1].step(a, b)
    pipes[1].step(x, y)
    for (name, p), (_, q) in zip(pipes[0].named_parameters(), pipes[1].named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_first_layer_in_place_changes_no_other_part_of_a_larger_microbatch() -> None:
    """Parts that shared memory counted each other's changes, and the backward of a part then refused to run."""
    graph = ps.schedule.StageGraph(3, ((0, 1), (1, 2)), num_microbatches=(2, 8, 8))
    schedule = ps.Program(ps.placements.one_to_one(3), 8, stages=graph).build()
    results = []
    for in_place in (False, True):
        torch.manual_seed(1)
        stages = [nn.Linear(6, 6), nn.Sequential(nn.ReLU(in_place), nn.Linear(6, 6)), nn.Linear(6, 6)]
        with ps.Pipeline(stages, schedule, loss_fn=nn.MSELoss()) as pipe:
            loss = pipe.step(torch.randn(16, 6), torch.randn(16, 6), update=False).loss
        results.append([loss, *(p.grad for stage in stages for p in stage.parameters())])
    assert all(map(torch.equal, *results))
