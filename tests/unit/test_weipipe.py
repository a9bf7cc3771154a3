"""Registered ops where a placement has several pipelines: weights that circulate over the ranks (WeiPipe)."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.dispatch.queues import Lister
from penstock.draw import to_svg
from waiting import PATIENCE


def weipipe(p: int, n: int, split: bool = False, asynchronous: bool = True, time: float = 0.5) -> ps.Program:
    """Every rank has all stages for its own microbatches; weights come round, once forward and once backward."""
    how = {"time": time, "asynchronous": asynchronous, "passed_on": True}
    ops = [ps.NewOp("WEIGHTS", s, before={("F", s): 1}, **how) for s in range(p)]
    ops += [ps.NewOp("RETURN", s, after={("F", p - 1): 1}, before={("B", s): 1}, **how) for s in reversed(range(p))]
    ring = ps.placements.table([[k] * p for k in range(p)])
    return ps.Program(
        ring, n, ps.Rules(max_in_flight=p), split, links=ps.Links(default=0.25), ops=ops, name="weipipe"
    )


@pytest.mark.parametrize("seed", range(12))
def test_they_are_listed_timed_proved_kept_and_drawn_alike(seed: int, tmp_path: Path) -> None:
    """They were refused where a placement has several pipelines."""
    source = random.Random(seed)
    program = weipipe(
        source.randint(2, 4), source.randint(1, 9), source.random() < 0.5, source.random() < 0.5, source.uniform(0, 2)
    )
    made, graph = program.build(), program.queues()
    timed = ps.simulate(made, program.all_costs, links=program.links)
    for compile in (False, True):
        lister = Lister(graph, compile)
        assert lister.list_by_rules(program.tables(graph)).makespan == pytest.approx(timed.makespan)
    ps.check(made)
    assert ps.parse(str(made)) == made
    ps.save(made, tmp_path / "weipipe.json")
    assert ps.load(tmp_path / "weipipe.json") == made
    assert to_svg(timed).startswith("<svg")
    runs = [*timed.ops, *(run for row in timed.streams for run in row)]
    ended, begun = {run.op: run.end for run in runs}, {run.op: run.start for run in runs}
    for op, start in begun.items():
        if op.kind in ("WEIGHTS", "RETURN"):
            assert start + 1e-9 >= ended.get(op._replace(microbatch=op.microbatch - 1), -1.0) + 0.25 * (
                op.microbatch > 0
            )
            back = "I" if program.split else "B"
            assert begun[op._replace(kind="F" if op.kind == "WEIGHTS" else back)] + 1e-9 >= ended[op]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_it_is_run_as_a_loop_that_sums_by_pipeline(split: bool, dispatch: str) -> None:
    p, n = 3, 6
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(p)))
    inputs, targets = torch.randn(2 * n, 4), torch.randn(2 * n, 4)
    called: list[ps.Op] = []
    note = {kind: lambda call: called.append(call.op) for kind in ("WEIGHTS", "RETURN")}
    pipe = ps.Pipeline(
        copy.deepcopy(model),
        weipipe(p, n, split).build(),
        loss_fn=nn.MSELoss(),
        ops=note,
        dispatch=dispatch,
        timeout=PATIENCE,
    )
    pipe.step(inputs, targets, update=False)
    sums = []
    for k in range(p):
        mine = copy.deepcopy(model)
        for m in range(k, n, p):
            (nn.functional.mse_loss(mine(inputs.chunk(n)[m]), targets.chunk(n)[m]) / n).backward()
        sums.append([parameter.grad for parameter in mine.parameters()])
    wanted = [(a + b) + c for a, b, c in zip(*sums, strict=True)]
    assert all(torch.equal(got.grad, want) for got, want in zip(pipe.parameters(), wanted, strict=True))
    assert len(called) == len(set(called)) == 2 * p * n
    pipe.close()


def test_users_functions_see_the_ops_of_every_pipeline() -> None:
    """An op of a registered kind was looked for by its number among those of the first pipeline."""
    seen: list[tuple[int, bool]] = []

    def look(view: ps.program.View, op: ps.Op) -> bool:
        if op.kind == "F" and op.stage == 0:
            seen.append((op.microbatch, view.has_run(ps.Op("WEIGHTS", 0, op.microbatch))))
        return True

    program = replace(weipipe(3, 6), rules=ps.Rules(max_in_flight=3, check=look))
    ps.check(program.build())
    assert {m for m, _ in seen} == set(range(6))
    assert all(has_run for _, has_run in seen)


def test_what_cannot_be_said_of_several_pipelines_is_refused() -> None:
    ring = ps.placements.bidirectional(ps.placements.one_to_one(2))
    every = {("F", 0): 2}
    for op, options, message in (
        (
            ps.NewOp("GATHER", 0, every),
            {},
            "2 ops of kind GATHER of stage 0 on a placement with 2 pipelines: each op",
        ),
        (
            ps.NewOp("GATHER", 0, {("F", 0): 1}, on=(0, 1)),
            {},
            "4 ops of kind GATHER of stage 0 on a placement with 2",
        ),
        (
            ps.NewOp("WEIGHTS", 0, before={("F", 0): 1}, passed_on=True),
            {"pipelines": [0, 0, 1, 1]},
            "ops of kind WEIGHTS of stage 0 are named one by one",
        ),
    ):
        with pytest.raises(ps.ScheduleError, match=message):
            ps.Program(ring, 4, ops=[op], **options).build()
    program = weipipe(2, 4)
    with pytest.raises(ps.ScheduleError, match="are not planned; build the schedule with"):
        ps.plan(program.all_costs, 2, 4, placement=program.placement, stages=program.stage_graph)
