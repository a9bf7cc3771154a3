"""Weights tied between stages of a graph that is no chain: towers, and stages with other numbers of microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import branches_runs as runs
import penstock as ps
from penstock.runtime import RuntimeFailure
from plain_loop import differences

CHAIN = ((0, 1), (1, 2), (2, 3))


def tied_stages(name: str, first: int, second: int) -> list[nn.Module]:
    stages = runs.stages_of(name)
    stages[second].linear.weight = stages[first].linear.weight
    return stages


def one_rank_after_the_other(graph: ps.schedule.StageGraph, num_ranks: int) -> ps.Schedule:
    return ps.Program(ps.placements.circular(num_ranks, graph.num_stages), runs.NUM, stages=graph).build()


def with_last_towers_first(schedule: ps.Schedule) -> ps.Schedule:
    """The same on one rank, with the backwards of each microbatch in the order of a plain loop."""
    (row,) = schedule.order
    backwards = sorted((op for op in row if op.kind == "B"), key=lambda op: (op.microbatch, -op.stage))
    return replace(schedule, order=(tuple(op for op in row if op.kind == "F") + tuple(backwards),))


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> str:
    graph = ps.schedule.StageGraph(4, CHAIN, num_microbatches=(8, 8, 4, 4))
    monkeypatch.setitem(runs.GRAPHS, "fewer in the end", graph)
    return "fewer in the end"


def unlike_the_loop(
    name: str, tie: tuple[int, int], schedule: ps.Schedule, exact: bool, dispatch: str = "frozen"
) -> list[str]:
    plain, stages = tied_stages(name, *tie), tied_stages(name, *tie)
    inputs, targets = runs.batch_of(name, 1)
    loss = runs.plain_step(name, plain, inputs, targets, 1)
    wanted = {f"{stage}.{n}": p.grad for stage, module in enumerate(plain) for n, p in module.named_parameters()}
    with ps.Pipeline(stages, schedule, loss_fn=runs.MSE, optimizer=runs.ADAM, dispatch=dispatch) as pipe:
        result = pipe.step(inputs, targets, update=False)
        own = {n: p.grad for n, p in pipe.named_parameters()}
    wanted = {n: wanted[n] for n in own}
    assert f"{tie[0]}.linear.weight" in own
    assert f"{tie[1]}.linear.weight" not in own
    assert torch.equal(result.loss, loss) if exact else torch.allclose(result.loss, loss)
    if exact:
        return differences(wanted, own)
    return [n for n in own if not torch.allclose(wanted[n], own[n], rtol=1e-5, atol=1e-7)]  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tie", [(0, 1), (2, 3)])
def test_stages_with_as_many_microbatches_may_share_a_weight(chain: str, tie: tuple[int, int], split: bool) -> None:
    assert not unlike_the_loop(chain, tie, runs.schedule_of(chain, split), exact=False)


@pytest.mark.parametrize("tie", [(0, 3), (1, 2)])
def test_stages_with_other_numbers_of_microbatches_may_not(chain: str, tie: tuple[int, int]) -> None:
    names = " and ".join([r"different numbers of microbatches", "a tied parameter that they share"])
    shared = rf"{tie[0]}.linear.weight, {tie[1]}.linear.weight of stages {tie[0]}, {tie[1]}"
    with pytest.raises(RuntimeFailure, match=rf"{names} \({shared}\) exclude one another: .* have other samples"):
        ps.Pipeline(tied_stages(chain, *tie), runs.schedule_of(chain), loss_fn=runs.MSE, optimizer=runs.ADAM)


@pytest.mark.parametrize("tie", [(0, 2), (1, 2), (0, 3), (1, 3)])
def test_towers_may_share_a_weight(tie: tuple[int, int]) -> None:
    assert not unlike_the_loop("two towers", tie, runs.schedule_of("two towers"), exact=True)


def test_towers_of_one_rank_may_share_a_weight_where_the_backwards_of_the_last_come_first() -> None:
    graph = runs.GRAPHS["two towers"]
    schedule = one_rank_after_the_other(graph, 1)
    refused = (
        r"none feeds the other, in a frozen order that runs backwards of the lower one first and a tied .* untie them"
    )
    with pytest.raises(RuntimeFailure, match=refused):
        ps.Pipeline(tied_stages("two towers", 0, 3), schedule, loss_fn=runs.MSE)
    assert not unlike_the_loop("two towers", (0, 3), schedule, exact=True, dispatch="dynamic")
    turned = with_last_towers_first(schedule)
    ps.check(turned)
    assert not unlike_the_loop("two towers", (0, 3), turned, exact=True)
    pipe = ps.Pipeline(tied_stages("two towers", 0, 3), turned, loss_fn=runs.MSE)
    with pipe, pytest.raises(RuntimeFailure, match=refused):
        pipe.reconfigure(replace(pipe.configuration, schedule=schedule))
